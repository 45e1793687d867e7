"""The switch: the last word counts, whoever said it, and a mistake changes nothing."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sidecar import config
from sidecar.admin.switch import LOOK_EVERY_S, File, Switch
from sidecar.decision.guards import Mode
from sidecar.edge.service import Live
from sidecar.settings import Settings
from tests.unit import clock


class World:
    """A sidecar's switch and its file."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path = folder / "sidecar.yaml"
        self.path.write_text("disagg: auto\n")
        self.argv = ["--config", str(self.path), *flags]
        self.live = Live(Mode.AUTO)
        self.switch = Switch(self.live)
        self.file = File(self.path, self.read, self.read(), self.switch)

    def read(self) -> Settings:
        return config.load(self.argv, {})[0]

    @property
    def mode(self) -> str:
        assert self.switch.mode is self.live.mode
        return self.live.mode.value


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def watched(world: World, told: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `told` while the file is watched."""

    async def main() -> None:
        watch = asyncio.create_task(world.file.watch())
        await asyncio.sleep(0)
        await told()
        watch.cancel()

    clock.run(main())


async def looked() -> None:
    """The file has been looked at again."""
    await asyncio.sleep(LOOK_EVERY_S + 0.1)


# -- by hand ---------------------------------------------------------------------------------------------------


def test_turns(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for mode in ("off", "on", "auto", "auto"):
        world.switch.turn(mode, "PUT /disagg")
        assert world.mode == mode
    assert [record.getMessage() for record in caplog.records] == [
        "disagg: auto -> off (PUT /disagg)",
        "disagg: off -> on (PUT /disagg)",
        "disagg: on -> auto (PUT /disagg)",
    ]


@pytest.mark.parametrize("text", ["", "ON", "true", " on", "on\n", "x" * 1000])
def test_nonsense_turns_nothing(world: World, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        world.switch.turn(text, "PUT /disagg")
    assert len(str(caught.value)) < 100
    assert world.mode == "auto"


# -- by file ---------------------------------------------------------------------------------------------------


def test_edit(world: World) -> None:
    async def told() -> None:
        world.path.write_text("disagg: off\n")
        await looked()
        assert world.mode == "off"
        world.path.write_text("disagg: on\n")
        await looked()
        assert world.mode == "on"

    watched(world, told)


def test_config_map_is_swapped_by_its_link(world: World, tmp_path: Path) -> None:
    versions = []
    for number, mode in enumerate(("on", "off")):
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        (folder / "sidecar.yaml").write_text(f"disagg: {mode}\n")
        versions.append(folder)
    world.path.unlink()
    (tmp_path / "..data").symlink_to(versions[0])
    world.path.symlink_to(tmp_path / "..data" / "sidecar.yaml")

    async def told() -> None:
        await looked()
        assert world.mode == "on"
        (tmp_path / "..new").symlink_to(versions[1])
        (tmp_path / "..new").rename(tmp_path / "..data")
        await looked()
        assert world.mode == "off"

    watched(world, told)


def test_file_that_vanishes_or_is_wrong_changes_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def told() -> None:
        world.path.unlink()
        await looked()
        assert world.mode == "auto"
        world.path.write_text("disagg: maybe\nport: x\n")
        await looked()
        assert world.mode == "auto"
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2
        assert all("file changed: not taken over: " in line for line in lines)
        world.path.write_text("disagg: off\n")
        await looked()
        assert world.mode == "off"

    watched(world, told)


def test_mistake_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def told() -> None:
        world.path.write_text("nonsense: 1\n")
        for _ in range(5):
            await looked()

    watched(world, told)
    assert len(caplog.records) == 1


def test_flag_is_stronger_than_the_file(tmp_path: Path) -> None:
    world = World(tmp_path, "--disagg", "auto")

    async def told() -> None:
        world.path.write_text("disagg: off\n")
        await looked()
        assert world.mode == "auto"

    watched(world, told)


def test_only_the_switch_is_taken_over(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.path.write_text("disagg: off\nport: 8001\nlog-level: debug\n")
    world.file.reload("SIGHUP")
    assert world.mode == "off"
    assert [record.getMessage() for record in caplog.records] == [
        "SIGHUP: not taken over while running, restart for it: --port, --log-level"
    ]


def test_the_last_word_counts(world: World) -> None:
    async def told() -> None:
        world.path.write_text("disagg: off\n")
        world.file.reload("SIGHUP")
        assert world.mode == "off"
        world.switch.turn("on", "PUT /disagg")
        await looked()
        assert world.mode == "on", "the file was read before"
        world.path.write_text("disagg: off\n# again\n")
        await looked()
        assert world.mode == "off"

    watched(world, told)
