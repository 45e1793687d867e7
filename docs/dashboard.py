"""The Grafana dashboard of the chart: a row of panels for each question that an operator has, in their order."""

from typing import Any

Panel = dict[str, Any]

SELECT = 'namespace=~"$namespace",pod=~"$pod"'
WIDTH, HEIGHT = 24, 8


def _rate(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{SELECT}{more}}}[$__rate_interval]))"


def _quantile(q: float, metric: str, by: str = "") -> str:
    return f"histogram_quantile({q}, {_rate(f'{metric}_bucket', f'{by}, le' if by else 'le')})"


_REMOTE = _rate("pd_sidecar_requests_total", "namespace", ',decision="remote"')
_SPLITTABLE = _rate("pd_sidecar_requests_total", "namespace", ',api!~"other|none"')

# Row → panels of (kind, title, unit, [(expression, legend)]).
ROWS: tuple[tuple[str, tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...]], ...] = (
    (
        "Does it pay?",
        (
            ("stat", "Effective (0: paid for, no KV)", "none", ((f"min(pd_sidecar_effective{{{SELECT}}})", ""),)),
            ("stat", "Remote share", "percentunit", ((f"{_REMOTE} / {_SPLITTABLE}", "{{namespace}}"),)),
            (
                "timeseries",
                "TTFT p50 by decision",
                "s",
                ((_quantile(0.5, "pd_sidecar_ttft_seconds", "decision"), "{{decision}}"),),
            ),
            (
                "timeseries",
                "TTFT p95 by decision",
                "s",
                ((_quantile(0.95, "pd_sidecar_ttft_seconds", "decision"), "{{decision}}"),),
            ),
            (
                "timeseries",
                "Between tokens, p50 of streams",
                "s",
                ((_quantile(0.5, "pd_sidecar_itl_seconds", "decision"), "{{decision}}"),),
            ),
            (
                "timeseries",
                "Between tokens, p95 of streams",
                "s",
                ((_quantile(0.95, "pd_sidecar_itl_seconds", "decision"), "{{decision}}"),),
            ),
        ),
    ),
    (
        "What is decided, and why",
        (
            (
                "timeseries",
                "Requests by decision",
                "reqps",
                ((_rate("pd_sidecar_requests_total", "decision"), "{{decision}}"),),
            ),
            (
                "timeseries",
                "Requests by reason",
                "reqps",
                ((_rate("pd_sidecar_requests_total", "decision, reason"), "{{decision}}: {{reason}}"),),
            ),
            (
                "timeseries",
                "Answers by status",
                "reqps",
                ((_rate("pd_sidecar_requests_total", "status"), "{{status}}"),),
            ),
        ),
    ),
    (
        "What auto knows",
        (
            (
                "timeseries",
                "Time to first byte over its prediction, p50",
                "none",
                ((_quantile(0.5, "pd_sidecar_prediction_ratio", "decision"), "{{decision}}"),),
            ),
            (
                "timeseries",
                "Decisions without the cost rule",
                "reqps",
                ((_rate("pd_sidecar_static_decisions_total", "cause"), "{{cause}}"),),
            ),
            (
                "timeseries",
                "KV blocks that decode is known to hold",
                "none",
                ((f"sum by (pod) (pd_sidecar_prefix_index_blocks{{{SELECT}}})", "{{pod}}"),),
            ),
            (
                "timeseries",
                "KV events",
                "reqps",
                ((_rate("pd_sidecar_kv_events_total", "type"), "{{type}}"),),
            ),
        ),
    ),
    (
        "What fails",
        (
            (
                "timeseries",
                "Fallbacks by stage and reason",
                "reqps",
                ((_rate("pd_sidecar_fallbacks_total", "stage, reason"), "{{stage}}: {{reason}}"),),
            ),
            (
                "timeseries",
                "Prefill attempts by outcome",
                "reqps",
                ((_rate("pd_sidecar_prefill_attempts_total", "outcome"), "{{outcome}}"),),
            ),
            (
                "timeseries",
                "Handoffs by what became of them",
                "reqps",
                ((_rate("pd_sidecar_handoffs_total", "outcome"), "{{outcome}}"),),
            ),
            (
                "timeseries",
                "Recomputes that hold budget",
                "none",
                ((f"sum by (pod) (pd_sidecar_recompute_inflight{{{SELECT}}})", "{{pod}}"),),
            ),
        ),
    ),
    (
        "Prefill endpoints and their side channels",
        (
            (
                "timeseries",
                "Discovered endpoints",
                "none",
                ((f"sum by (state) (pd_sidecar_discovery_endpoints{{{SELECT}}})", "{{state}}"),),
            ),
            (
                "timeseries",
                "Age of what discovery knows, its errors",
                "s",
                (
                    (f"max by (pod) (pd_sidecar_discovery_age_seconds{{{SELECT}}})", "{{pod}}"),
                    (_rate("pd_sidecar_discovery_errors_total", "reason"), "errors/s: {{reason}}"),
                ),
            ),
            (
                "timeseries",
                "Breakers (0 closed, 1 half open, 2 open)",
                "none",
                ((f"max by (prefill) (pd_sidecar_breaker_state{{{SELECT}}})", "{{prefill}}"),),
            ),
            (
                "timeseries",
                "Blocked endpoints",
                "none",
                (
                    (
                        f"sum by (prefill, reason) (pd_sidecar_prefill_blocked{{{SELECT}}})",
                        "{{prefill}}: {{reason}}",
                    ),
                ),
            ),
            (
                "timeseries",
                "Handshakes by outcome",
                "reqps",
                ((_rate("pd_sidecar_nixl_handshakes_total", "outcome"), "{{outcome}}"),),
            ),
            (
                "timeseries",
                "Handshake p99, warm-ups",
                "s",
                (
                    (_quantile(0.99, "pd_sidecar_nixl_handshake_seconds"), "handshake p99"),
                    (_rate("pd_sidecar_warmups_total", "outcome"), "warm-ups/s: {{outcome}}"),
                ),
            ),
        ),
    ),
    (
        "TLS and traces",
        (
            (
                "timeseries",
                "TLS handshakes of clients",
                "reqps",
                ((_rate("pd_sidecar_tls_handshakes_total", "outcome"), "{{outcome}}"),),
            ),
            (
                "stat",
                "The certificate ends in",
                "s",
                ((f"min(pd_sidecar_tls_certificate_not_after_seconds{{{SELECT}}}) - time()", ""),),
            ),
            (
                "timeseries",
                "Traced requests",
                "reqps",
                ((_rate("pd_sidecar_traces_total", "outcome"), "{{outcome}}"),),
            ),
        ),
    ),
    (
        "Where the time goes",
        (
            (
                "timeseries",
                "Legs p95",
                "s",
                (
                    (_quantile(0.95, "pd_sidecar_prefill_seconds"), "prefill"),
                    (_quantile(0.95, "pd_sidecar_decode_first_byte_seconds"), "decode, first byte"),
                ),
            ),
            (
                "timeseries",
                "The sidecar itself",
                "s",
                (
                    (_quantile(0.5, "pd_sidecar_overhead_seconds"), "overhead p50"),
                    (_quantile(0.99, "pd_sidecar_overhead_seconds"), "overhead p99"),
                    (_quantile(0.99, "pd_sidecar_decision_seconds"), "decision p99"),
                ),
            ),
            (
                "timeseries",
                "Open legs and tasks",
                "none",
                (
                    (f"sum by (leg) (pd_sidecar_inflight{{{SELECT}}})", "{{leg}}"),
                    (f"sum (pd_sidecar_tasks{{{SELECT}}})", "tasks"),
                ),
            ),
            (
                "timeseries",
                "Memory",
                "bytes",
                (
                    (
                        f"process_resident_memory_bytes{{{SELECT}}} and on (instance) pd_sidecar_build_info",
                        "{{pod}}",
                    ),
                ),
            ),
        ),
    ),
)


def _variable(name: str, query: str) -> Panel:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> Panel:
    """The whole file; the id of a panel is its place."""
    panels: list[Panel] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        width = WIDTH // len(row)
        for place, (kind, name, unit, targets) in enumerate(row):
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": kind,
                    "title": name,
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "gridPos": {"x": place * width, "y": y + 1, "w": width, "h": HEIGHT},
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [
                        {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend}
                        for number, (expression, legend) in enumerate(targets)
                    ],
                }
            )
        y += HEIGHT + 1
    return {
        "title": "pd-sidecar",
        "uid": "pd-sidecar",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["vllm", "pd-sidecar"],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "label_values(pd_sidecar_build_info, namespace)"),
                _variable("pod", 'label_values(pd_sidecar_build_info{namespace=~"$namespace"}, pod)'),
            ]
        },
        "panels": panels,
    }
