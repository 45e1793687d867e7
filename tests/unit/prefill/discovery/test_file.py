"""Endpoints from a file: what may be in it, and that it is read while it changes."""

import asyncio
from pathlib import Path

import pytest

from sidecar.prefill.discovery.file import LOOK_EVERY_S, MAX_BYTES, BadFile, FileSource, endpoints_of
from tests.unit import clock
from tests.unit.prefill.discovery.world import World

SOON_S = 2 * LOOK_EVERY_S


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", []),
        (b"\n# none yet\n", []),
        (b"10.0.0.1:8000 # one\n\n  prefill-0:8000", ["10.0.0.1:8000", "prefill-0:8000"]),
        (b"a:1\r\na:1\r\n", ["a:1"]),
        (b"[::1]:80\n[::2]:80\n", ["[::1]:80", "[::2]:80"]),
        (b"- a:1\n- 'b:2' # two\n", ["a:1", "b:2"]),
        (b"[a:1, b:2]", ["a:1", "b:2"]),
        (b"[\n  a:1,\n]", ["a:1"]),
        (b"---\n- a:1\n", ["a:1"]),
        (b"---\n", []),
        (b"[]", []),
    ],
)
def test_contents(content: bytes, labels: list[str]) -> None:
    assert [str(address) for address in endpoints_of(content)] == labels


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a:1\nb\nc:1\n", "line 2: 'b' is not HOST:PORT"),
        (b"# x\n\na:99999\n", "line 3: 'a:99999' has no port"),
        (b"a:1\nb:2 c:3\n", "line 2"),
        (b"- a:1\n- host: b\n", "line 2: not HOST:PORT"),
        (b"- a:1\n- b\n", "line 2: 'b' is not"),
        (b"[a:1,\nb:2", "line 2: not valid YAML"),
        (b"--- {a: 1}", "line 1: not a list"),
        (b"a:1\n\xff\n", "line 2: not UTF-8"),
        (b"- &a [*a]", "line 1"),
        (b"[" * 5000, "line 1"),
    ],
)
def test_mistakes_name_the_line(content: bytes, says: str) -> None:
    with pytest.raises(BadFile) as caught:
        endpoints_of(content)
    assert says in str(caught.value)


def test_changes(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    path.write_text("a:1\n")

    async def play() -> None:
        async with World(FileSource(str(path))) as world:
            await world.until(["a:1"])
            path.write_text("b:1\n")
            await world.until(["b:1"])
            other = tmp_path / "other"
            other.write_text("c:1\nd:1\n")
            other.replace(path)
            await world.until(["c:1", "d:1"])
            path.write_text("")
            await world.until([])
            assert not world.errors

    clock.run(play())


def test_config_map_swapped_by_a_link(tmp_path: Path) -> None:
    """As the kubelet does it: ..data points to another directory from one moment to the next."""
    for name, content in (("..1", "a:1"), ("..2", "b:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "endpoints").write_text(content)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "endpoints").symlink_to("..data/endpoints")

    async def play() -> None:
        async with World(FileSource(str(tmp_path / "endpoints"))) as world:
            await world.until(["a:1"])
            (tmp_path / "..new").symlink_to("..2")
            (tmp_path / "..new").replace(tmp_path / "..data")
            await world.until(["b:1"])
            assert not world.errors

    clock.run(play())


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    path.write_text("a:1\nb:1\n")

    async def play() -> None:
        async with World(FileSource(str(path))) as world:
            await world.until(["a:1", "b:1"])
            path.write_text("a:1\nb:\n")
            await world.until_failing("bad_file")
            assert f"{path} line 2: 'b:' has no port" in world.discovery.problem
            await asyncio.sleep(10)
            assert world.labels == ["a:1", "b:1"]
            assert world.discovery.age_s > 9
            path.write_text("a:1\nb:1\n")
            await asyncio.sleep(SOON_S)
            assert not world.discovery.problem
            assert world.discovery.age_s < SOON_S
            path.write_bytes(b"#" * (MAX_BYTES + 1))
            await world.until_failing("bad_file")

    clock.run(play())


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    """Cut anywhere, a line may still be an address: what grows from look to look is waited for."""
    path = tmp_path / "endpoints"
    path.write_text("a:1\n")
    whole = "prefill-0:8000\nprefill-1:8000\nprefill-2:8000\n"

    async def play() -> None:
        async with World(FileSource(str(path))) as world:
            await world.until(["a:1"])
            for end in range(len(whole) + 1):
                path.write_text(whole[:end])
                await asyncio.sleep(0.07)
                assert world.labels == ["a:1"], whole[:end]
            await world.until(["prefill-0:8000", "prefill-1:8000", "prefill-2:8000"])
            assert not world.errors

    clock.run(play())


def test_missing(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"

    async def play() -> None:
        async with World(FileSource(str(path))) as world:
            await world.until_failing("missing")
            assert f"{path} does not exist" in world.discovery.problem
            path.write_text("a:1")
            await world.until(["a:1"])
            assert not world.discovery.problem
            path.unlink()
            await world.until_failing("missing")
            assert world.labels == ["a:1"]
            path.mkdir()
            await world.until_failing("unreadable")
            assert world.labels == ["a:1"]

    clock.run(play())
