"""Samples as a run leaves them, made by hand."""

from __future__ import annotations

from typing import Any

from e2e.latency.numbers import Targets
from e2e.latency.scenarios import LONG, STREAM

TARGETS = Targets(ttft_ms=1000, itl_ms=200)


def request(
    *gaps_ms: float, kind: str = "request", ttft_ms: float = 100, decision: str = "local", **more: Any
) -> dict[str, Any]:
    """A whole answer that began at 0 (a stream: before), with these gaps between its tokens."""
    began = -500.0 if kind == STREAM else 0.0
    tokens = [began + ttft_ms]
    for gap in gaps_ms:
        tokens.append(tokens[-1] + gap)
    return {
        "kind": kind,
        "began_ms": began,
        "status": 200,
        "error": "",
        "decision": decision,
        "prompt_tokens": 10,
        "ttft_ms": ttft_ms,
        "e2e_ms": None if kind == STREAM else tokens[-1] - began,
        "token_ms": tokens,
        **more,
    }


def sample(
    mode: str, *requests: dict[str, Any], trouble: str = "", pulled: int = 0, **parts: float
) -> dict[str, Any]:
    return {
        "mode": mode,
        "window_s": 10.0,
        "requests": list(requests),
        "decode_tokens": {"local_compute": 70, "local_cache_hit": 5, "external_kv_transfer": pulled},
        "prefill_tokens": 40,
        "parts_ms": parts,
        "late_ms": 1.0,
        "trouble": trouble,
    }


def interference(mode: str, gap_ms: float, trouble: str = "", overhead_ms: float = 0.3) -> dict[str, Any]:
    """Two streams with nothing but gaps of this length, and one arrival."""
    decision = "local; reason=disabled" if mode == "local" else "remote; prefill=10.0.0.5:8000"
    more = {} if mode == "local" else {"sidecar_overhead_ms": overhead_ms}
    streams = [request(*[gap_ms] * 20, kind=STREAM, ttft_ms=400, decision=decision) for _ in range(2)]
    arrival = request(10, 10, kind=LONG, ttft_ms=900, decision=decision, **more)
    return sample(mode, *streams, arrival, trouble=trouble)


def results(*rounds: dict[str, dict[str, Any]], scenario: str = "interference") -> dict[str, Any]:
    return {scenario: {"scenario": scenario, "rounds": list(rounds), "failed": {}}}
