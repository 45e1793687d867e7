"""The load of `make latency` against simulated engines: what a client notes of whole, broken and missing answers.

Nothing here is about how long anything takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.latency import driver
from e2e.latency.driver import RUNNING_EVENTS, Client, LoadError, Record, Run, Turn
from tests.engine import Fault, ThreadedEngine
from tests.ports import free_ports

Start = Callable[..., ThreadedEngine]
PATH = "/v1/chat/completions"


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(ThreadedEngine(**options))


def load(engine: ThreadedEngine | str, *clients: Client, **more: Any) -> Run:
    url = engine if isinstance(engine, str) else engine.url
    return asyncio.run(driver.run(url, "sim", clients, **more))


def one(engine: ThreadedEngine | str, tokens: int = 8, **more: Any) -> Record:
    [record] = load(engine, Client("request", (Turn("What is a tide?", tokens),), **more)).records
    return record


def test_a_whole_answer(start: Start) -> None:
    engine = start(seconds_per_token=0.002)
    record = one(engine)
    assert (record.status, record.error, record.broken_off) == (200, "", False)
    assert len(record.token_s) == 8
    assert record.began_s < record.token_s[0] <= record.token_s[-1] <= record.ended_s
    assert record.ttft_s == record.token_s[0] - record.began_s
    assert record.e2e_s == record.ended_s - record.began_s
    assert len(record.gaps_s()) == 7
    [asked] = engine.requests
    assert record.prompt_tokens > 0
    assert asked.json["stream_options"] == {"include_usage": True}
    assert asked.header("x-request-id") == record.request_id


def test_tokens_are_the_same_however_the_stream_is_cut(start: Start) -> None:
    engine = start(seconds_per_token=0.002)
    engine.fault(Fault(ragged=True))
    record = one(engine)
    assert (record.error, len(record.token_s)) == ("", 8)


@pytest.mark.parametrize(
    ("fault", "status", "error", "tokens"),
    [
        (Fault(status=503, body=b"busy"), 503, "status 503: busy", 0),
        (Fault(reset="before_head"), 0, "connection to http://127.0.0.1", 0),
        (Fault(cut_after_events=4), 200, "connection to http://127.0.0.1", 3),
        (Fault(reset="at_cut", cut_after_events=4), 200, "connection to http://127.0.0.1", 3),
        (Fault(error_event_after=4), 200, "error event: ", 3),
        (Fault(cut_after_events=4, close_delimited=True), 200, "the stream ended without [DONE]", 3),
    ],
    ids=["status", "reset", "cut", "reset-at-cut", "error-event", "clean-end-without-done"],
)
def test_a_broken_answer_says_how_and_keeps_what_came(
    start: Start, fault: Fault, status: int, error: str, tokens: int
) -> None:
    engine = start(seconds_per_token=0.002)
    engine.fault(fault, path=PATH)
    record = one(engine)
    assert record.status == status
    assert record.error.startswith(error)
    # The first event is the role's. What a reset overtakes in the socket is lost.
    assert len(record.token_s) <= tokens
    assert len(record.token_s) == tokens or fault.reset
    assert record.e2e_s is None
    assert record.ended_s >= record.began_s


def test_nobody_there_is_a_record_too() -> None:
    record = one(f"http://127.0.0.1:{free_ports()}")
    assert record.status == 0
    assert record.error.startswith("connection to http://127.0.0.1")


def test_a_stream_that_stands_still_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "REQUEST_TIMEOUT_S", 1.5)
    engine = start()
    engine.fault(Fault(stall_after_events=3))
    record = one(engine)
    assert record.error == "not answered within 1.5 s"
    assert len(record.token_s) == 2


def test_streams_run_before_the_window_and_end_with_it(start: Start) -> None:
    engine = start(seconds_per_token=0.002)
    streams = [Client("stream", (Turn(f"stream {number}", 100_000),), background=True) for number in range(2)]
    arrival = Client("arrival", (Turn("arrival", 4),), at_s=0.05)
    begun: list[int] = []

    async def begin() -> None:
        begun.append(len(engine.requests))

    run = load(engine, *streams, arrival, begin=begin, min_window_s=0.1)
    assert begun == [2]
    assert run.window_s >= 0.1
    assert run.lateness_s
    assert all(late >= -0.001 for late in run.lateness_s)
    by_kind = {kind: [record for record in run.records if record.kind == kind] for kind in ("stream", "arrival")}
    for record in by_kind["stream"]:
        assert record.broken_off
        assert not record.error
        assert sum(at <= 0 for at in record.token_s) >= RUNNING_EVENTS
        assert record.token_s[-1] > 0.05
        assert record.e2e_s is None
    [arrived] = by_kind["arrival"]
    assert 0.05 <= arrived.began_s < arrived.ended_s <= run.window_s
    engine.wait_for(lambda one: one.running == 0)


def test_streams_that_do_not_run_stop_the_run(start: Start) -> None:
    engine = start()
    engine.fault(Fault(status=500, body=b"no"))
    with pytest.raises(LoadError, match="a background stream does not run: status 500: no"):
        load(engine, Client("stream", (Turn("stream", 100),), background=True), Client("arrival", (Turn("x", 1),)))
    assert len(engine.requests) == 1


def test_a_conversation_is_sent_whole_and_other_turns_alone(start: Start) -> None:
    engine = start()
    turns = (Turn("first", 3), Turn("second", 3))
    load(engine, Client("turn", turns, remembers=True))
    load(engine, Client("turn", turns))
    assert all("cache_salt" not in received.json for received in engine.requests)
    load(engine, Client("turn", turns), salt="pepper")
    assert [received.json.get("cache_salt") for received in engine.requests[4:]] == ["pepper"] * 2
    talk, alone = [[received.json["messages"] for received in engine.requests][i] for i in (1, 3)]
    assert [message["role"] for message in talk] == ["user", "assistant", "user"]
    assert [message["content"] for message in talk[::2]] == ["first", "second"]
    assert talk[1]["content"]
    assert alone == [{"role": "user", "content": "second"}]


def test_a_client_may_go_elsewhere(start: Start) -> None:
    engine, other = start(), start()
    there = Client("there", (Turn("there", 2),), base_url=other.url)
    run = load(engine, Client("here", (Turn("here", 2),)), there)
    assert not any(record.error for record in run.records)
    for one, text in ((engine, "here"), (other, "there")):
        assert [received.json["messages"][0]["content"] for received in one.requests] == [text]


def test_an_event_happens_in_the_window(start: Start) -> None:
    engine = start(seconds_per_token=0.01)

    async def kill() -> None:
        await asyncio.to_thread(engine.kill)

    [record] = load(engine, Client("request", (Turn("long", 1000),)), events=[(0.1, kill)]).records
    assert record.token_s
    assert record.error.startswith("connection to")
