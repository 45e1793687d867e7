"""Who may see and turn what on the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from sidecar.admin.app import OPEN, application, is_loopback
from sidecar.admin.health import Health
from sidecar.admin.observer import Observer
from sidecar.admin.switch import Switch
from sidecar.decision.guards import Mode
from sidecar.edge.service import Live
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import AllowList
from sidecar.prefill.endpoints import Endpoints
from sidecar.settings import Settings

GUARDED = ("/config", "/decisions", "/endpoints", "/disagg")


class Peer:
    """The transport of somebody who asks."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_extra_info(self, name: str, default: object = None) -> object:
        return (self._address, 1234) if name == "peername" else default

    def is_closing(self) -> bool:
        return False


def status(path: str, peer: str, *, key: str = "", shown: str = "") -> int:
    return asked(path, peer, key=key, shown=shown).status


def asked(path: str, peer: str, *, key: str = "", shown: str = "", method: str = "GET") -> web.Response:
    live = Live(Mode.AUTO)
    observer = Observer(Endpoints([], AllowList([]), lambda: 0.0), Budget(1, 0))
    health = Health(live, [], lambda _seconds: "")
    app = application(Settings(), observer, Switch(live), health, lambda: key)
    app.freeze()
    headers = {"authorization": shown} if shown else {}
    request = make_mocked_request(method, path, headers, app=app, transport=Peer(peer))

    async def ask() -> web.Response:
        response = await app._handle(request)
        assert isinstance(response, web.Response)
        return response

    return asyncio.run(ask())


def turned(*pieces: bytes) -> tuple[int, Mode]:
    """What comes of a PUT whose body arrives like this."""

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0.05)

    async def put() -> tuple[int, Mode]:
        live = Live(Mode.AUTO)
        observer = Observer(Endpoints([], AllowList([]), lambda: 0.0), Budget(1, 0))
        app = application(Settings(), observer, Switch(live), Health(live, [], lambda _s: ""), lambda: "")
        async with TestClient(TestServer(app)) as client, client.put("/disagg", data=body()) as response:
            return response.status, live.mode

    return asyncio.run(put())


def test_switch_is_read_to_its_end() -> None:
    assert turned(b"o", b"ff\n") == (200, Mode.OFF)
    assert turned(b'"on"') == (200, Mode.ON)
    assert turned(b"on", b" and off") == (400, Mode.AUTO)
    assert turned(b"\xff") == (400, Mode.AUTO)
    assert turned(*[b" " * 1000] * 5) == (413, Mode.AUTO)


@pytest.mark.parametrize("path", sorted(OPEN - {"/metrics"}))
def test_probes_are_for_everyone(path: str) -> None:
    assert status(path, "10.0.0.9") in (200, 503)


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_the_pod_itself_may_see_all(path: str, peer: str) -> None:
    assert status(path, peer) == 200


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("peer", ["10.0.0.9", "::ffff:10.0.0.9", "fe80::1%eth0", ""])
def test_a_neighbour_may_not(path: str, peer: str) -> None:
    assert status(path, peer) == 403
    assert status(path, peer, shown="Bearer ") == 403, "no key is not an empty one"
    assert status(path, peer, key="secret", shown="Bearer secre") == 403
    assert status(path, peer, key="secret", shown="secret") == 403


@pytest.mark.parametrize("path", GUARDED)
def test_with_the_key_it_may(path: str) -> None:
    assert status(path, "10.0.0.9", key="secret", shown="Bearer secret") == 200


LISTED = "GET /config /decisions /disagg /endpoints /livez /metrics /readyz /startupz, PUT /disagg\n"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/models", 404),
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/disagg", 405),
        ("DELETE", "/metrics", 405),
    ],
)
def test_what_is_not_there_lists_what_is(method: str, path: str, expected: int) -> None:
    response = asked(path, "127.0.0.1", method=method)
    assert (response.status, response.content_type) == (expected, "text/plain")
    assert response.text == f"the admin port has no such {'path' if expected == 404 else 'method here'}: {LISTED}"
    assert response.headers.get("allow", "") == {"/disagg": "GET,HEAD,PUT", "/metrics": "GET,HEAD"}.get(path, "")


def test_a_neighbour_is_not_told_what_there_is() -> None:
    assert "/config" not in (asked("/v1/models", "10.0.0.9").text or "")


@pytest.mark.parametrize("remote", [None, "", "localhost", "128.0.0.1", "::"])
def test_addresses_that_are_not_the_pods_own(remote: str | None) -> None:
    assert not is_loopback(remote)
