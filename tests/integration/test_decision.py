"""The decision rules on engines: prefixes that decode holds, costs that are learnt, signals that are cut."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import CHAT, COMPLETIONS, GENERATE
from tests.integration.sidecar import Sidecar, chat, completion, eventually
from tests.ports import free_ports

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.client import Answer

BLOCK = 16
MINIMUM = 256
SETTLE_S = 0.05
"""Until a client reads on: what the answer's last step did to the cache is told behind it."""

Started = Callable[..., tuple[Sidecar, ThreadedEngine, ThreadedEngine]]


@pytest.fixture
def started() -> Iterator[Started]:
    """`started(*flags, **options of the decode engine)`: a sidecar in mode auto, a prefill and a decode engine."""
    with ExitStack() as stack:

        def start(
            *flags: str, prefill: dict[str, Any] | None = None, **decode_options: Any
        ) -> tuple[Sidecar, ThreadedEngine, ThreadedEngine]:
            prefill_engine = stack.enter_context(ThreadedEngine(block_size=BLOCK, **(prefill or {})))
            decode = stack.enter_context(ThreadedEngine(block_size=BLOCK, **decode_options))
            sidecar = Sidecar(
                *("--model-server-port", str(decode.port), "--prefill", prefill_engine.address),
                *("--disagg", "auto", *flags),
            )
            stack.callback(sidecar.stop)
            return sidecar, prefill_engine, decode

        yield start


# -- the prefix index ------------------------------------------------------------------------------------------


def events() -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags of a sidecar that follows KV events, and options of the engine that publishes them."""
    port, replay = free_ports(), free_ports()
    flags = "--kv-events", "on", "--kv-events-port", str(port), "--kv-events-replay-port", str(replay)
    return flags, {
        "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
        "kv_events_replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }


def ids(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(300, 30_000) for _ in range(count)]


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_prefixes_that_decode_holds_stay_local(started: Started, path: str) -> None:
    """To the token: prompts around the threshold, with a prefix that decode has, and as many without."""
    flags, options = events()
    sidecar, _, _ = started(*flags, "--decision-rule", "static", **options)
    draw = random.Random(5)

    def ask(tokens: list[int]) -> str:
        body: dict[str, Any] = {"model": "sim", "prompt": tokens, "max_tokens": 1}
        if path == GENERATE:
            body = {"model": "sim", "token_ids": tokens, "sampling_params": {"max_tokens": 1}}
        answer = sidecar.ask("POST", path, body)
        assert answer.status == 200
        return answer.decision.partition("; prefill")[0]

    beginning = ids(64 * BLOCK, draw)
    known = len(beginning)
    assert ask(beginning).startswith("remote")
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") >= known // BLOCK)
    for new in [*range(MINIMUM - 15, MINIMUM + 15), *(draw.randrange(1, 2 * MINIMUM) for _ in range(30))]:
        held = draw.randrange(20, 64) * BLOCK
        prompt = [*beginning[:held], *ids(new, draw)]
        assert ask(prompt) == ("local; reason=cached" if new < MINIMUM else "remote"), (held, new)
        stranger = ids(len(prompt), draw)
        assert ask(stranger) == "remote"
    metrics = sidecar.metrics()
    assert metrics("kv_events_total", type="stored") > 0
    assert metrics("requests_total", reason="cached") > 20


def said(*words: str) -> dict[str, Any]:
    """A chat: the user's words and, in between, the assistant's."""
    roles = "user", "assistant"
    messages = [{"role": roles[turn % 2], "content": each} for turn, each in enumerate(words)]
    return {"model": "sim", "messages": messages, "max_tokens": 8}


def letters(tokens: int, draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghij ", k=4 * tokens))


@pytest.mark.parametrize("stream", [True, False])
def test_turns_of_a_chat_stay_where_their_beginning_is_held(started: Started, stream: bool) -> None:
    """The first turn goes remote; of later ones only what is new counts, as the engine's own count shows."""
    flags, options = events()
    sidecar, _, decode = started(*flags, "--decision-rule", "static", **options)
    draw = random.Random(8)

    def ask(*words: str, **more: Any) -> Answer:
        time.sleep(SETTLE_S)
        answer = sidecar.ask("POST", CHAT, {**said(*words), "stream": stream, **more})
        assert answer.status == 200
        return answer

    ask(letters(600, draw))  # tells how long the engine's blocks are
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") > 0)
    first = letters(1000, draw)
    assert ask(first).decision.startswith("remote")
    words, first_tokens = [first], 1000
    for _ in range(12):  # far more than --min-remote-tokens in all, so each turn must tell of its own
        words += [letters(10, draw), letters(40, draw)]
        before = decode.counter("prefix_cache_hits_total")
        assert ask(*words).decision == "local; reason=cached"
        held = decode.counter("prefix_cache_hits_total") - before
        inputs = sidecar.decisions()[0]["inputs"]
        # Where a stream's prompt ends is seen to a block, since what it is answered may be stored at once.
        assert first_tokens - 2 * BLOCK <= inputs["cached"] <= held + BLOCK * stream
        prompt_tokens = len("".join(words)) // 4
        assert prompt_tokens < inputs["tokens"] < 1.2 * prompt_tokens + 100
    assert ask(*words, letters(10, draw), letters(300, draw)).decision.startswith("remote"), "300 are new"
    assert ask(letters(1000, draw), "", "and?").decision.startswith("remote"), "another chat"
    assert ask(*words, cache_salt="mine").decision.startswith("remote"), "another cache"
    assert ask(*words, chat_template_kwargs={"x": 1}).decision.startswith("remote"), "another prompt"
    assert ask(*words, temperature=0.5, seed=3, user="me").decision == "local; reason=cached"


