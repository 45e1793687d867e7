"""`make latency` from end to end, once and small: a report with real numbers in it. No number is judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from e2e.latency.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


def test_one_scenario_by_two_ways(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--scenario", "idle", "--mode", "local", "--mode", "remote", "--rounds", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "latency.json").read_text())
    [samples] = document["scenarios"]["idle"]["rounds"]
    for mode in ("local", "remote"):
        assert samples[mode]["trouble"] == ""
        assert [len(request["token_ms"]) for request in samples[mode]["requests"]] == [16] * 4
        asked = sum(request["prompt_tokens"] for request in samples[mode]["requests"])
        tokens = samples[mode]["decode_tokens"]
        assert tokens["external_kv_transfer" if mode == "remote" else "local_compute"] == asked
    parts = samples["remote"]["parts_ms"]
    assert {"ttft", "queue", "prefill", "prefill_leg", "transfer", "decode_leg", "sidecar"} <= parts.keys()
    assert parts["prefill"] < parts["prefill_leg"] < parts["ttft"]
    assert all("sidecar_overhead_ms" in request for request in samples["remote"]["requests"])
    report = (tmp_path / "latency.md").read_text()
    assert "the sidecar's own share of TTFT, p99" in report
    assert (tmp_path / "ttft-p50.svg").exists()
