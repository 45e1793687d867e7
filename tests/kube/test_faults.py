"""An API server that fails, in every way that one was seen to: nothing is missed, nothing hangs, nothing is asked
in a loop, and what was known stays."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from sidecar.prefill.discovery import api as api_module
from sidecar.prefill.discovery import backoff
from sidecar.prefill.discovery.cluster import Cluster
from tests.kube.api import FakeApi
from tests.kube.backend import Backend
from tests.kube.backend import play as play_against
from tests.kube.objects import ROLE, old_pool, pod, pool

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
GROUP, OLD_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes in life."""
    monkeypatch.setattr(api_module, "WATCH_S", (30, 30))
    monkeypatch.setattr(api_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(api_module, "ANSWER_S", 0.4)
    monkeypatch.setattr(api_module, "SHORT_S", 0.2)
    monkeypatch.setattr(backoff, "FIRST_S", 0.05)
    monkeypatch.setattr(backoff, "LONGEST_S", 0.3)


def play(script, **fake) -> None:  # type: ignore[no-untyped-def]
    """`script(server, backend)`, with pods a and b there from the start."""

    async def main(backend: Backend) -> None:
        server = backend.fake
        backend.selector = "llm-d.ai/role=prefill"
        server.apply("pods", pod("a", "10.0.0.1"))
        server.apply("pods", pod("b", "10.0.0.2"))
        await script(server, backend)

    play_against("fake", main, **fake)


# -- connections that end, or should --------------------------------------------------------------------------


def test_a_deletion_while_the_watch_is_away() -> None:
    """Told by the next watch, from where the last one ended; nothing is listed again."""

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await asyncio.sleep(0.1)
            server.drop_watches()
            server.delete("pods", "a")
            server.apply("pods", pod("c", "10.0.0.3"))
            await world.until([B, C])
            assert server.count("list") == 1
            assert world.errors == {"unreachable": 1}
            await world.until_well()

    play(script)


def test_a_deletion_that_the_history_no_longer_holds() -> None:
    """410: listed again, and who is not in the list has left."""

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            server.drop_watches()
            server.delete("pods", "a")
            server.apply("pods", pod("c", "10.0.0.3"))
            server.compact()
            await world.until([B, C])
            assert server.count("list") == 2
            await asyncio.sleep(0.3)
            assert server.count("list") == 2
            server.delete("pods", "b")
            await world.until([C])

    play(script)


def test_410_without_end_is_no_loop() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await asyncio.sleep(1)
            assert 2 <= server.count("list") <= 12
            server.delete("pods", "a")
            await world.until([B])

    play(script, gone_on_watch=True)


def test_watches_that_end_at_once_are_no_loop() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await asyncio.sleep(1)
            assert 2 <= server.count("watch") <= 12
            assert not world.errors

    play(script, refuses_watches_at_once=True)


def test_watches_that_end_in_time_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "WATCH_S", (1, 1))

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await asyncio.sleep(1.5)
            assert server.count("watch") == 2
            assert server.requests[-1][3]["timeoutSeconds"] == "1"
            server.delete("pods", "a")
            await world.until([B])
            assert (server.count("list"), dict(world.errors)) == (1, {})

    play(script)


def test_a_half_open_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's side is gone without a word: given up a little after its end, and the change is found."""
    monkeypatch.setattr(api_module, "WATCH_S", (1, 1))

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            server.mute_watches()
            server.delete("pods", "a")
            await asyncio.sleep(0.8)
            assert world.labels == [A, B]
            await world.until([B], 2)
            assert world.errors == {"timeout": 1}
            await world.until_well()
            assert server.count("list") == 1
            server.mute_watches()  # the old one is still there on the server's side

    play(script)


def test_a_frozen_server() -> None:
    """Who starts now knows nothing, who runs keeps what it knows; both go on when it is back."""

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as old:
            await old.until([A, B])
            server.frozen = True
            server.drop_watches()
            async with backend.world() as new:
                await new.until_failing("timeout")
                await old.until_failing("timeout")
                assert f"{server.url} does not answer" in new.discovery.problem
                assert (new.labels, old.labels) == ([], [A, B])
                assert old.discovery.age_s > 0.3
                server.delete("pods", "a")
                server.frozen = False
                await new.until([B])
                await old.until([B])
                await old.until_well()

    play(script)


