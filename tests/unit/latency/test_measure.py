"""What a run is made into: cores, parts of a TTFT, trouble; and the public generator's result."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import pytest

from e2e.engines import Metrics
from e2e.latency import measure, public
from e2e.latency.driver import LoadError, Record, Run
from e2e.latency.measure import Cores, Counted, Stage
from e2e.latency.scenarios import MODES, SCENARIOS, Mode, Scenario
from e2e.rounds import turns

REMOTE = "remote; prefill=127.0.0.1:8100"


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([0], Cores(0, 0, 0, 0)),
        ([0, 1], Cores(prefill=0, decode=1, sidecar=0, driver=0)),
        ([4, 5, 6], Cores(prefill=4, decode=5, sidecar=6, driver=6)),
        ([0, 1, 2, 3], Cores(prefill=0, decode=2, sidecar=1, driver=3)),
    ],
)
def test_who_is_on_which_core(cores: list[int], expected: Cores) -> None:
    assert Cores.chosen(cores) == expected


def test_cores_can_be_named_and_are_told() -> None:
    assert Cores.chosen([0, 1], driver=1).text() == (
        "core 0: prefill engine, sidecar or router; core 1: decode engine, load"
    )


def counted(prefill: str = "", decode: str = "") -> Counted:
    return Counted(Metrics(prefill), Metrics(decode))


BEFORE = counted(
    "vllm:request_queue_time_seconds_sum 1.0\nvllm:request_queue_time_seconds_count 4\n",
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 100\n',
)
AFTER = counted(
    "vllm:request_queue_time_seconds_sum 1.5\nvllm:request_queue_time_seconds_count 6\n"
    'vllm:prompt_tokens_by_source_total{source="local_compute"} 2000\n',
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 2100\n'
    "vllm:nixl_xfer_time_seconds_sum 0.9\nvllm:nixl_xfer_time_seconds_count 3\n",
)


def records(*decisions: str, error: str = "") -> Run:
    return Run(
        [
            Record("request", f"id-{number}", 0.5, 200, error, decision, 9, 2.0, [1.0, 1.5])
            for number, decision in enumerate(decisions)
        ],
        3.0,
        [0.001, 0.003],
    )


DIVIDED = Run(
    [
        Record("stream", "id-0", -1, 200, "", REMOTE, 9, 2.0, [1.0], broken_off=True),
        Record("long prompt", "id-1", 0.5, 200, "", "", 9, 2.0, [1.0]),
    ],
    3.0,
)
"""A stream through the sidecar, an arrival that went past it."""


def taken(mode: str, run: Run, decisions: dict[str, dict[str, Any]] | None = None) -> measure.Sample:
    return measure._sample(MODES[mode], run, BEFORE, AFTER, decisions or {})


def test_a_sample_holds_what_the_client_the_engines_and_the_sidecar_saw() -> None:
    decisions = {
        "id-0": {
            "prefill_seconds": 0.2,
            "decode_first_byte_seconds": 0.25,
            "ttft_seconds": 0.4503,
            "overhead_seconds": 0.0003,
        }
    }
    sample = taken("remote", records(REMOTE), decisions)
    assert not sample.trouble
    assert sample.decode_tokens == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 2000}
    assert sample.prefill_tokens == 2000
    assert sample.late_ms == pytest.approx(2.98)
    assert sample.parts_ms == {
        "queue": 250,
        "transfer": 300,
        "ttft": 500,
        "prefill_leg": 200,
        "decode_leg": 250,
        "sidecar": 0.3,
    }
    [request] = sample.requests
    assert (request["ttft_ms"], request["e2e_ms"], request["token_ms"]) == (500, 1500, [1000, 1500])
    assert request["sidecar_overhead_ms"] == 0.3


def test_the_counters_of_a_killed_engine_say_nothing() -> None:
    sample = taken("fallback", records(REMOTE, "recompute; reason=prefill_reset"))
    assert (sample.prefill_tokens, sample.parts_ms, sample.trouble) == (0, {}, "")


@pytest.mark.parametrize(
    ("mode", "run", "trouble"),
    [
        ("remote", records(REMOTE, "local; reason=short"), "decided 1 remote, 1 local with `--disagg on`"),
        ("remote", records(REMOTE, error="status 503: busy"), "1 of 1 requests failed: status 503: busy"),
        ("local", records("local", REMOTE), "decided 1 local, 1 remote with `--disagg off`"),
        ("local", records("local"), "2000 tokens were pulled without disaggregation"),
        ("direct", records(""), "2000 tokens were pulled without disaggregation"),
        ("elsewhere", DIVIDED, ""),
        ("fallback", records(REMOTE), "the prefill engine was killed and nobody noticed"),
        ("vllm-router", records(""), ""),
        ("auto", records(REMOTE, "local; reason=short"), ""),
    ],
)
def test_a_sample_that_does_not_show_what_it_should_says_so(mode: str, run: Run, trouble: str) -> None:
    assert taken(mode, run).trouble == trouble


def test_remote_without_kv_is_trouble() -> None:
    sample = measure._sample(MODES["remote"], records(REMOTE), BEFORE, BEFORE, {})
    assert sample.trouble == "no token was pulled: everything was computed twice"


def test_what_was_to_be_held_and_was_computed_is_trouble() -> None:
    name = "vllm:prompt_tokens_by_source_total"
    computed = counted("", f'{name}{{source="local_compute"}} 2000\n{name}{{source="external_kv_transfer"}} 100\n')
    sample = measure._sample(MODES["held"], records("local"), BEFORE, computed, {})
    assert sample.trouble == "the decode engine did not hold what arrived"


def test_rounds_turn() -> None:
    assert list(turns(["a", "b", "c"], 3)) == [["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"]]


def test_no_two_clients_of_a_scenario_share_a_prompt() -> None:
    for scenario in SCENARIOS.values():
        texts = [turn.text for client in scenario.clients(10_000) for turn in client.turns]
        beginnings = [" ".join(text.split()[:2]) for text in texts]
        assert len(set(beginnings)) == len(texts), scenario.name


def test_the_public_generators_result_is_read() -> None:
    result = {
        "start_times": [50.0, 49.0],
        "ttfts": [0.5, 0.0],
        "itls": [[0.1, 0.2], []],
        "errors": ["", "Traceback ...\nValueError: no"],
        "input_lens": [7, 8],
    }
    run = public.read(result, "x-")
    good, bad = run.records
    assert (good.request_id, good.began_s, good.prompt_tokens) == ("x-0", 1.0, 7)
    assert good.token_s == pytest.approx([1.5, 1.6, 1.8])
    assert (good.ttft_s, good.e2e_s) == (pytest.approx(0.5), pytest.approx(0.8))
    assert (bad.error, bad.token_s, bad.e2e_s) == ("ValueError: no", [], None)
    assert run.window_s == pytest.approx(1.8)


class Pretended:
    """A stage on which one way does not work."""

    failed: ClassVar[dict[str, str]] = {"vllm-router": "no wheel"}

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def sample(self, _scenario: Scenario, mode: Mode, seed: int) -> measure.Sample:
        self.asked.append((mode.name, seed))
        if mode.name == "remote":
            raise LoadError("remote at http://127.0.0.1:1: status 500")
        return measure.Sample(mode.name, 1.0, [], {}, 0, {}, trouble="odd" if mode.name == "auto" else "")


def test_a_way_that_fails_is_kept_with_its_reason_and_the_others_go_on() -> None:
    stage, said = Pretended(), list[str]()
    names = ["local", "remote", "auto", "vllm-router"]
    result = asyncio.run(
        measure.run_scenario(cast("Stage", stage), SCENARIOS["idle"], names, rounds=2, say=said.append)
    )
    assert [list(samples) for samples in result.rounds] == [["local", "auto"], ["local", "auto"]]
    assert result.failed == {"vllm-router": "no wheel", "remote": "remote at http://127.0.0.1:1: status 500"}
    assert {seed for mode, seed in stage.asked[:3]} != {seed for mode, seed in stage.asked[3:]}
    assert len({seed for _, seed in stage.asked}) == 2  # all ways of a round get the same prompts
    assert [line.strip() for line in said if line.startswith("  ")][:2] == [
        "remote: remote at http://127.0.0.1:1: status 500",
        "auto: odd",
    ]
