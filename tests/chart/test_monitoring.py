"""Rules and dashboards: expressions that parse, metrics and labels that exist, alerts that fire at their fault."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from sidecar.admin.metrics import PREFIX, Counter, Gauge, Histogram
from sidecar.admin.observer import Observer
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import AllowList
from sidecar.prefill.endpoints import Endpoints
from tests.chart.render import (
    CHART,
    ROOT,
    one,
    pod_spec,
    rendered,
    tool,
    validated,
    workload,
)

RULES = CHART / "files" / "rules.yaml"
ALERTS = ROOT / "docs" / "alerts.md"
TARGET_LABELS = {"namespace", "pod", "instance", "container", "job"}
OF_THE_PROCESS = {"process_resident_memory_bytes": set[str]()}
"""From prometheus-client's own collectors."""
RATE_INTERVAL, ALL = "5m", ".*"
"""What Grafana would put in for its variables."""


@cache
def metrics() -> dict[str, set[str]]:
    """Every series that the sidecar exports, and its labels."""
    found: dict[str, set[str]] = {}
    for metric in Observer(Endpoints([], AllowList([]), lambda: 0.0), Budget(1, 0)).collection.metrics:
        assert isinstance(metric, Counter | Gauge | Histogram)
        labels = set(metric.labels)
        name = PREFIX + metric.name
        if isinstance(metric, Histogram):
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name + ("_total" if isinstance(metric, Counter) else "")] = labels
    return found | OF_THE_PROCESS


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((CHART / "files" / "dashboard.json").read_text())


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def without_variables(expression: str) -> str:
    text = expression.replace("$__rate_interval", RATE_INTERVAL)
    return re.sub(r"\$\w+", ALL, text)


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """The series that an expression reads, and the labels by which it picks them."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
            child = getattr(node, name, None)
            if child is not None:
                walk(child)
        for child in getattr(node, "args", None) or []:
            walk(child)

    walk(promql_parser.parse(expression))
    return found


def check(expression: str) -> None:
    """It parses; it reads series that exist; it picks and groups by labels that they have."""
    text = without_variables(expression)
    read = selectors(text)
    assert read, text
    for name, labels in read:
        assert name in metrics(), f"the sidecar has no metric {name}"
        assert labels <= metrics()[name] | TARGET_LABELS, f"{name} has no label {labels - metrics()[name]}"
    known = set.union(TARGET_LABELS, *(metrics()[name] for name, _ in read))
    for grouped in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", text):
        assert {label.strip() for label in grouped.split(",")} <= known, text


def test_the_walk_sees_what_an_expression_reads() -> None:
    text = 'histogram_quantile(0.9, sum by (le) (rate(a_bucket{x="1"}[5m]))) / (b > 0) and on (x) max(c)'
    assert selectors(text) == [("a_bucket", {"x"}), ("b", set()), ("c", set())]


@pytest.mark.parametrize("wrong", ["pd_sidecar_nonsense", 'pd_sidecar_effective{color="red"}', "rate(up[5m]"])
def test_the_check_can_fail(wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(wrong)


@pytest.mark.parametrize("expression", panel_expressions())
def test_panel(expression: str) -> None:
    check(expression)
    validated["expressions of dashboard panels with promql-parser"] += 1


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_has_its_runbook(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    validated["expressions of alerts with promql-parser"] += 1
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (ROOT / page) == ALERTS
    sections = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", ALERTS.read_text(), re.MULTILINE | re.DOTALL)
    text = next(body for title, body in sections if title == rule["alert"])
    assert anchor == rule["alert"].lower()
    assert len(text.split()) > 30
    # What a summary shows must be among the labels that the expression leaves.
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in TARGET_LABELS | set.union(*(metrics()[name] for name, _ in selectors(rule["expr"])))


def test_no_runbook_without_its_alert() -> None:
    sections = re.findall(r"^## (\w+)$", ALERTS.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]


def promtool(*arguments: str) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))
    validated["alert rules with promtool check rules"] += len(alerts())


def test_promtool_accepts_the_rendered_rules(tmp_path: Path) -> None:
    """With the runbooks' address replaced, and nothing else."""
    spec = one(rendered("gpu-rdma"), "PrometheusRule")["spec"]
    expected = RULES.read_text().replace("docs/alerts.md", "https://wiki.example/pd-sidecar")
    assert spec == yaml.safe_load(expected)
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    promtool("check", "rules", str(file))


