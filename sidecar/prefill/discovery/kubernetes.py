"""Endpoints from the Kubernetes API: the pods that labels pick, or those of an InferencePool at its ports."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from sidecar.prefill.address import Address, BadAddress, canonical_host
from sidecar.prefill.discovery.api import Api, Collection
from sidecar.prefill.discovery.cluster import Cluster
from sidecar.prefill.discovery.discovery import Member, Report, Standing

MODEL_LABEL = "llm-d.ai/model"
POOL_VERSIONS = {"inference.networking.k8s.io": "v1", "inference.networking.x-k8s.io": "v1alpha2"}

MAX_SHOWN = 80
"""Characters of a value that is not what it should be."""


class Pod(NamedTuple):
    """What is kept of a pod: enough to tell whether a change matters."""

    host: str
    standing: Standing


class Pool(NamedTuple):
    """Whom an InferencePool picks, and at which ports (one for each data-parallel rank)."""

    selector: str
    ports: tuple[int, ...]


class _Meta(msgspec.Struct):
    deletion_timestamp: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    pod_ip: str = msgspec.field(default="", name="podIP")
    phase: str = ""
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _Status = msgspec.field(default_factory=_Status)


class _Pool(msgspec.Struct):
    spec: Any = msgspec.UNSET


_pod = msgspec.json.Decoder(_Pod).decode
_pool = msgspec.json.Decoder(_Pool).decode


def pod_of(raw: msgspec.Raw | bytes) -> Pod:
    """A pod in the API's JSON. Raises `msgspec.MsgspecError`."""
    pod = _pod(raw)
    try:
        host = canonical_host(pod.status.pod_ip) if pod.status.pod_ip else ""
    except BadAddress as error:
        raise msgspec.ValidationError(str(error)) from None
    is_ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    if pod.metadata.deletion_timestamp:
        return Pod(host, Standing.TERMINATING)
    return Pod(host, Standing.READY if is_ready and pod.status.phase == "Running" else Standing.NOT_READY)


def pool_of(raw: msgspec.Raw | bytes) -> Pool:
    """An InferencePool, v1 (`selector.matchLabels`, `targetPorts`) or v1alpha2 (`selector`, `targetPortNumber`).
    Raises `msgspec.ValidationError`: which field, what it is, what it should be."""
    spec = _pool(raw).spec
    if not isinstance(spec, dict):
        raise _misfit("spec", spec, "an object with selector and targetPorts")
    labels = _labels_of(spec.get("selector", msgspec.UNSET))
    return Pool(",".join(f"{key}={value}" for key, value in sorted(labels.items())), _ports_of(spec))


def _labels_of(selector: Any) -> dict[str, str]:
    field, labels = "spec.selector", selector
    if isinstance(selector, dict) and "matchLabels" in selector:
        field, labels = "spec.selector.matchLabels", selector["matchLabels"]
    if not isinstance(labels, dict) or not labels or not all(isinstance(value, str) for value in labels.values()):
        raise _misfit(field, labels, "the labels of the model's pods, each with a text")
    return labels


def _ports_of(spec: dict[str, Any]) -> tuple[int, ...]:
    ports, old = spec.get("targetPorts", msgspec.UNSET), spec.get("targetPortNumber")
    if (ports is msgspec.UNSET or not ports) and old is not None:
        if not _is_port(old):
            raise _misfit("spec.targetPortNumber", old, "a port, 1 to 65535")
        return (old,)
    if not isinstance(ports, list) or not ports:
        raise _misfit("spec.targetPorts", ports, "a list of {number: PORT}")
    for index, port in enumerate(ports):
        if not isinstance(port, dict) or not _is_port(port.get("number")):
            raise _misfit(f"spec.targetPorts[{index}]", port, "{number: PORT}, 1 to 65535")
    return tuple(port["number"] for port in ports)


def _is_port(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 65535


def _misfit(field: str, value: Any, wanted: str) -> msgspec.ValidationError:
    text = "missing" if value is msgspec.UNSET else msgspec.json.encode(value).decode()
    found = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return msgspec.ValidationError(f"{field} is {found}; it should be {wanted}")


def members_of(pods: dict[str, Pod], ports: Sequence[int], own: str) -> dict[Address, Member]:
    """The endpoints of pods by name; never our `own` pod, which would ask itself."""
    members: dict[Address, Member] = {}
    for name, pod in pods.items():
        if not pod.host or name == own:
            continue
        for port in ports:
            address = Address(pod.host, port)
            known = members.get(address)
            # A finished pod's address may be another's by now, and pods on the host's network share one.
            if known is None or pod.standing is Standing.READY:
                members[address] = Member(pod.standing, f"pod {name}")
    return members


def join_selectors(*selectors: str) -> str:
    """All of them at once."""
    return ",".join(selector for selector in selectors if selector)


class KubernetesSource:
    """`selector` picks pods; with a `pool`, among those that the InferencePool of that name picks, at its ports in
    place of `port`."""

    name = "kubernetes"

    def __init__(self, cluster: Cluster, *, selector: str, port: int, pool: str = "", pool_group: str = "") -> None:
        self._cluster = cluster
        self._selector = selector
        self._ports: tuple[int, ...] = (port,)
        self._pool = pool
        self._pool_group = pool_group

    async def run(self, report: Report) -> None:
        api = Api(self._cluster)
        try:
            if self._pool:
                await self._follow_pool(api, report)
            else:
                await self._pods(api, report, self._selector)[0].run()
        finally:
            await api.close()

    def _pods(self, api: Api, report: Report, selector: str) -> tuple[Collection[Pod], Callable[[], None]]:
        """The pods, and how to tell of them again."""

        def tell() -> None:
            report.found(members_of(pods.objects, self._ports, self._cluster.pod))

        pods = Collection(
            api,
            report,
            part="pods",
            group="",
            version="v1",
            resource="pods",
            params={"labelSelector": selector},
            convert=pod_of,
            changed=tell,
        )
        return pods, tell

    async def _follow_pool(self, api: Api, report: Report) -> None:
        changed = asyncio.Event()
        pools = Collection(
            api,
            report,
            part="pool",
            group=self._pool_group,
            version=POOL_VERSIONS[self._pool_group],
            resource="inferencepools",
            params={"fieldSelector": f"metadata.name={self._pool}"},
            convert=pool_of,
            changed=changed.set,
        )
        selector = ""
        following: asyncio.Task[None] | None = None
        tell: Callable[[], None] | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pools.run(), name="InferencePool")
            while True:
                await changed.wait()
                changed.clear()
                pool = pools.objects.get(self._pool)
                if pool is None:  # it may be replaced: its pods are followed for as long
                    message = f"there is no InferencePool {self._pool} in namespace {self._cluster.namespace}"
                    report.failed("no_pool", message, "existence of the pool")
                    continue
                report.heard("existence of the pool")
                has_other_ports, self._ports = self._ports != pool.ports, pool.ports
                if pool.selector != selector:
                    selector = pool.selector
                    if following is not None:
                        following.cancel()
                        await asyncio.wait([following])
                    pods, tell = self._pods(api, report, join_selectors(selector, self._selector))
                    following = tasks.create_task(pods.run(), name="pods of the InferencePool")
                elif has_other_ports and tell is not None:
                    tell()
