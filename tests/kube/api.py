"""A small Kubernetes API server: pods and InferencePools of one namespace, with list, watch and writes as strict as
the real one, and the ways in which a real one fails.

What it claims, `test_contract.py` also asks of a real one (KUBE_API_URL).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.own_loop import OwnLoop
from tests.ports import free_ports

Object = dict[str, Any]

PODS = "/api/v1/namespaces/{namespace}/pods"
POOLS = "/apis/{group}/{version}/namespaces/{namespace}/inferencepools"
GROUPS = {"inference.networking.k8s.io": "v1", "inference.networking.x-k8s.io": "v1alpha2"}

_REQUIREMENT = re.compile(
    r"\s*(!?)\s*([^\s!=,()]+)\s*(?:(==|=|!=)\s*([^\s,()]*)|(in|notin)\s*\(([^()]*)\))?\s*(?:,|$)"
)


def matches(selector: str, labels: dict[str, str]) -> bool:
    """Whether a label selector picks an object with these labels. Raises `ValueError`."""
    position = 0
    while position < len(selector):
        found = _REQUIREMENT.match(selector, position)
        if found is None:
            raise ValueError(f"unable to parse requirement: {selector[position:]}")
        position = found.end()
        negated, key, sign, value, word, values = found.groups()
        several = {one.strip() for one in (values or "").split(",")}
        if sign in ("=", "=="):
            holds = labels.get(key) == value
        elif sign == "!=":
            holds = labels.get(key) != value
        elif word == "in":
            holds = labels.get(key) in several
        elif word == "notin":
            holds = key not in labels or labels[key] not in several
        else:
            holds = (key in labels) is not bool(negated)
        if not holds:
            return False
    return True


@dataclass
class Change:
    """One entry of the history."""

    version: int
    resource: str
    type: str
    new: Object
    old: Object | None


@dataclass(eq=False)
class Watch:
    """An open watch. `mute`: it stays open and says nothing more, not even that it ends."""

    request: web.Request
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    mute: bool = False


def status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
    return web.json_response({**body, "message": message, "code": code}, status=code)


class FakeApi:
    """On the running loop. `tokens`: who is let in, None: everybody."""

    def __init__(self, namespace: str = "llm") -> None:
        self.namespace = namespace
        self.tokens: set[str] | None = None
        self.forbidden: set[tuple[str, str]] = set()
        """(verb, resource) -> 403."""
        self.without_pools = False
        """The CRD is not installed."""
        self.failing = 0
        """Every answer has this status."""
        self.frozen = False
        """Takes connections and says nothing, on old ones neither."""
        self.bookmark_every_s = 0.0
        self.page_max = 10_000
        self.gone_on_watch = False
        """Every watch begins with 410."""
        self.refuses_watches_at_once = False
        """Every watch ends as soon as it begins."""
        self.requests: list[tuple[float, str, str, dict[str, str]]] = []
        """When, verb, resource and query."""
        self.watches: set[Watch] = set()
        self.url = ""
        self._objects: dict[str, dict[str, Object]] = {"pods": {}, "inferencepools": {}}
        self._history: list[Change] = []
        self._version = 100
        self._oldest = 100
        """Changes up to this version are no longer kept."""
        self._runner: web.AppRunner | None = None
        self._stopping = False

    # -- life

    async def start(self, port: int = 0, tls: Any = None) -> None:
        self._stopping = False
        app = web.Application(client_max_size=1 << 22)
        app.router.add_route("*", PODS, self._collection)
        app.router.add_route("*", PODS + "/{name}", self._one)
        app.router.add_route("*", PODS + "/{name}/status", self._one)
        app.router.add_route("*", POOLS, self._collection)
        app.router.add_route("*", POOLS + "/{name}", self._one)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        port = port or free_ports()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls, reuse_address=True)
        await site.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._stopping = True
        self.drop_watches()
        for watch in self.watches:
            watch.wake.set()
        while self.watches:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- faults

    def drop_watches(self) -> None:
        """Their connections break off."""
        for watch in list(self.watches):
            if watch.request.transport is not None:
                watch.request.transport.abort()

    def mute_watches(self) -> None:
        """Half-open: the client's side hears nothing of it."""
        for watch in self.watches:
            watch.mute = True

    def compact(self) -> None:
        """The history is gone."""
        self._oldest = self._version
        self._history.clear()

    def count(self, verb: str, resource: str = "pods") -> int:
        return sum(1 for _, one, what, _ in self.requests if (one, what) == (verb, resource))

    # -- what a test does to it, without HTTP

    def apply(self, resource: str, new: Object) -> None:
        """Creates or replaces an object."""
        objects = self._objects[resource]
        name = new["metadata"]["name"]
        old = objects.get(name)
        new = json.loads(json.dumps(new))
        new["metadata"].setdefault("namespace", self.namespace)
        new["metadata"].setdefault("uid", old["metadata"]["uid"] if old else str(uuid.uuid4()))
        self._record(resource, "MODIFIED" if old else "ADDED", new, old)
        objects[name] = new

    def delete(self, resource: str, name: str) -> None:
        """At once."""
        old = self._objects[resource].pop(name)
        self._record(resource, "DELETED", json.loads(json.dumps(old)), old)

    def _record(self, resource: str, kind: str, new: Object, old: Object | None) -> None:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self._history.append(Change(self._version, resource, kind, new, old))
        for watch in self.watches:
            watch.wake.set()

    # -- HTTP

    async def _gate(self, request: web.Request, verb: str, resource: str) -> web.Response | None:
        self.requests.append((time.monotonic(), verb, resource, dict(request.query)))
        while self.frozen and not self._stopping:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self.failing:
            return status(self.failing, "Failing", "as the test wants it")
        if self.tokens is not None:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if token not in self.tokens:
                return status(401, "Unauthorized", "Unauthorized")
        group = request.match_info.get("group")
        if group is not None and (self.without_pools or GROUPS.get(group) != request.match_info["version"]):
            return status(404, "NotFound", "the server could not find the requested resource")
        if (verb, resource) in self.forbidden:
            return status(403, "Forbidden", f"{resource} is forbidden: cannot {verb} resource")
        return None

    @staticmethod
    def _resource(request: web.Request) -> str:
        return "inferencepools" if "group" in request.match_info else "pods"

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        resource = self._resource(request)
        if request.method == "POST":
            return await self._create(request, resource)
        if request.method != "GET":
            return status(405, "MethodNotAllowed", request.method)
        is_watch = request.query.get("watch") in ("1", "true")
        refusal = await self._gate(request, "watch" if is_watch else "list", resource)
        if refusal is not None:
            return refusal
        try:
            self._picks(request, {"metadata": {"name": "x"}})
        except ValueError as error:
            return status(400, "BadRequest", str(error))
        if is_watch:
            return await self._watch(request, resource)
        return self._list(request, resource)

    def _picks(self, request: web.Request, one: Object | None) -> bool:
        if one is None or request.match_info["namespace"] != one["metadata"].get("namespace", self.namespace):
            return False
        for part in filter(None, request.query.get("fieldSelector", "").split(",")):
            key, _, value = part.partition("=")
            if key not in ("metadata.name", "metadata.namespace"):
                raise ValueError(f"field label not supported: {key}")
            if one["metadata"].get(key.removeprefix("metadata."), self.namespace) != value:
                return False
        return matches(request.query.get("labelSelector", ""), one["metadata"].get("labels") or {})

    def _list(self, request: web.Request, resource: str) -> web.Response:
        picked = [one for _, one in sorted(self._objects[resource].items()) if self._picks(request, one)]
        version, first = self._version, 0
        if token := request.query.get("continue"):
            version, first = map(int, token.split(":"))
            if version < self._oldest:
                return status(410, "Expired", "The provided continue parameter is too old")
        limit = min(int(request.query.get("limit") or 0) or self.page_max, self.page_max)
        page, rest = picked[first : first + limit], picked[first + limit :]
        meta: Object = {"resourceVersion": str(version)}
        if rest:
            meta |= {"continue": f"{version}:{first + limit}", "remainingItemCount": len(rest)}
        return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": meta, "items": page})

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or self._version)
        if self.gone_on_watch:
            return status(410, "Expired", "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if self.refuses_watches_at_once:
            return response
        if since < self._oldest:  # the real one says so in the stream
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        watch = Watch(request)
        self.watches.add(watch)
        try:
            await self._stream(watch, response, resource, since)
        except ConnectionResetError:
            pass  # nobody watches any more
        finally:
            self.watches.discard(watch)
        return response

    async def _stream(self, watch: Watch, response: web.StreamResponse, resource: str, since: int) -> None:
        request = watch.request
        loop = asyncio.get_running_loop()
        ends = loop.time() + float(request.query.get("timeoutSeconds") or 1800)
        bookmarks = request.query.get("allowWatchBookmarks") == "true" and self.bookmark_every_s
        last_bookmark, has_seen = loop.time(), False
        while not self._stopping and (watch.mute or self.frozen or loop.time() < ends):
            if watch.mute or self.frozen:
                await asyncio.sleep(0.02)
                continue
            watch.wake.clear()
            for change in [one for one in self._history if one.version > since and one.resource == resource]:
                since = change.version
                kind = self._seen_as(request, change)
                if kind:
                    has_seen = True
                    await response.write(json.dumps({"type": kind, "object": change.new}).encode() + b"\n")
            if bookmarks and has_seen and loop.time() - last_bookmark >= bookmarks:
                last_bookmark, since = loop.time(), self._version
                meta = {"metadata": {"resourceVersion": str(self._version)}}
                await response.write(json.dumps({"type": "BOOKMARK", "object": meta}).encode() + b"\n")
            try:
                async with asyncio.timeout(min(max(ends - loop.time(), 0.0), bookmarks or 1.0)):
                    await watch.wake.wait()
            except TimeoutError:
                pass

    def _seen_as(self, request: web.Request, change: Change) -> str:
        """The event that a watch with these selectors gets: what leaves the selector is deleted for it."""
        before = change.old is not None and self._picks(request, change.old)
        after = change.type != "DELETED" and self._picks(request, change.new)
        if before and after:
            return "MODIFIED"
        return "ADDED" if after else "DELETED" if before else ""

    async def _create(self, request: web.Request, resource: str) -> web.Response:
        refusal = await self._gate(request, "create", resource)
        if refusal is not None:
            return refusal
        new = await request.json()
        if new["metadata"]["name"] in self._objects[resource]:
            return status(409, "AlreadyExists", "already exists")
        if resource == "pods":
            new["status"] = {"phase": "Pending"}  # whatever was sent
        self.apply(resource, new)
        return web.json_response(self._objects[resource][new["metadata"]["name"]], status=201)

    async def _one(self, request: web.Request) -> web.Response:
        resource, name = self._resource(request), request.match_info["name"]
        verb = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}.get(request.method, request.method)
        refusal = await self._gate(request, verb, resource)
        if refusal is not None:
            return refusal
        one = self._objects[resource].get(name)
        if one is None:
            return status(404, "NotFound", f'{resource} "{name}" not found')
        if verb == "patch":
            patch = await request.json()
            is_status = request.path.endswith("/status")
            one = merged(one, {"status": patch["status"]} if is_status else patch)
            if one["metadata"].get("deletionTimestamp") and not one["metadata"].get("finalizers"):
                self.delete(resource, name)
            else:
                self.apply(resource, one)
        elif verb == "delete":
            if one["metadata"].get("finalizers"):
                stamp = {"deletionTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                self.apply(resource, merged(one, {"metadata": stamp}))
            else:
                self.delete(resource, name)
        return web.json_response(one)


def merged(one: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(one) if isinstance(one, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class ThreadedApi(OwnLoop, FakeApi):
    """For tests without a loop of their own."""

    def listen(self, on: socket.socket) -> None:
        """Answers there too: on the loopback of another network namespace, for example."""

        async def listening() -> None:
            assert self._runner is not None
            await web.SockSite(self._runner, on).start()

        self.run(listening())

    def do(self, change: Callable[[], object]) -> None:
        """A change, on the server's loop."""

        async def done() -> None:
            change()

        self.run(done())