def test_answers_that_come_back_as_they_were_count(started: Started) -> None:
    """Once that was seen; `/decisions` says how many tokens are taken to be of an answer."""
    flags, options = events()
    sidecar, _, decode = started(*flags, "--decision-rule", "static", **options)
    draw = random.Random(10)
    sidecar.ask("POST", CHAT, said(letters(600, draw)))  # tells how long the engine's blocks are
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") > 0)
    words = [letters(1000, draw) + "xx"]  # answers begin with a token in these prompts, so they are the same later
    for turn in range(4):
        time.sleep(SETTLE_S)
        before = decode.counter("prefix_cache_hits_total")
        answer = sidecar.ask("POST", CHAT, {**said(*words), "max_tokens": 128, "ignore_eos": True})
        record = sidecar.decisions()[0]
        if turn:
            assert answer.decision == "local; reason=cached", turn
            held = decode.counter("prefix_cache_hits_total") - before
            assert held - 3 * BLOCK <= record["inputs"]["cached"] + (128 if turn == 1 else 0) <= held + BLOCK
        assert record.get("cached_answer_tokens", 0) >= (100 if turn > 1 else 0)
        words += [answer.text, letters(20, draw) + "xxx"]


def test_a_chat_that_decode_has_evicted_goes_remote(started: Started) -> None:
    """A small cache: whatever stays local as cached was held, by the engine's own count."""
    flags, options = events()
    sidecar, _, decode = started(*flags, "--decision-rule", "static", num_blocks=200, **options)
    draw = random.Random(9)
    chats = [[letters(draw.randrange(600, 900), draw)] for _ in range(6)]
    decisions = Counter[str]()
    for _ in range(60):
        words = draw.choice(chats)
        time.sleep(SETTLE_S)
        before = decode.counter("prefix_cache_hits_total")
        answer = sidecar.ask("POST", CHAT, said(*words))
        assert answer.status == 200
        decision = answer.decision.partition("; prefill")[0]
        decisions[decision] += 1
        if decision == "local; reason=cached":
            inputs = sidecar.decisions()[0]["inputs"]
            held = decode.counter("prefix_cache_hits_total") - before
            assert inputs["cached"] <= held, "kept here for what is not here"
            assert answer.json["usage"]["prompt_tokens"] - held < MINIMUM
        if len(words) < 8:
            words += [letters(4, draw), letters(20, draw)]
    assert decisions["local; reason=cached"] >= 5
    assert decisions["remote"] > 6, "evicted, and found so"


def test_event_stream_cut(started: Started) -> None:
    """What is not known is not cached; nothing slows down, and with the engine the knowledge returns."""
    flags, options = events()
    sidecar, _, decode = started(*flags, "--decision-rule", "static", **options)
    draw = random.Random(6)
    prompt = ids(40 * BLOCK, draw)

    def ask(tokens: list[int]) -> str:
        return sidecar.ask("POST", COMPLETIONS, {"model": "sim", "prompt": tokens, "max_tokens": 1}).decision

    assert ask(prompt).startswith("remote")
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") >= 39)
    assert ask([*prompt, 1, 2, 3]) == "local; reason=cached"
    decode.restart()
    eventually(lambda: sidecar.admin("GET", "/readyz")[0] == 200)
    eventually(lambda: ask([*prompt, 4, 5, 6]).startswith("remote"))
    eventually(lambda: ask([*prompt, 4, 5, 6]) == "local; reason=cached")


def test_port_taken(started: Started) -> None:
    with ThreadedEngine() as someone:
        sidecar = Sidecar("--kv-events", "on", "--kv-events-port", str(someone.port), ready=None)
        try:
            assert sidecar.exit_code() == 2
            assert f"--kv-events-port {someone.port}: " in sidecar.log
        finally:
            sidecar.kill()


def test_garbage_on_the_events_port(started: Started) -> None:
    flags, options = events()
    sidecar, _, _ = started(*flags, **options)
    port = int(flags[3])
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"x" * 100, b"\0" * 5000):
        with socket.create_connection(("127.0.0.1", port)) as sender:
            sender.sendall(garbage)
    assert sidecar.ask("POST", COMPLETIONS, completion(max_tokens=1)).status == 200