def test_a_server_that_is_away() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            await world.until_failing("unreachable")
            assert world.labels == [A, B]
            server.delete("pods", "a")
            await server.start(port)
            await world.until([B])
            await world.until_well()

    play(script)


def test_bookmarks_move_the_place_where_a_watch_goes_on() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await asyncio.sleep(0.1)
            server.apply("pods", pod("c", "10.0.0.3"))
            await world.until([A, B, C])
            for _ in range(10):  # of no concern to this watch
                server.apply("pods", pod("x", "10.0.0.9", labels={}))
            await asyncio.sleep(0.4)
            server.compact()
            server.drop_watches()
            server.delete("pods", "a")
            await world.until([B, C])
            assert server.count("list") == 1

    play(script, bookmark_every_s=0.1)


# -- answers that refuse --------------------------------------------------------------------------------------


def test_no_right_to_list() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until_failing("forbidden")
            problem = world.discovery.problem
            for part in ("may not list pods in namespace llm", 'apiGroups: [""]', '["get", "list", "watch"]'):
                assert part in problem
            server.forbidden.clear()
            await world.until([A, B])
            await world.until_well()

    play(script, forbidden={("list", "pods")})


def test_no_right_to_watch() -> None:
    """Said, and made up for by lists."""

    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            await world.until_failing("forbidden")
            assert "may not watch pods" in world.discovery.problem
            server.delete("pods", "a")
            await world.until([B])

    play(script, forbidden={("watch", "pods")})


@pytest.mark.parametrize(
    ("code", "reason"), [(429, "busy"), (500, "server_error"), (503, "server_error"), (400, "refused")]
)
def test_other_refusals(code: int, reason: str) -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            server.failing = code
            server.drop_watches()
            await world.until_failing(reason)
            assert f"says {code}" in world.discovery.problem
            assert world.labels == [A, B]
            server.failing = 0
            server.delete("pods", "a")
            await world.until([B])

    play(script)


def test_a_token_that_is_replaced(tmp_path: Path) -> None:
    """Read again at every connect: the one that we began with is good for an hour."""
    token = tmp_path / "token"
    token.write_text("first\n")

    async def script(server: FakeApi, backend: Backend) -> None:
        backend.cluster = Cluster(server.url, "llm", token, None, "")
        async with backend.world() as world:
            await world.until([A, B])
            server.tokens = {"second"}
            server.drop_watches()
            await world.until_failing("unauthorized")
            assert str(token) in world.discovery.problem
            assert "first" not in world.discovery.problem
            token.write_text("second\n")
            server.delete("pods", "a")
            await world.until([B])
            async with asyncio.timeout(5):
                while not server.watches:  # noqa: ASYNC110 what is not there yet cannot be dropped
                    await asyncio.sleep(0.02)
            token.unlink()
            server.drop_watches()
            await world.until_failing("credentials")
            assert world.labels == [B]

    play(script, tokens={"first"})


