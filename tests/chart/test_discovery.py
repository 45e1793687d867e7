"""The rendered sidecar finds the rendered prefill pods, and asks the API for no more than its Role allows."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.render import (
    Object,
    one,
    sidecars,
    template_of,
    validated,
    with_values,
    workload,
)
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Sidecar, completion, eventually
from tests.kube.api import ThreadedApi
from tests.kube.objects import pod, pool

KEPT = ("--discovery", "--discovery-model", "--discovery-port", "--inference-pool", "--pool-group")
"""The rendered arguments that matter here; ports and folders are of another machine."""


@pytest.fixture
def server() -> Iterator[ThreadedApi]:
    with ThreadedApi("space") as server:
        yield server


def started(documents: list[Object], server: ThreadedApi, decode: ThreadedEngine) -> Sidecar:
    arguments = [each for each in sidecars(documents)[0]["args"] if each.partition("=")[0] in KEPT]
    return Sidecar(
        *arguments,
        *("--kubernetes-api", server.url, "--discovery-namespace", "space", "--disagg", "on"),
        *("--model-server-port", str(decode.port)),
        *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
    )


def labels_of(documents: list[Object], role: str) -> dict[str, str]:
    labels: dict[str, str] = template_of(workload(documents, role))["metadata"]["labels"]
    return labels


def addresses(sidecar: Sidecar) -> list[str]:
    return [each["address"] for each in json.loads(sidecar.admin("GET", "/endpoints")[1])["endpoints"]]


def needed(server: ThreadedApi) -> set[tuple[str, str]]:
    """What the sidecar did at the API."""
    return {(verb, resource) for _, verb, resource, _ in server.requests}


def granted(documents: list[Object]) -> set[tuple[str, str]]:
    return {
        (verb, resource)
        for rule in one(documents, "Role")["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("values", [{}, {"model.name": "openai/gpt-oss-120b"}, {"model.label": "mine"}])
def test_the_sidecar_finds_its_prefill_pods(values: Any, server: ThreadedApi) -> None:
    with ThreadedEngine() as prefill, ThreadedEngine() as decode:
        documents = with_values(values | {"prefill.port": prefill.port})
        ours = labels_of(documents, "prefill")
        others = ours | {"llm-d.ai/model": "another"}
        server.do(lambda: server.apply("pods", pod("p", prefill.host, labels=ours)))
        server.do(lambda: server.apply("pods", pod("d", "127.0.0.9", labels=labels_of(documents, "decode"))))
        server.do(lambda: server.apply("pods", pod("o", "127.0.0.8", labels=others)))
        sidecar = started(documents, server, decode)
        try:
            eventually(lambda: addresses(sidecar) == [prefill.address])
            answer = sidecar.ask("POST", "/v1/completions", completion())
            assert answer.decision == f"remote; prefill={prefill.address}"
        finally:
            sidecar.stop()
    assert needed(server) <= granted(documents)
    validated["rendered sidecars that found rendered prefill pods (fake API server)"] += 1


def test_those_of_a_pool_too(server: ThreadedApi) -> None:
    with ThreadedEngine() as prefill, ThreadedEngine() as decode:
        documents = with_values({"sidecar.settings.inference-pool": "mine"})
        ours = labels_of(documents, "prefill")
        server.do(lambda: server.apply("inferencepools", pool("mine", ours, prefill.port)))
        server.do(lambda: server.apply("pods", pod("p", prefill.host, labels=ours)))
        sidecar = started(documents, server, decode)
        try:
            eventually(lambda: addresses(sidecar) == [prefill.address])
        finally:
            sidecar.stop()
    assert {resource for _, resource in needed(server)} == {"pods", "inferencepools"}
    assert needed(server) <= granted(documents)
    validated["rendered sidecars that found rendered prefill pods (fake API server)"] += 1
