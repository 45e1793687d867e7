"""The API servers that tests run against: the fake, and a real one where KUBE_API_URL names one.

A real one needs no nodes and no controllers: `kube-apiserver --disable-admission-plugins=ServiceAccount` and etcd
are enough. Over https KUBE_API_ACCOUNT names a folder with `token` and `ca.crt` of an account that may write pods
in namespace `default`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from sidecar.prefill.discovery.api import Api
from sidecar.prefill.discovery.cluster import Cluster
from sidecar.prefill.discovery.kubernetes import KubernetesSource
from tests.kube.api import FakeApi
from tests.unit.prefill.discovery.world import World

KINDS = ["fake", *(["real"] if os.environ.get("KUBE_API_URL") else [])]
"""Which of them there are: a test that cannot run is not collected."""

_numbers = itertools.count(1)


class Backend:
    """One API server, and pods that no other test sees: each carries `label`."""

    def __init__(self, cluster: Cluster, fake: FakeApi | None) -> None:
        self.cluster = cluster
        self.api = fake
        self.label = f"t{uuid.uuid4().hex[:10]}"
        self.labels = {"pd-test": self.label}
        self.selector = f"pd-test={self.label}"
        self._made: set[str] = set()

    @property
    def fake(self) -> FakeApi:
        assert self.api is not None
        return self.api

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.cluster.namespace}/pods"

    def world(self, selector: str = "", **options: Any) -> World:
        options.setdefault("port", 8000)
        return World(KubernetesSource(self.cluster, selector=selector or self.selector, **options))

    async def call(self, method: str, path: str, body: Any = None, **params: str) -> tuple[int, Any]:
        """Any request; status and JSON."""
        api = Api(self.cluster)
        try:
            headers, tls = api._credentials()
            patch = {"content-type": "application/merge-patch+json"} if method == "PATCH" else {}
            async with api._session.request(
                method, self.cluster.url + path, json=body, params=params, headers=headers | patch, ssl=tls
            ) as response:
                return response.status, await response.json()
        finally:
            await api.close()

    async def create(self, pod: dict[str, Any]) -> None:
        """A pod, and its status: the server does not take both at once."""
        name = pod["metadata"]["name"]
        self._made.add(name)
        status, said = await self.call("POST", self.path, pod)
        assert status == 201, said
        await self.patch(name, {"status": pod["status"]}, "/status")

    async def patch(self, name: str, patch: dict[str, Any], what: str = "") -> None:
        status, said = await self.call("PATCH", f"{self.path}/{name}{what}", patch)
        assert status == 200, said

    async def delete(self, name: str) -> None:
        self._made.discard(name)
        status, said = await self.call("DELETE", f"{self.path}/{name}", gracePeriodSeconds="0")
        assert status == 200, said

    async def clean(self) -> None:
        for name in list(self._made):
            await self.call("PATCH", f"{self.path}/{name}", {"metadata": {"finalizers": None}})
            await self.call("DELETE", f"{self.path}/{name}", gracePeriodSeconds="0")

    async def watch(self, seconds: int, **params: str) -> list[dict[str, Any]]:
        """The events of one watch, to its end."""
        api = Api(self.cluster)
        events = []
        try:
            response = await api.get(self.path, {"watch": "1", "timeoutSeconds": str(seconds), **params})
            async for line in response.content:
                events.append(json.loads(line))  # noqa: PERF401
            response.close()
        finally:
            await api.close()
        return events


def name() -> str:
    """Of an object that no other test has."""
    return f"pd-{uuid.uuid4().hex[:8]}-{next(_numbers)}"


def play(kind: str, script: Callable[[Backend], Awaitable[None]], **fake: Any) -> None:
    """Runs `script` against the server of that kind, on the loop that the sidecar has."""

    async def main() -> None:
        if kind == "real":
            backend = Backend(_real(), None)
        else:
            server = FakeApi()
            for key, value in fake.items():
                setattr(server, key, value)
            await server.start()
            backend = Backend(Cluster(server.url, server.namespace, None, None, ""), server)
        try:
            async with asyncio.timeout(60):
                await script(backend)
        finally:
            if backend.api is not None:
                await backend.api.stop()
            else:
                await backend.clean()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _real() -> Cluster:
    url = os.environ["KUBE_API_URL"].rstrip("/")
    account = os.environ.get("KUBE_API_ACCOUNT", "")
    token, ca = (Path(account) / "token", Path(account) / "ca.crt") if account else (None, None)
    return Cluster(url, "default", token, ca, "")
