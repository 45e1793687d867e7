"""Data parallelism on real engines: two ranks behind one port, and one port for each rank.

A rank is an engine of its own: NIXL engine id, side channel, blocks, prefix cache. So a request that is pinned to a
rank must be prefilled and decoded by it, pull from it alone, and whatever goes wrong with it must stay with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    ANSWER_TIMEOUT_S,
    APIS,
    COMPLETIONS,
    RESPONSES,
    Api,
    ask,
    eventually,
    local_text,
    prompt,
    prompt_for,
    prompt_tokens,
    request_body,
    text_of,
    together,
)
from e2e.pair import LEASE_S, SOONER_THAN_A_LEASE_S, Pair, free, idle, paired
from e2e.rig import Rig
from e2e.side_channel import wound

if TYPE_CHECKING:
    from e2e.engines import Engine
    from tests.integration.sidecar import Sidecar

RANKS = (0, 1)
LOAD_BALANCING = {
    "internal": [],
    "hybrid": ["--data-parallel-hybrid-lb"],
}
"""Both put all local ranks behind one port. External load balancing, one port for each, is refused by vLLM 0.32 for
models that are no mixture of experts: it asks for independent engines, and those are below."""


@pytest.fixture(scope="module", params=LOAD_BALANCING)
def ranks_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    size = str(len(RANKS))
    flags = ["--data-parallel-size", size, "--data-parallel-size-local", size, *LOAD_BALANCING[request.param]]
    with Rig("tiny", lease_seconds=LEASE_S, extra_flags=flags) as rig:
        yield rig


@pytest.fixture
def pair(ranks_rig: Rig) -> Iterator[Pair]:
    with paired(ranks_rig.prefill[0], ranks_rig.decode[0]) as pair:
        yield pair


def tokens(engine: Engine, source: str) -> list[int]:
    """Prompt tokens of each rank that came from `source`."""
    metrics = engine.metrics()
    name = "vllm:prompt_tokens_by_source_total"
    return [int(metrics.total(name, source=source, engine=str(rank))) for rank in RANKS]


@dataclass(frozen=True)
class Seen:
    """What each rank of both engines has done with prompts."""

    computed: list[int]
    """At prefill."""
    pulled: list[int]
    """At decode."""
    recomputed: list[int]
    """At decode."""

    @classmethod
    def of(cls, pair: Pair) -> Seen:
        return cls(
            tokens(pair.prefill, "local_compute"),
            tokens(pair.decode, "external_kv_transfer"),
            tokens(pair.decode, "local_compute"),
        )

    def __sub__(self, before: Seen) -> Seen:
        return Seen(
            [now - then for now, then in zip(self.computed, before.computed, strict=True)],
            [now - then for now, then in zip(self.pulled, before.pulled, strict=True)],
            [now - then for now, then in zip(self.recomputed, before.recomputed, strict=True)],
        )


def only(rank: int, count: int) -> list[int]:
    return [count if one == rank else 0 for one in RANKS]


def ask_rank(where: Sidecar | Engine, rank: int, api: Api, body: dict[str, Any]) -> Any:
    return ask(where, api, body, x_data_parallel_rank=str(rank))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_pinned_request_is_prefilled_and_decoded_by_its_rank(pair: Pair, streamed: bool) -> None:
    decode = pair.tap(pair.decode)
    sidecar = pair.serve(decode_port=decode.port)
    relays: dict[int, set[str]] = {rank: set() for rank in RANKS}
    for api in APIS:
        if api is RESPONSES:  # vLLM reads the header on every API but this
            continue
        for rank in RANKS:
            body = request_body(api, prompt_for(api, 300), stream=streamed)
            before = Seen.of(pair)
            answer = ask_rank(sidecar, rank, api, body)
            moved = Seen.of(pair) - before
            assert answer.decision == f"remote; prefill={pair.prefill.address}"
            handoff = decode.seen[-1].json["kv_transfer_params"]
            assert handoff["remote_engine_id"].endswith(f"_dp{rank}")
            relays[rank].add(handoff["remote_host"])
            assert text_of(answer) == local_text(pair.decode, api, body)
            length = prompt_tokens(ask(pair.decode, api, {**body, "stream": False}))
            assert moved == Seen(only(rank, length), only(rank, length), only(rank, 0)), (api, rank)
    assert len(relays[0]) == len(relays[1]) == 1, "decode keys what it knows of an engine by its address"
    assert not relays[0] & relays[1]
    idle(sidecar)


def test_requests_that_nobody_pins_may_cross_ranks(pair: Pair) -> None:
    sidecar = pair.serve()
    bodies = [request_body(COMPLETIONS, prompt(300), stream=bool(number % 2)) for number in range(8)]
    before = Seen.of(pair)
    answers = together([partial(ask, sidecar, COMPLETIONS, body) for body in bodies])
    moved = Seen.of(pair) - before
    assert {answer.decision for answer in answers} == {f"remote; prefill={pair.prefill.address}"}
    assert all(moved.computed), "one of the prefill ranks did nothing"
    assert sum(moved.pulled) == sum(moved.computed)
    assert moved.recomputed == [0, 0]
    for body, answer in zip(bodies, answers, strict=True):
        assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_that_does_not_exist(pair: Pair, rank: str) -> None:
    sidecar = pair.serve()
    body = request_body(COMPLETIONS, prompt(300))
    through = ask(sidecar, COMPLETIONS, body, x_data_parallel_rank=rank)
    straight = ask(pair.decode, COMPLETIONS, body, x_data_parallel_rank=rank)
    assert through.status == straight.status == 400
    assert through.json == straight.json
    assert "out of range" in through.json["error"]["message"]
    free(pair.prefill, pair.decode, within_s=SOONER_THAN_A_LEASE_S)


# -- faults stay where they are --------------------------------------------------------------------------------


def test_a_bad_handoff_of_one_rank(pair: Pair) -> None:
    """While rank 0 sends nothing but rubbish, the requests of rank 1 are pulled from rank 1 as if nothing was."""
    prefill = pair.tap(pair.prefill)
    sidecar = pair.serve("--recompute-max-concurrent", "8", prefill=prefill.address)

    def spoilt(passed: Any, answer: Any) -> Any:
        rank = next((value for name, value in passed.headers.items() if name.lower() == "x-data-parallel-rank"), "")
        if rank == "0":
            answer["kv_transfer_params"]["remote_block_ids"] = [[999_999]]
        return answer

    prefill.answered = spoilt
    everybody = threading.Barrier(8)  # has been sent off before the first answer says anything about a rank
    prefill.asked = lambda _passed: everybody.wait(ANSWER_TIMEOUT_S)
    bodies = [request_body(COMPLETIONS, prompt(300), stream=bool(number % 2)) for number in range(8)]
    before = Seen.of(pair)
    answers = together(
        [partial(ask_rank, sidecar, number % 2, COMPLETIONS, body) for number, body in enumerate(bodies)]
    )
    moved = Seen.of(pair) - before
    assert moved.pulled[0] == 0, "decode was given a handoff that cannot be right"
    assert moved.recomputed[1] == 0, "rank 1 had to compute a prompt of its own"
    assert [answer.decision.partition(";")[0] for answer in answers] == ["recompute", "remote"] * 4
    for body, answer in zip(bodies, answers, strict=True):
        assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
    idle(sidecar)


def test_a_client_of_one_rank_leaves(pair: Pair) -> None:
    """Its rank gives its blocks back; a stream of the other rank goes on to its end."""
    free(pair.prefill, within_s=LEASE_S + 15)  # a bad handoff has left blocks to the lease
    sidecar = pair.serve()
    body = request_body(COMPLETIONS, prompt(300), 200, stream=True, ignore_eos=True)
    leaving = request_body(COMPLETIONS, prompt(300), 4000, stream=True, ignore_eos=True)

    def leave() -> None:
        for _ in range(4):
            with sidecar.connect() as client:
                client.request("POST", COMPLETIONS.path, leaving, [("x-data-parallel-rank", "0")])
                client.head()

    staying = partial(ask_rank, sidecar, 1, COMPLETIONS, body)
    answer, _ = together([staying, leave])
    assert answer.decision == f"remote; prefill={pair.prefill.address}"
    assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
    idle(sidecar)

    def held() -> float:
        """A rank publishes its gauges with its next step, so there is one."""
        for engine in (pair.prefill, pair.decode):
            for rank in RANKS:
                ask_rank(engine, rank, COMPLETIONS, request_body(COMPLETIONS, prompt(8), 1))
        return sum(engine.metrics().total("vllm:kv_cache_usage_perc") for engine in (pair.prefill, pair.decode))

    eventually(lambda: not held(), SOONER_THAN_A_LEASE_S)


def test_a_dead_side_channel_of_one_rank(pair: Pair) -> None:
    """Its requests are recomputed at once; those of the other rank are pulled, before and after it is known."""
    pair.prefill.restart()  # nobody has shaken hands with it
    pair.closing(pair.prefill.kill)  # beyond mending
    wound(pair.prefill)  # that of rank 0
    sidecar = pair.serve("--recompute-max-concurrent", "8")
    before = Seen.of(pair)
    decisions: dict[int, list[str]] = {rank: [] for rank in RANKS}
    for number in range(8):
        body = request_body(COMPLETIONS, prompt(300))
        answer = ask_rank(sidecar, number % 2, COMPLETIONS, body)
        decisions[number % 2].append(answer.decision.partition(";")[0])
        assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
    moved = Seen.of(pair) - before
    assert decisions[1] == ["remote"] * 4, (decisions, sidecar.log)
    assert "remote" not in decisions[0]
    assert moved.pulled[1] > 0
    assert moved.pulled[0] == 0
    idle(sidecar)


# -- one port for each rank ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def external_rig() -> Iterator[Rig]:
    """What vLLM asks for in place of external load balancing where a model has no experts: engines that know
    nothing of each other, on consecutive ports."""
    with Rig("tiny", decode=len(RANKS), lease_seconds=LEASE_S, consecutive=True) as rig:
        yield rig


def test_one_port_for_each_rank(external_rig: Rig) -> None:
    first = external_rig.decode[0]
    with paired(external_rig.prefill[0], first) as pair:
        sidecar = pair.serve("--data-parallel-size", str(len(RANKS)), "--warm-up", "on", ranks=len(RANKS))
        eventually(lambda: sidecar.metrics()("warmups_total", outcome="warm") == 1)
        shaken = sidecar.metrics()("nixl_handshakes_total")
        assert shaken == len(RANKS), "each rank shakes hands by itself"
        for rank, engine in enumerate(external_rig.decode):
            body = request_body(COMPLETIONS, prompt(300))
            before = [one.prompt_tokens_by_source()["external_kv_transfer"] for one in external_rig.decode]
            answer = ask(sidecar.port + rank, COMPLETIONS, body)
            after = [one.prompt_tokens_by_source()["external_kv_transfer"] for one in external_rig.decode]
            assert answer.decision == f"remote; prefill={pair.prefill.address}"
            moved = [now - then for now, then in zip(after, before, strict=True)]
            assert moved == only(rank, prompt_tokens(answer))
            assert text_of(answer) == local_text(engine, COMPLETIONS, body)
        assert sidecar.metrics()("nixl_handshakes_total") == shaken

        external_rig.decode[1].kill()
        answers = [ask(sidecar.port + rank, COMPLETIONS, request_body(COMPLETIONS, prompt(300))) for rank in RANKS]
        assert [answer.status for answer in answers] == [200, 503]
        idle(sidecar)
