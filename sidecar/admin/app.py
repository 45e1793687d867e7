"""The admin port's HTTP application."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from sidecar import config
from sidecar.admin.health import Health
from sidecar.admin.observer import Observer
from sidecar.admin.switch import Switch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_SWITCH_BYTES = 64


def application(settings: config.Settings, observer: Observer, switch: Switch, health: Health) -> web.Application:
    """/metrics, /livez, /readyz, /startupz, /config, /decisions, /endpoints, /disagg."""
    registry = CollectorRegistry()
    registry.register(observer.collection)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"content-type": content_type})

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
        return web.json_response(observer.decisions())

    async def endpoints(_request: web.Request) -> web.Response:
        return web.json_response(observer.endpoints())

    async def read_switch(_request: web.Request) -> web.Response:
        return web.Response(text=f"{switch.mode.value}\n")

    async def turn_switch(request: web.Request) -> web.Response:
        text = (await request.content.read(_MAX_SWITCH_BYTES)).decode("utf-8", "replace").strip().strip('"')
        try:
            switch.turn(text, "PUT /disagg")
        except ValueError as error:
            return web.Response(text=f"{error}\n", status=400)
        return web.Response(text=f"{switch.mode.value}\n")

    app = web.Application(client_max_size=4096)
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
