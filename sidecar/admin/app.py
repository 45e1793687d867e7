"""The admin port's HTTP application."""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sidecar import config
from sidecar.admin.exposition import Encode, pieces
from sidecar.admin.switch import Switch
from sidecar.settings import Settings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = frozenset({"/metrics", "/livez", "/readyz", "/startupz"})
"""For whoever reaches the port: Prometheus and the kubelet come from elsewhere."""


class Observed(Protocol):
    """What is shown of the requests: an `Observer`, or those of several processes together."""

    @property
    def collection(self) -> Collector: ...

    def decisions(self) -> list[dict[str, Any]]: ...

    def endpoints(self) -> dict[str, Any]: ...


class Readiness(Protocol):
    """See `sidecar.admin.health.Health`."""

    @property
    def problem(self) -> str: ...


async def nobody_else(_decisions: bool) -> None:
    """Everything that is shown is known to this process."""


def application(
    settings: Settings,
    observer: Observed,
    switch: Switch,
    health: Readiness,
    key: Callable[[], str],
    ask_others: Callable[[bool], Awaitable[None]] = nobody_else,
) -> web.Application:
    """`ask_others` is awaited before what requests have done is shown; told whether it is their decisions.

    /metrics, /livez, /readyz, /startupz, /config, /decisions, /endpoints, /disagg. All but the first four are
    for the pod itself and for who shows the bearer `key` ("": nobody else)."""
    registry = CollectorRegistry()
    registry.register(observer.collection)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    async def metrics(request: web.Request) -> web.Response:
        await ask_others(False)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=await _written(registry, encode), headers={"content-type": content_type})

    async def livez(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def startupz(_request: web.Request) -> web.Response:
        # The engine's container is started once this says ok: it must not wait for the engine.
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        problem = health.problem
        return web.Response(text=f"{problem}\n" if problem else "ok\n", status=503 if problem else 200)

    async def effective_config(_request: web.Request) -> web.Response:
        return web.json_response({**config.shown(settings), "disagg": switch.mode.value})

    async def decisions(_request: web.Request) -> web.Response:
        await ask_others(True)
        return web.json_response(observer.decisions())

    async def endpoints(_request: web.Request) -> web.Response:
        return web.json_response(observer.endpoints())

    async def read_switch(_request: web.Request) -> web.Response:
        return web.Response(text=f"{switch.mode.value}\n")

    async def turn_switch(request: web.Request) -> web.Response:
        text = (await request.read()).decode("utf-8", "replace").strip().strip('"')
        try:
            switch.turn(text, "PUT /disagg")
        except ValueError as error:
            return web.Response(text=f"{error}\n", status=400)
        return web.Response(text=f"{switch.mode.value}\n")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN or is_loopback(request.remote) or _shows(request, key()):
            return await handler(request)
        return web.Response(text="only from within the pod, or with the key of --admin-token-file\n", status=403)

    app = web.Application(client_max_size=4096, middlewares=[guard, _what_there_is])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/startupz", startupz)
    app.router.add_get("/config", effective_config)
    app.router.add_get("/decisions", decisions)
    app.router.add_get("/endpoints", endpoints)
    app.router.add_get("/disagg", read_switch)
    app.router.add_put("/disagg", turn_switch)
    return app


@web.middleware
async def _what_there_is(request: web.Request, handler: Handler) -> web.StreamResponse:
    """In place of aiohttp's bare 404 and 405: whoever took the port for another sees where he is."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        text = f"the admin port has no such method here: {_listed(request.app)}\n"
        return web.Response(text=text, status=405, headers={"allow": error.headers["allow"]})
    except web.HTTPNotFound:
        return web.Response(text=f"the admin port has no such path: {_listed(request.app)}\n", status=404)


def _listed(app: web.Application) -> str:
    """Its methods, each with its paths, in one line."""
    paths: dict[str, list[str]] = {}
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:  # HEAD comes with every GET
            paths.setdefault(route.method, []).append(route.resource.canonical)
    return ", ".join(f"{method} {' '.join(sorted(found))}" for method, found in sorted(paths.items()))


async def _written(registry: CollectorRegistry, encode: Encode) -> bytes:
    written = []
    for piece in pieces(registry, encode):
        written.append(piece)
        await asyncio.sleep(0)  # requests have their turn
    return b"".join(written)


def is_loopback(remote: str | None) -> bool:
    """Whether a peer's address is the pod's own; `kubectl exec` and `kubectl port-forward` come from there."""
    try:
        ip = ipaddress.ip_address((remote or "").partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _shows(request: web.Request, key: str) -> bool:
    shown = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
    return bool(key) and hmac.compare_digest(shown, f"Bearer {key}".encode())
