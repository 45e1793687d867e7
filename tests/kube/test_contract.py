"""What a Kubernetes API does and what we make of it, of the fake and of a real one where there is one."""

import asyncio

import pytest

from sidecar.prefill.address import parse
from sidecar.prefill.discovery.discovery import Standing
from tests.kube.api import matches
from tests.kube.backend import KINDS, Backend, name, play
from tests.kube.objects import pod, running

pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_a_pods_life(kind: str) -> None:
    async def script(backend: Backend) -> None:
        one = name()
        async with backend.world() as world:
            await asyncio.sleep(0.3)
            await backend.create(pod(one, labels=backend.labels, phase="Pending", ready=False))
            await asyncio.sleep(0.2)
            assert world.labels == []
            await backend.patch(one, {"status": running("10.1.2.3")}, "/status")
            await world.until(["10.1.2.3:8000"])
            await backend.patch(one, {"status": running("10.1.2.3", ready=False)}, "/status")
            await world.until([])
            assert world.discovery.members[parse("10.1.2.3:8000")].standing is Standing.NOT_READY
            await backend.patch(one, {"status": running("10.1.2.3")}, "/status")
            await world.until(["10.1.2.3:8000"])
            await backend.delete(one)
            await world.until([])
            assert not world.discovery.members
            assert not world.errors

    play(kind, script)


def test_termination_counts_from_its_beginning(kind: str) -> None:
    """Although the pod is still there, and still ready."""

    async def script(backend: Backend) -> None:
        one = name()
        held = pod(one, "10.1.2.3", labels=backend.labels)
        held["metadata"]["finalizers"] = ["pd-sidecar.test/held"]
        await backend.create(held)
        async with backend.world() as world:
            await world.until(["10.1.2.3:8000"])
            await backend.delete(one)
            await world.until([])
            assert world.discovery.members[parse("10.1.2.3:8000")].standing is Standing.TERMINATING
            await backend.patch(one, {"metadata": {"finalizers": None}})
            for _ in range(100):
                if not world.discovery.members:
                    break
                await asyncio.sleep(0.02)
            assert not world.discovery.members

    play(kind, script)


def test_labels_that_change(kind: str) -> None:
    """A pod that leaves the selector is deleted for the watch, under its new version; one that comes is added."""

    async def script(backend: Backend) -> None:
        one = name()
        await backend.create(pod(one, "10.1.2.3", labels={**backend.labels, "role": "prefill"}))
        selector = f"{backend.selector},role=prefill"
        _, listed = await backend.call("GET", backend.path, labelSelector=selector)
        version = listed["metadata"]["resourceVersion"]
        async with backend.world(selector) as world:
            await world.until(["10.1.2.3:8000"])
            await backend.patch(one, {"metadata": {"labels": {"role": "decode"}}})
            await world.until([])
            await backend.patch(one, {"metadata": {"labels": {"role": "prefill"}}})
            await world.until(["10.1.2.3:8000"])
        events = await backend.watch(1, labelSelector=selector, resourceVersion=version)
        assert [event["type"] for event in events] == ["DELETED", "ADDED"]
        versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
        assert int(version) < versions[0] < versions[1]

    play(kind, script)


def test_selectors(kind: str) -> None:
    """The fake's understanding of selectors is the API's."""
    labels = [{"a": "1"}, {"a": "2", "b": "x"}, {"b": ""}, {}]
    selectors = ["a=1", "a==2", "a!=1", "a in (1,2)", "a notin (1)", "a", "!a", "b=", "a=2,b=x", "a, b in (x, y)"]

    async def script(backend: Backend) -> None:
        names = [name() for _ in labels]
        for one, own in zip(names, labels, strict=True):
            await backend.create(pod(one, "10.1.2.3", labels={**own, **backend.labels}))
        for selector in selectors:
            _, listed = await backend.call("GET", backend.path, labelSelector=f"{backend.selector},{selector}")
            picked = {one["metadata"]["name"] for one in listed["items"]}
            expected = {one for one, own in zip(names, labels, strict=True) if matches(selector, own)}
            assert picked == expected, selector
        status, _ = await backend.call("GET", backend.path, labelSelector="a in (")
        assert status == 400
        status, _ = await backend.call("GET", backend.path, fieldSelector="spec.colour=red")
        assert status == 400
        _, listed = await backend.call("GET", backend.path, fieldSelector=f"metadata.name={names[0]}")
        assert [one["metadata"]["name"] for one in listed["items"]] == names[:1]

    play(kind, script)


def test_pages(kind: str) -> None:
    async def script(backend: Backend) -> None:
        names = sorted(name() for _ in range(5))
        for one in names:
            await backend.create(pod(one, "10.1.2.3", labels=backend.labels))
        found, versions, token = [], set(), ""
        for _ in range(3):
            query = {"labelSelector": backend.selector, "limit": "2"} | ({"continue": token} if token else {})
            _, page = await backend.call("GET", backend.path, **query)
            found += [one["metadata"]["name"] for one in page["items"]]
            versions.add(page["metadata"]["resourceVersion"])
            token = page["metadata"].get("continue", "")
        assert (found, token, len(versions)) == (names, "", 1)

    play(kind, script)


def test_a_watch_ends_when_it_is_told_to(kind: str) -> None:
    async def script(backend: Backend) -> None:
        _, listed = await backend.call("GET", backend.path, labelSelector=backend.selector)
        loop = asyncio.get_running_loop()
        began = loop.time()
        version = listed["metadata"]["resourceVersion"]
        assert not await backend.watch(1, labelSelector=backend.selector, resourceVersion=version)
        assert 0.9 < loop.time() - began < 5

    play(kind, script)


def test_what_happens_between_two_watches_is_told(kind: str) -> None:
    async def script(backend: Backend) -> None:
        _, listed = await backend.call("GET", backend.path, labelSelector=backend.selector)
        version = listed["metadata"]["resourceVersion"]
        one = name()
        await backend.create(pod(one, "10.1.2.3", labels=backend.labels))
        await backend.delete(one)
        events = await backend.watch(1, labelSelector=backend.selector, resourceVersion=version)
        assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]

    play(kind, script)
