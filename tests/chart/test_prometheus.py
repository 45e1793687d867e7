"""A real Prometheus scrapes a real sidecar that prefills remotely, and answers every panel and every alert."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.prometheus import Prometheus
from tests.chart.render import tool, validated
from tests.chart.test_monitoring import alerts, dashboard
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Sidecar, completion, eventually

ALWAYS = {
    "Effective (0: paid for, no KV)",
    "Remote share",
    "TTFT p50 by decision",
    "TTFT p95 by decision",
    "Between tokens, p50 of streams",
    "Between tokens, p95 of streams",
    "Requests by decision",
    "Requests by reason",
    "Answers by status",
    "Prefill attempts by outcome",
    "Handoffs by what became of them",
    "Recomputes that hold budget",
    "Breakers (0 closed, 1 half open, 2 open)",
    "Legs p95",
    "The sidecar itself",
    "Open legs and tasks",
    "Memory",
}
"""Panels that show something once prompts are prefilled remotely; the others wait for a fault or a feature."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with ThreadedEngine() as prefill, ThreadedEngine() as decode:
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on", "--prefill", prefill.address),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
        )
        prometheus = Prometheus(
            tool("prometheus"), tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{sidecar.admin_port}"
        )
        try:
            until = time.monotonic() + 30
            asked = 0
            while not (prometheus.scraped() and asked > 5):
                assert time.monotonic() < until
                assert sidecar.ask("POST", "/v1/completions", completion(stream=True)).status == 200
                asked += 1
                time.sleep(0.2)
            yield prometheus
        finally:
            prometheus.stop()
            sidecar.stop()


def panels() -> list[tuple[str, list[str]]]:
    """Title and expressions, as Grafana would send them."""
    values = {"$__rate_interval": "10s", "$namespace": "space", "$pod": "decode-0"}
    found = []
    for panel in dashboard()["panels"]:
        expressions = [target["expr"] for target in panel.get("targets", [])]
        for variable, value in values.items():
            expressions = [expression.replace(variable, value) for expression in expressions]
        if expressions:
            found.append((panel["title"], expressions))
    return found


@pytest.mark.parametrize(("title", "expressions"), panels(), ids=[title for title, _ in panels()])
def test_panel(title: str, expressions: list[str], prometheus: Prometheus) -> None:
    results = [prometheus.query(expression) for expression in expressions]
    if title in ALWAYS:
        assert all(results), f"{title} is empty"
        numbers = [float(series["value"][1]) for result in results for series in result]
        assert not any(map(math.isnan, numbers)), f"{title} divides by nothing"
    validated["panels answered by a real Prometheus that scrapes a real sidecar"] += 1


def test_titles_are_those_of_panels() -> None:
    assert {title for title, _ in panels()} >= ALWAYS


def test_variables_find_the_pod(prometheus: Prometheus) -> None:
    found = prometheus.get("label/pod/values", **{"match[]": 'pd_sidecar_build_info{namespace="space"}'})
    assert found == ["decode-0"]


def test_no_alert_of_a_sidecar_that_is_well(prometheus: Prometheus) -> None:
    eventually(lambda: all(rule["health"] == "ok" for rule in rules(prometheus)))
    assert [rule["name"] for rule in rules(prometheus)] == [rule["alert"] for rule in alerts()]
    assert [rule["name"] for rule in rules(prometheus) if rule["state"] != "inactive"] == []


def rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
