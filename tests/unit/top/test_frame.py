"""The frame: what an operator looks for is there, and nothing steers the terminal."""

from __future__ import annotations

from sidecar.top.frame import frame
from sidecar.top.sample import Change, Sample

METRICS = """\
process_start_time_seconds 1000
pd_sidecar_build_info{python="3.11.7",version="1.2.3"} 1
pd_sidecar_effective 1
pd_sidecar_requests_total{api="chat",decision="remote",reason="long",status="200"} 30
pd_sidecar_requests_total{api="completions",decision="remote",reason="long",status="200"} 10
pd_sidecar_requests_total{api="chat",decision="local",reason="short",status="200"} 60
pd_sidecar_ttft_seconds_bucket{decision="remote",le="0.1"} 40
pd_sidecar_ttft_seconds_bucket{decision="remote",le="+Inf"} 40
pd_sidecar_ttft_seconds_count{decision="remote"} 40
pd_sidecar_inflight{leg="decode"} 7
pd_sidecar_inflight{leg="prefill"} 2
pd_sidecar_recompute_inflight 1
pd_sidecar_breaker_state{prefill="10.0.0.5:8000"} 0
pd_sidecar_breaker_state{prefill="10.0.0.6:8000"} 2
pd_sidecar_breaker_state{prefill="10.0.0.7:8000"} 0
pd_sidecar_prefill_inflight{prefill="10.0.0.5:8000"} 2
pd_sidecar_prefill_blocked{prefill="10.0.0.7:8000",reason="incompatible"} 1
pd_sidecar_fallbacks_total{reason="refused",stage="prefill"} 5
"""


def drawn(metrics: str = METRICS, problem: str = "") -> list[str]:
    now = Sample.read(1100.0, metrics, "auto", problem)
    return frame("http://x:9090", Change(now.zero, now))


def columns(lines: list[str], beginning: str) -> list[str]:
    """The cells of the only line that begins so."""
    (line,) = [line for line in lines if line.startswith(beginning)]
    return line.split()


def test_all_of_it() -> None:
    lines = drawn()
    assert lines[0] == "pd-sidecar 1.2.3 at http://x:9090   disagg auto   ready   effective"
    assert "up 100 s" in lines[1]
    assert "1.0 requests/s since its start" in lines[1]
    assert columns(lines, "remote    long") == ["remote", "long", "0.4", "40"]
    assert columns(lines, "local     short") == ["local", "short", "0.6", "60"]
    assert any(line.split() == ["remote", "50", "ms", "99", "ms", "40"] for line in lines)
    assert "in flight: 7 at decode, 2 at prefill, 1 recomputes, 0 releases" in lines
    assert columns(lines, "10.0.0.5:8000") == ["10.0.0.5:8000", "closed", "2"]
    assert columns(lines, "10.0.0.6:8000") == ["10.0.0.6:8000", "OPEN", "0"]
    assert columns(lines, "10.0.0.7:8000") == ["10.0.0.7:8000", "closed", "incompatible", "0"]
    assert columns(lines, "prefill   refused") == ["prefill", "refused", "0.1", "5"]


def test_troubles_come_first() -> None:
    endpoints = [line.split()[0] for line in drawn() if line.startswith("10.0.0.")]
    assert endpoints == ["10.0.0.7:8000", "10.0.0.6:8000", "10.0.0.5:8000"]


def test_not_ready_and_not_effective() -> None:
    lines = drawn(METRICS.replace("effective 1", "effective 0"), "decode engine: /health says 503")
    assert "NOT READY: decode engine: /health says 503" in lines[0]
    assert "NOT EFFECTIVE" in lines[0]


def test_nothing_has_happened() -> None:
    lines = drawn("pd_sidecar_effective 1\n")
    assert {"no request yet", "no prefill endpoint is known", "no fallbacks"} <= set(lines)


def test_long_tables_are_cut() -> None:
    more = "".join(f'pd_sidecar_breaker_state{{prefill="h{number}:1"}} 0\n' for number in range(40))
    assert "... and 31 more" in drawn(METRICS + more)


def test_no_escape_sequence_passes() -> None:
    lines = drawn(METRICS.replace("10.0.0.5", "\x1b[2J"), "\x1b]0;title\x07")
    assert all(line.isprintable() for line in lines)