def test_tls(tmp_path: Path) -> None:
    """Only a server that the account's certificate authority vouches for, which is replaced now and then too."""
    good, other = trustme.CA(), trustme.CA()
    ca = tmp_path / "ca.crt"
    other.cert_pem.write_to_path(str(ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    good.issue_cert("127.0.0.1").configure_cert(context)

    async def script(_: FakeApi, backend: Backend) -> None:
        server = FakeApi()
        server.apply("pods", pod("a", "10.0.0.1"))
        await server.start(tls=context)
        try:
            backend.cluster = Cluster(server.url, "llm", None, ca, "")
            async with backend.world() as world:
                await world.until_failing("tls")
                assert str(ca) in world.discovery.problem
                assert server.requests == []
                good.cert_pem.write_to_path(str(ca))
                await world.until([A])
                await world.until_well()
        finally:
            await server.stop()

    play(script)


# -- what is listed -------------------------------------------------------------------------------------------


def test_many_pages_and_a_history_that_ends_between_them() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        for number in range(5, 30):
            server.apply("pods", pod(f"p{number:02}", f"10.0.0.{number}"))
        expected = [A, B, *(f"10.0.0.{number}:8000" for number in range(5, 30))]
        async with backend.world() as world:
            await world.until(expected)
            assert server.count("list") == 14

    play(script, page_max=2)


def test_own_pod_is_left_out() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        backend.cluster = Cluster(server.url, "llm", None, None, "a")
        async with backend.world() as world:
            await world.until([B])

    play(script)


# -- an InferencePool -----------------------------------------------------------------------------------------

MINE = {"app": "mine", **ROLE}
OTHER = {"app": "other", **ROLE}


def pool_options(group: str = GROUP) -> dict[str, str]:
    return {"pool": "pool", "pool_group": group}


def test_a_pools_selector_and_ports() -> None:
    """Both may change; pods of the pool that do not prefill are none of ours."""

    async def script(server: FakeApi, backend: Backend) -> None:
        server.apply("pods", pod("a", "10.0.0.1", labels=MINE))
        server.apply("pods", pod("b", "10.0.0.2", labels=OTHER))
        server.apply("pods", pod("d", "10.0.0.4", labels={"app": "mine", "llm-d.ai/role": "decode"}))
        server.apply("inferencepools", pool("else", {"app": "other"}, 1))
        async with backend.world(**pool_options()) as world:
            await world.until_failing("no_pool")
            assert "there is no InferencePool pool in namespace llm" in world.discovery.problem
            server.apply("inferencepools", pool("pool", {"app": "mine"}, 8000))
            await world.until([A])
            await world.until_well()
            server.apply("inferencepools", pool("pool", {"app": "mine"}, 8000, 8001))
            await world.until([A, "10.0.0.1:8001"])
            lists = server.count("list")
            server.apply("inferencepools", pool("pool", {"app": "other"}, 8000))
            await world.until([B])
            assert server.count("list") == lists + 1
            server.apply("pods", pod("a", "10.0.0.1", labels=OTHER))
            await world.until([A, B])
            server.delete("inferencepools", "pool")
            await world.until_failing("no_pool")
            server.delete("pods", "b")
            await world.until([A])
            assert len(server.watches) == 2

    play(script)


def test_a_pool_of_the_old_group() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        server.apply("inferencepools", old_pool("pool", ROLE, 8000))
        async with backend.world(**pool_options(OLD_GROUP)) as world:
            await world.until([A, B])

    play(script)


def test_pools_that_the_server_does_not_know() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world(**pool_options()) as world:
            await world.until_failing("not_found")
            assert f"knows no inferencepools.{GROUP}: is its CRD installed?" in world.discovery.problem
            server.without_pools = False
            server.forbidden = {("list", "inferencepools")}
            await world.until_failing("forbidden")
            assert f'apiGroups: ["{GROUP}"], resources: ["inferencepools"]' in world.discovery.problem
            server.forbidden = set()
            server.apply("inferencepools", pool("pool", {}, 8000))
            await world.until_failing("bad_answer")
            assert "inferencepools pool: spec.selector.matchLabels is {}" in world.discovery.problem
            server.apply("inferencepools", pool("pool", ROLE, 8000))
            await world.until([A, B])
            await world.until_well()

    play(script, without_pools=True)


@pytest.mark.parametrize("ports", [8000, [8001], {"number": 8001}])
def test_a_pool_that_becomes_foreign(ports: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One line, and what it picked before is followed on."""

    async def script(server: FakeApi, backend: Backend) -> None:
        server.apply("inferencepools", pool("pool", ROLE, 8000))
        async with backend.world(**pool_options()) as world:
            await world.until([A, B])
            caplog.clear()
            foreign = pool("pool", ROLE)
            foreign["spec"]["targetPorts"] = ports
            server.apply("inferencepools", foreign)
            await world.until_failing("bad_answer")
            await asyncio.sleep(0.5)
            assert "inferencepools pool: spec.targetPorts" in world.discovery.problem
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            server.delete("pods", "b")
            await world.until([A])
            server.apply("inferencepools", pool("pool", ROLE, 8001))
            await world.until(["10.0.0.1:8001"])
            await world.until_well()

    play(script)


def test_a_pod_that_is_foreign_is_named() -> None:
    async def script(server: FakeApi, backend: Backend) -> None:
        async with backend.world() as world:
            await world.until([A, B])
            foreign = pod("c", "10.0.0.3")
            foreign["status"]["podIP"] = 5
            server.apply("pods", foreign)
            await world.until_failing("bad_answer")
            assert "pods c: Expected `str`, got `int` - at `$.status.podIP`" in world.discovery.problem
            await world.until([A, B])

    play(script)
