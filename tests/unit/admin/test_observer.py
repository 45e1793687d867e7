"""What is counted, logged and remembered of a request: the same story three times."""

import asyncio
import json
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.admin.observer import DECISIONS_KEPT, Observer
from sidecar.decision.guards import Decision, Kind
from sidecar.edge.service import Times
from sidecar.exchange.commands import Check, Decode, Peek, Prefill, Relay
from sidecar.exchange.failures import ROWS, TABLE, Stage
from tests.unit.exchange.playbook import (
    Play,
    World,
    connected,
    decoded,
    fault,
    first_event,
    left,
    prefilled,
    pulling,
    recomputing,
    sent,
    start,
)
from tests.unit.handoffs import answer

PREFIX = "pd_sidecar_"


class Watched(World):
    """A world and its observer."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = Observer(self.endpoints, self.budget)

    def end(self, play: Play, status: int = 200, api: str = "chat", **times: float) -> None:
        play.open()
        play.exchange.close()
        passed = Times(**{"complete": 1.0, "end": 9.0, **times})
        is_left = any(fault.row.fault == "client_left" for fault in play.exchange.faults)
        self.observer.finished(api, play.exchange, status, passed, b"id-1", is_left)

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """Values by label values, these in the order of the labels' names."""
        registry = CollectorRegistry()
        registry.register(self.observer.collection)
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
            if sample.name == PREFIX + name
        }


@pytest.fixture
def world() -> Watched:
    return Watched()