# -- costs -----------------------------------------------------------------------------------------------------


def stream(sidecar: Sidecar, tokens: int) -> str:
    answer = sidecar.ask("POST", CHAT, chat(tokens, stream=True, max_tokens=2))
    assert answer.status == 200
    return answer.decision.partition("; prefill")[0]


def test_learns_both_ways_and_explains_itself(started: Started) -> None:
    """A prefill engine that is far slower than decode itself: decode, idle, computes by itself."""
    sidecar, _, _ = started(prefill={"prefill_seconds_per_1k_tokens": 0.6}, prefill_seconds_per_1k_tokens=0.02)
    eventually(lambda: stream(sidecar, 400).startswith("local"), 20)
    deadline = time.monotonic() + 30
    while sidecar.decisions()[0].get("predicted", {}).get("static", "?"):
        assert time.monotonic() < deadline, sidecar.decisions()[0]
        stream(sidecar, random.Random().randrange(300, 600))
    ways = [stream(sidecar, 500) for _ in range(10)]
    assert ways.count("local; reason=decode_idle") >= 8, ways  # a stalled machine may look like a slow engine
    record = next(one for one in sidecar.decisions() if one["reason"] == "decode_idle")
    assert record["inputs"]["tokens"] > 400
    predicted = record["predicted"]
    assert 0 < predicted["local_seconds"] < predicted["remote_seconds"]
    metrics = sidecar.metrics()
    assert metrics("static_decisions_total", cause="unfitted") > 0
    assert metrics("prediction_ratio_count", decision="local") >= 8
    assert sidecar.in_flight() == 0


def test_signals_cut(started: Started) -> None:
    """The engine's metrics are gone: the static rule, counted, at once; with them the costs return."""
    sidecar, _, decode = started()
    decode.wait_for(lambda engine: any(one.status for one in engine.requests if one.target == "/metrics"))
    decode.fault(Fault(status=500), path="/metrics")
    time.sleep(2.5)
    before = sidecar.metrics()("static_decisions_total", cause="stale")
    assert [stream(sidecar, 400) for _ in range(4)] == ["remote"] * 4
    assert sidecar.metrics()("static_decisions_total", cause="stale") == before + 4
    assert {record["reason"] for record in sidecar.decisions()[:4]} == {"long"}
    decode.faults.clear()
    eventually(lambda: stream(sidecar, 400) == "local; reason=decode_idle", 10)


def test_what_is_ahead_returns_to_nothing(started: Started) -> None:
    """Whoever leaves, whatever fails: a count that only grew would send every prompt the other way in the end."""
    sidecar, prefill, decode = started(
        *("--recompute-max-concurrent", "64"),
        prefill={"prefill_seconds_per_1k_tokens": 0.05},
        seconds_per_token=0.005,
    )
    draw = random.Random(8)
    prefill.fault(Fault(status=500), path="/v1/chat/completions", nth=3)
    prefill.fault(Fault(reset="before_head"), path="/v1/chat/completions", nth=7)
    decode.fault(Fault(reset="before_head"), path="/v1/chat/completions", nth=5)
    for _ in range(60):
        with sidecar.connect() as client:
            client.request("POST", CHAT, chat(draw.randrange(100, 600), stream=True, max_tokens=20))
            time.sleep(draw.random() * 0.05)
    eventually(lambda: sidecar.in_flight() == 0, 10)
    time.sleep(1.5)  # longer than a breaker's first pause
    assert stream(sidecar, 500)
    inputs = next(one["inputs"] for one in sidecar.decisions() if "inputs" in one)
    assert (inputs["local_ahead"], inputs["prefill_ahead"]) == (0, 0)


def test_prefill_endpoints_are_not_asked_while_off(tmp_path: Path) -> None:
    """Their metrics are of use to handoffs alone; a fleet that is off asks for nothing. Either switch starts it."""
    file = tmp_path / "config.yaml"
    file.write_text("disagg: off\n", encoding="utf-8")
    with ThreadedEngine() as decode, ThreadedEngine() as prefill:

        def asked() -> bool:
            return any(one.target == "/metrics" for one in list(prefill.requests))

        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--prefill", prefill.address),
            *("--config", str(file), "--nixl-relay", "off"),  # whose word counts for more, and ends the asking
        )
        time.sleep(1.5)
        assert not asked()
        sidecar.admin("PUT", "/disagg", "auto")
        eventually(asked)
        sidecar.stop()
        prefill.requests.clear()
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--prefill", prefill.address),
            *("--config", str(file), "--nixl-relay", "off"),
        )
        assert not asked()
        file.write_text("disagg: on\n", encoding="utf-8")
        eventually(asked)
        sidecar.stop()
