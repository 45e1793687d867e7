"""The report says what was measured, what failed, and whether what must be shown holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from e2e.latency import numbers, report
from e2e.latency.__main__ import _flags, _plan, main
from e2e.latency.publish import compact
from e2e.latency.scenarios import MODES, SCENARIOS
from tests.unit.latency.samples import interference, request, results, sample

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MACHINE = {
    "cpu": "Abacus",
    "cores": 2,
    "virtual": True,
    "memory_gb": 8.0,
    "kernel": "6.1",
    "libc": "glibc 2.36",
    "python": "3.11.9",
    "load_average_at_start": 0.1,
    "revision": "abc1234",
    "versions": {"vllm": "0.32.0"},
}
SETTINGS = {
    "started": "2026-01-01 00:00 UTC",
    "command": "python -m e2e.latency",
    "layout": "core 0: prefill engine, load; core 1: decode engine, sidecar or router",
    "model": "smollm2",
    "dtype": "bfloat16",
    "ucx_tls": "UCX_TLS=tcp",
    "block_size": 128,
    "tamed": True,
    "targets": {"ttft_ms": 1000.0, "itl_ms": 200.0},
}


def make(found: dict[str, Any], absent: dict[str, str] | None = None) -> dict[str, Any]:
    return report.document(MACHINE, SETTINGS, found, absent or {})


def one_round(**trouble: str) -> dict[str, Any]:
    parts = {"ttft": 900.0, "prefill": 500, "prefill_leg": 520, "transfer": 300, "decode_leg": 350, "sidecar": 0.5}
    remote = interference("remote", 110, trouble.get("remote", "")) | {"parts_ms": parts}
    return {"quiet": interference("quiet", 100), "local": interference("local", 1500), "remote": remote}


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows that begin so."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first} |")
    ]


def test_it_states_the_ratios_and_whether_they_hold() -> None:
    text = report.markdown(make(results(one_round())), [])
    [to_local] = rows(text, "interference: p99 gap between tokens, remote ÷ local")
    assert to_local[1:] == ["≤ 0.15", "0.07, 1 round", "holds"]
    [share] = rows(text, "the sidecar's own share of TTFT, p99")
    assert share[1:] == ["≤ 3 ms", "0.30 ms, 2 requests", "holds"]


def test_what_remote_prefill_itself_costs_is_told_apart() -> None:
    others = {"elsewhere": interference("elsewhere", 105), "held": interference("held", 102)}
    text = " ".join(report.markdown(make(results(one_round() | others)), []).split())
    assert "attend to: that alone makes the p99 gap 1.02 times as long" in text
    assert "a busy neighbour alone makes it 1.05 times as long" in text
    assert "with nothing to prefill, makes it 1.08 times as long" in text
    assert "busy neighbour" not in report.markdown(make(results(one_round())), [])


def test_it_takes_a_remote_ttft_apart() -> None:
    text = report.markdown(make(results(one_round())), [])
    assert "What the TTFT of remote requests is made of." in text
    cells = rows(text, "remote")[-1]
    assert [cell.partition(" ")[0] for cell in cells] == [
        *("remote", "900.0", "20.0", "500.0", "300.0", "50.0", "0.5", "29.5")
    ]


def test_of_a_router_the_engines_figures_are_all_there_is() -> None:
    parts = {"ttft": 900.0, "prefill": 500.0, "transfer": 300.0}
    text = report.markdown(make(results({"vllm-router": sample("vllm-router", **parts)})), [])
    assert rows(text, "vllm-router")[-1] == ["vllm-router", "900.0", "-", "500.0", "300.0", "-", "-", "-"]


def test_trouble_and_what_failed_are_in_it() -> None:
    found = results(one_round(remote="3 of 7 requests failed: status 500"))
    found["interference"]["failed"] = {"vllm-router": "ended | with 1"}
    text = report.markdown(make(found, {"smg": "no wheel"}), [])
    assert "1 of 1 rounds: 3 of 7 requests failed: status 500" in text
    assert text.count("**DOES NOT HOLD**: 3 of 7 requests failed") == 2
    assert any("ended / with 1" in row for cells in rows(text, "vllm-router") for row in cells)
    assert "- smg: no wheel" in text


def test_what_was_decided_is_counted_where_it_may_differ() -> None:
    decisions = ("local; reason=short", "remote; prefill=10.0.0.5:8000", "local; reason=short")
    auto = sample("auto", *(request(10, decision=decision) for decision in decisions))
    text = report.markdown(make(results({"auto": auto})), [])
    assert rows(text, "auto")[2][-1] == "2 local; reason=short, 1 remote"


def test_a_load_that_was_late_is_said() -> None:
    late = sample("local", request(10)) | {"late_ms": 12.4}
    assert "the load itself was up to 12 ms late (p99)" in report.markdown(make(results({"local": late})), [])
    assert "late (p99)" not in report.markdown(make(results(one_round())), [])


def test_a_scenario_without_streams_has_times_of_its_requests() -> None:
    found = results({"direct": sample("direct", request(10, 20, ttft_ms=50))}, scenario="idle")
    text = report.markdown(make(found), [])
    [times, tokens] = [row for row in rows(text, "direct") if len(row) > 2]
    assert [cell.partition(" ")[0] for cell in times[1:5]] == ["50", "50", "50", "15"]
    assert tokens[1].startswith("100")
    assert "not measured" in text


def test_the_plots_are_drawings_and_named_in_it() -> None:
    document = make(results(one_round()))
    drawn = report.plots(document)
    assert set(drawn) == {"interference.svg", "itl-p99.svg", "ttft-p50.svg"}
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    strokes = drawn["interference.svg"].count("<path")
    assert strokes > 3 * 2  # three ways of two streams
    assert "![](interference.svg)" in report.markdown(document, list(drawn))


def test_nothing_measured_draws_nothing() -> None:
    assert report.plots(make(results({"local": sample("local")}))) == {}


def test_the_samples_are_json_again_and_make_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = make(results(one_round()))
    text = compact(document)
    assert json.loads(text) == document
    assert max(text.splitlines(), key=len).count("token_ms") == 1
    source = tmp_path / "latency.json"
    source.write_text(text)
    assert main(["--from", str(source), "--output", str(tmp_path / "again")]) == 0
    again = (tmp_path / "again" / "latency.md").read_text()
    assert again == report.markdown(document, list(report.plots(document)))
    assert again.strip() in capsys.readouterr().out
    assert (tmp_path / "again" / "interference.svg").exists()


def flags(*words: str) -> Any:
    return _flags(list(words))


def test_every_way_of_every_scenario_is_known() -> None:
    for scenario in SCENARIOS.values():
        assert set(scenario.modes) <= set(MODES)
        assert set(scenario.quick_modes) <= set(scenario.modes)
    for name, against, _ in numbers.RATIOS:
        assert {against, "remote"} <= set(SCENARIOS[name].quick_modes)  # or there is no verdict


def test_the_plan_follows_the_flags() -> None:
    assert set(_plan(flags())) == set(SCENARIOS)
    assert set(_plan(flags("--quick"))) == {"interference", "one-token", "idle"}
    assert _plan(flags("--scenario", "mixed", "--mode", "auto")) == {"mixed": ["auto"]}
    assert _plan(flags("--mode", "fallback")) == {"interference": ["fallback"]}
    assert _plan(flags("--quick", "--scenario", "bursts")) == {"bursts": list(SCENARIOS["bursts"].modes)}


def test_a_plan_of_nothing_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "idle", "--mode", "fallback"]) == 1
    assert "no scenario has the ways" in capsys.readouterr().err