CALM = {
    "pd_sidecar_effective": "1x60",
    'pd_sidecar_fallbacks_total{stage="prefill",reason="refused"}': "0+1x60",
    'pd_sidecar_prefill_attempts_total{outcome="ok"}': "0+600x60",
    'pd_sidecar_requests_total{decision="remote",reason="long",status="200"}': "0+600x60",
    'pd_sidecar_requests_total{decision="recompute",reason="decode_over_budget",status="503"}': "0x60",
    'pd_sidecar_requests_total{decision="remote",reason="x",status="502"}': "0+1x60",
    'pd_sidecar_breaker_state{prefill="10.0.0.5:8000"}': "0x60",
    'pd_sidecar_nixl_handshakes_total{outcome="live"}': "0+10x60",
    'pd_sidecar_nixl_handshakes_total{outcome="silent"}': "3x60",
    'pd_sidecar_discovery_endpoints{state="ready"}': "2x60",
    "pd_sidecar_discovery_age_seconds": "70x60",
    'pd_sidecar_handoffs_total{outcome="used"}': "0+600x60",
    'pd_sidecar_handoffs_total{outcome="stranded"}': "0+1x60",
    "pd_sidecar_tls_certificate_not_after_seconds": "2000000x60",
    'pd_sidecar_overhead_seconds_bucket{le="0.001"}': "0+600x60",
    'pd_sidecar_overhead_seconds_bucket{le="0.5"}': "0+600x60",
    'pd_sidecar_overhead_seconds_bucket{le="+Inf"}': "0+600x60",
}
FAULTS: dict[str, dict[str, str]] = {
    "PdSidecarIneffective": {"pd_sidecar_effective": "0x60"},
    "PdSidecarFallbacks": {'pd_sidecar_fallbacks_total{stage="prefill",reason="refused"}': "0+60x60"},
    "PdSidecarOverBudget": {
        'pd_sidecar_requests_total{decision="recompute",reason="decode_over_budget",status="503"}': "0+1x60"
    },
    "PdSidecarErrors": {'pd_sidecar_requests_total{decision="remote",reason="x",status="502"}': "0+60x60"},
    "PdSidecarBreakerOpen": {'pd_sidecar_breaker_state{prefill="10.0.0.5:8000"}': "2x60"},
    "PdSidecarPrefillBlocked": {
        'pd_sidecar_prefill_blocked{prefill="10.0.0.5:8000",reason="incompatible"}': "1x60"
    },
    "PdSidecarDiscoveryStale": {"pd_sidecar_discovery_age_seconds": "0+60x60"},
    "PdSidecarNoPrefill": {
        'pd_sidecar_discovery_endpoints{state="ready"}': "0x60",
        'pd_sidecar_requests_total{decision="local",reason="no_target",status="200"}': "0+60x60",
    },
    "PdSidecarHandshakes": {'pd_sidecar_nixl_handshakes_total{outcome="silent"}': "0+1x60"},
    "PdSidecarStranded": {'pd_sidecar_handoffs_total{outcome="stranded"}': "0+60x60"},
    "PdSidecarCertificate": {"pd_sidecar_tls_certificate_not_after_seconds": "90000x60"},
    "PdSidecarSlow": {'pd_sidecar_overhead_seconds_bucket{le="0.001"}': "0+1x60"},
}
"""Alert → the series (one sample a minute, for an hour) that make it fire, and no other."""


def test_every_alert_has_its_fault() -> None:
    assert list(FAULTS) == [rule["alert"] for rule in alerts()]


@pytest.mark.parametrize("alert", [None, *FAULTS], ids=lambda alert: alert or "calm")
def test_alerts_fire_at_their_fault_and_at_no_other(alert: str | None, tmp_path: Path) -> None:
    series = CALM | (FAULTS[alert] if alert else {})
    pod = {"namespace": "space", "pod": "decode-0"}
    query = "count by (alertname) (ALERTS{alertstate='firing'})"
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": _on(pod, name), "values": values} for name, values in series.items()],
                "promql_expr_test": [{"expr": query, "eval_time": "45m", "exp_samples": expected}],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(file))
    validated["faults whose alert fires (promtool test rules)"] += 1


def _on(pod: dict[str, str], series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    of_pod = ",".join(f'{key}="{value}"' for key, value in pod.items())
    return f"{name}{{{of_pod}{',' if labels else ''}{labels}}}"


def test_pod_monitors_name_ports_that_exist() -> None:
    for values in ("gpu-rdma", "data-parallel"):
        documents = rendered(values)
        for monitor in (each for each in documents if each["kind"] == "PodMonitor"):
            component = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
            spec = pod_spec(workload(documents, component))
            everywhere = [*spec.get("initContainers", []), *spec["containers"]]
            names = {port["name"] for container in everywhere for port in container["ports"]}
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                assert endpoint["port"] in names
                validated["ports of PodMonitors against the pods' ports"] += 1


def test_the_dashboard_is_mounted_whole() -> None:
    config_map = one(rendered("gpu-rdma"), "ConfigMap", "dashboard")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["pd-sidecar.json"]) == dashboard()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