def test_names_that_dashboards_depend_on(world: Watched) -> None:
    world.end(
        pulling(world) >> decoded() << Relay, prefill_sent=2.0, prefill_done=3.0, decode_sent=4.0, first_byte=5.0
    )
    world.end(recomputing(world, world.b) >> connected << None >> sent << None >> decoded() << Relay)
    world.end(pulling(world) >> decoded(stream=True) << Peek >> first_event() << Relay, first_byte=5.0, pieces=3)
    world.observer.prefill_attempt("ok")
    world.observer.handshake("live", 0.001)
    registry = CollectorRegistry()
    registry.register(world.observer.collection)
    text = generate_latest(registry).decode()
    names = {
        sample.name.removeprefix(PREFIX): set(sample.labels) - {"le"}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, labels in {
        "requests_total": {"api", "decision", "reason", "status"},
        "prefill_attempts_total": {"outcome"},
        "fallbacks_total": {"stage", "reason"},
        "handoffs_total": {"outcome"},
        "inflight": {"leg"},
        "ttft_seconds_bucket": {"decision"},
        "itl_seconds_bucket": {"decision"},
        "prefill_seconds_bucket": set(),
        "decode_first_byte_seconds_bucket": set(),
        "overhead_seconds_bucket": set(),
        "recompute_inflight": set(),
        "breaker_state": {"prefill"},
        "effective": set(),
        "nixl_handshakes_total": {"outcome"},
        "nixl_handshake_seconds_bucket": set(),
        "build_info": {"version", "python"},
    }.items():
        assert names[name] == labels, name


def test_remote_request(world: Watched) -> None:
    play = pulling(world) >> decoded(stream=True) << Peek >> first_event() << Relay
    world.end(play, prefill_sent=1.5, prefill_done=3.0, engines_s=1.5, decode_sent=3.5, first_byte=4.0)
    assert world.metrics("requests_total") == {("chat", "remote", "long", "200"): 1}
    assert world.metrics("handoffs_total") == {("used",): 1}
    assert world.metrics("fallbacks_total") == {}
    assert world.metrics("prefill_seconds_sum") == {(): 1.5}
    assert world.metrics("decode_first_byte_seconds_sum") == {(): 0.5}
    assert world.metrics("ttft_seconds_sum") == {("remote",): 3.0}
    assert world.metrics("overhead_seconds_sum") == {(): 1.0}
    assert world.metrics("itl_seconds_sum") == {}  # nobody said how many pieces there were
    [record] = world.observer.decisions()
    assert record["decision"] == "remote"
    assert record["prefill"] == "10.0.0.5:8000"
    assert record["handoffs"] == ["used"]
    assert (record["prefill_seconds"], record["ttft_seconds"], record["seconds"]) == (1.5, 3.0, 8.0)
    assert (record["decode_first_byte_seconds"], record["overhead_seconds"]) == (0.5, 1.0)


def test_time_between_the_pieces_of_a_stream(world: Watched) -> None:
    stream = {"first_byte": 4.0, "end": 9.0, "pieces": 11}
    world.end(pulling(world) >> decoded(stream=True) << Peek >> first_event() << Relay, **stream)
    assert world.metrics("itl_seconds_sum") == {("remote",): 0.5}
    world.end(pulling(world) >> decoded(stream=True) << Peek >> first_event() << Relay, **stream | {"pieces": 1})
    world.end(pulling(world) >> decoded() << Relay, **stream)  # no stream: its pieces are the engine's whim
    assert world.metrics("itl_seconds_count") == {("remote",): 1}


def test_times_are_of_good_answers_only(world: Watched) -> None:
    world.end(pulling(world) >> decoded(404) << Relay, 404, decode_sent=3.5, first_byte=4.0)
    assert world.metrics("ttft_seconds_count") == {}
    world.end(world.local() >> start << Decode(None) >> left << object, 0)
    assert world.metrics("requests_total")["chat", "local", "short", "none"] == 1


@pytest.mark.parametrize("ending", ["good", "reset", "left"])
def test_fallback_is_counted_by_its_cause(world: Watched, ending: str) -> None:
    """Whatever becomes of the recompute afterwards."""
    play = recomputing(world) >> connected << None >> sent << None >> decoded() << Relay
    if ending != "good":
        play = play >> fault("reset" if ending == "reset" else "client_left") << object
    world.end(play)
    assert world.metrics("fallbacks_total") == {("timeout", "prefill"): 1}
    assert world.metrics("requests_total") == {("chat", "recompute", "prefill_timeout", "200"): 1}


def test_faults_are_logged_once_per_cause(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        play = world.remote(world.a) >> start << Prefill(world.a) >> fault("reset", "10.0.0.5:8000: gone")
        world.end(play << object if play._due else play)
        world.a.breaker.succeeded()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines[0] == (
        "prefill_reset 10.0.0.5:8000: the prefill endpoint broke the connection off: 10.0.0.5:8000: gone "
        "(request id-1)"
    )
    assert sum(line.startswith("prefill_reset ") for line in lines) == 1


def test_the_clients_own_mistakes_are_no_news(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.end(world.remote() >> start << Prefill(world.a) >> prefilled(404, b"{}") << object, 404)
    assert caplog.records == []


def test_why_no_prefill_is_usable_is_told_once(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        world.observer.decided(Decision(Kind.LOCAL, "no_usable_prefill", "breaker open"), 0.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "breaker open" in line


def test_a_model_that_only_one_side_serves_is_told_once(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        world.observer.decided(Decision(Kind.LOCAL, "model", "adapter 'french' is here only: load it there"), 0.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "adapter 'french' is here only: load it there"


def test_clients_that_leave_are_no_news(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    world.end(world.remote() >> start << Prefill(world.a) >> left << object, 0)
    assert caplog.records == []


def test_breaker_and_effective_are_told_when_they_change(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """Case 7: one loud line, not one for each request."""
    caplog.set_level(logging.INFO)
    for _ in range(8):
        world.a.breaker.succeeded()
        world.end(world.remote() >> start << Prefill(world.a) >> prefilled(body=answer(...)) << object)
    assert sum("bring no KV" in line.getMessage() for line in caplog.records) == 1
    assert world.metrics("effective") == {(): 0}
    world.a.breaker.succeeded()
    world.end(pulling(world) >> decoded() << Relay)
    assert world.metrics("effective") == {(): 1}
    assert sum("effective again" in line.getMessage() for line in caplog.records) == 1


def test_breaker_is_told_when_it_opens_and_closes(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world.end(world.remote() >> start << Prefill(world.a) >> fault("refused") << Prefill(world.b) >> left << object)
    world.end(world.remote(world.a, world.b) >> start << Prefill(world.b) >> prefilled() << Check)
    assert world.metrics("breaker_state")["10.0.0.5:8000",] == 2
    world.clock += 60
    world.end(pulling(world, world.a) >> decoded() << Relay)
    assert world.metrics("breaker_state")["10.0.0.5:8000",] == 0


def test_every_row_can_be_counted(world: Watched) -> None:
    """Label sets come from the table, never from what a client sent."""
    for row in ROWS:
        world.observer.refused(row)
    assert {labels[2] for labels in world.metrics("requests_total")} == {row.reason for row in ROWS}


def test_legs_in_flight(world: Watched) -> None:
    for leg in ("prefill", "decode", "release"):
        world.observer.leg_started(leg)
    assert set(world.metrics("inflight").values()) == {1}
    for leg in ("prefill", "decode", "release"):
        world.observer.leg_ended(leg)
    assert set(world.metrics("inflight").values()) == {0}


def test_tasks_are_those_of_the_loop(world: Watched) -> None:
    async def scrape() -> dict[tuple[str, ...], float]:
        others = [asyncio.create_task(asyncio.sleep(10)) for _ in range(2)]
        try:
            return world.metrics("tasks")
        finally:
            for task in others:
                task.cancel()

    assert asyncio.run(scrape()) == {(): 3}
    assert world.metrics("tasks") == {(): 0}  # nobody's loop


def test_decisions_are_the_last_ones_newest_first(world: Watched) -> None:
    for number in range(DECISIONS_KEPT + 50):
        world.end(world.local() >> start << Decode(None), api="other" if number % 2 else "chat")
    records = world.observer.decisions()
    assert len(records) == (DECISIONS_KEPT + 50) // 2
    for _ in range(DECISIONS_KEPT):
        world.end(world.local() >> start << Decode(None))
    world.end(world.refused("not_allowed") >> start << object, 403, api="messages")
    records = world.observer.decisions()
    assert len(records) == DECISIONS_KEPT
    assert records[0]["api"] == "messages"
    assert (records[0]["status"], records[0]["reason"]) == (403, "not_allowed")
    json.dumps(records)


def test_decisions_hold_what_happened(world: Watched) -> None:
    play = world.remote() >> start << Prefill(world.a) >> fault("refused", "gone") << Prefill(world.b)
    world.end(play >> prefilled(400, b"secret prompt") << Relay, 400, first_byte=4.0)
    [record] = world.observer.decisions()
    assert not {"decode_first_byte_seconds", "overhead_seconds"} & record.keys()  # decode was not asked
    assert record["candidates"] == ["10.0.0.5:8000", "10.0.0.6:8000"]
    assert record["faults"] == [
        {"reason": "prefill_refused", "prefill": "10.0.0.5:8000", "detail": "gone"},
        {"reason": "prefill_rejected", "prefill": "10.0.0.6:8000", "detail": "status 400"},
    ]
    assert "secret" not in json.dumps(record)
    assert record["client_left"] is False


def test_engine_that_is_gone_is_said_once(world: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """Case 29."""
    for _ in range(5):
        world.observer.engine_gone("refused", "127.0.0.1:8200: Connection refused")
    assert [record.getMessage() for record in caplog.records] == [
        "decode engine: no connection (127.0.0.1:8200: Connection refused)"
    ]
    assert TABLE[Stage.DECODE, "refused"].retry_after_s
