"""From start to death: what a process does, done to a simulated one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import Engine, Fault, ThreadedEngine
from tests.engine.record import send
from tests.unit.engine.client import PROMPT, Wire, complete, completion_bytes, prefilled, text_of

if TYPE_CHECKING:
    from tests.unit.engine.conftest import Start


def health(engine: ThreadedEngine) -> int:
    return send(engine.url, "/health", method="GET", timeout_seconds=5).status


def test_a_dying_engine_says_so_and_is_gone(start: Start) -> None:
    engine = start(seconds_per_token=0.05, death_seconds=0.2)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(engine, max_tokens=100, ignore_eos=True)))
    thread.start()
    engine.wait_for(lambda e: e.running == 1)
    engine.die()
    thread.join()
    assert answers[0].status == 500
    assert answers[0].json["error"]["message"].startswith("EngineCore encountered an issue.")
    assert health(engine) == 503
    assert complete(engine).status == 500
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        health(engine)
    assert not engine.alive
    engine.restart()
    assert health(engine) == 200


def test_killing_drops_everything_at_once(start: Start) -> None:
    engine = start(seconds_per_token=0.05)
    first_id = engine.engine_id
    with Wire(engine) as wire:
        wire.send(completion_bytes(stream=True, max_tokens=100, ignore_eos=True))
        wire.until(b"data: ")
        engine.kill()
        assert not wire.rest().endswith(b"0\r\n\r\n")
    with pytest.raises(ConnectionRefusedError):
        health(engine)
    assert not engine.side_channel_alive
    port, side_channel_port = engine.port, engine.side_channel_port
    engine.restart()
    assert (engine.port, engine.side_channel_port) == (port, side_channel_port)
    assert engine.engine_id != first_id
    assert engine.side_channel_alive
    assert engine.used_blocks == 0
    assert complete(engine).status == 200


def test_a_configured_engine_id_survives_a_restart(start: Start) -> None:
    engine = start(engine_id="mine")
    engine.restart()
    assert engine.engine_id == "mine"


def test_a_frozen_engine_accepts_and_answers_later(decode: ThreadedEngine) -> None:
    decode.freeze()
    with Wire(decode, 0.15) as wire:
        wire.send(completion_bytes())
        with pytest.raises(TimeoutError):
            wire.rest()
        decode.thaw()
        wire.socket.settimeout(5)
        assert b"200 OK" in wire.until(b"\r\n\r\n")


def test_freezing_stops_a_stream(start: Start) -> None:
    engine = start(seconds_per_token=0.005)
    with Wire(engine) as wire:
        wire.send(completion_bytes(stream=True, max_tokens=40, ignore_eos=True))
        wire.until(b"data: ")
        engine.freeze()
        time.sleep(0.05)
        sent = engine.requests[0].bytes_sent
        time.sleep(0.1)
        assert engine.requests[0].bytes_sent == sent
        engine.thaw()
        wire.until(b"0\r\n\r\n")


def test_a_frozen_engine_can_be_killed(decode: ThreadedEngine) -> None:
    decode.freeze()
    decode.kill()
    with pytest.raises(ConnectionRefusedError):
        health(decode)


def test_refusing_leaves_open_connections_alone(decode: ThreadedEngine) -> None:
    with Wire(decode) as wire:
        wire.send(completion_bytes())
        wire.until(b'"metrics":null}')
        decode.refuse()
        with pytest.raises(ConnectionRefusedError):
            health(decode)
        wire.send(completion_bytes())
        wire.until(b'"metrics":null}')
        decode.accept()
        assert health(decode) == 200


def test_requests_queue_for_seats_and_are_refused_beyond_the_queue(start: Start) -> None:
    engine = start(max_num_seqs=1, max_num_queued_reqs=1, seconds_per_token=0.02)
    threads = [threading.Thread(target=complete, args=(engine,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    engine.wait_for(lambda e: (e.running, e.waiting) == (1, 1))
    refused = complete(engine)
    assert refused.status == 503
    for thread in threads:
        thread.join()
    assert (engine.running, engine.waiting, engine.used_blocks) == (0, 0, 0)
    assert 'reason="max_num_queued_reqs"} 1.0' in send(engine.url, "/metrics", method="GET").body.decode()


def test_a_key_guards_what_vllm_guards(start: Start) -> None:
    engine = start(api_key="secret")
    assert complete(engine).status == 401
    assert complete(engine).json == {"error": "Unauthorized"}
    assert complete(engine, headers=(("authorization", "Bearer secret"),)).status == 200
    assert health(engine) == 200
    assert send(engine.url, "/invocations", {"prompt": "x"}).status == 200
    assert send(engine.url, "/tokenize", {"prompt": "x"}).status == 200


def test_ranks_have_their_own_side_channels_and_blocks(start: Start) -> None:
    # One server with two ranks is a pair.
    engine = start(data_parallel_size=2, side_channel_port=0)
    reference = text_of(complete(start()))

    def to(rank: int) -> tuple[tuple[str, str]]:
        return (("X-data-parallel-rank", str(rank)),)

    params = prefilled(engine, headers=to(0))
    assert params["remote_engine_id"].endswith("_dp0")
    assert text_of(complete(engine, kv_transfer_params=params, headers=to(1))) == reference
    assert engine.engine.cores[1].counters["prompt_tokens_external_kv_transfer"] > 0
    assert engine.held_blocks == 0
    assert complete(engine, headers=to(2)).status == 400


def test_adapters_change_the_text(start: Start) -> None:
    engine = start(loras=["french"])
    plain, french = complete(engine), complete(engine, model="french")
    assert text_of(plain) != text_of(french)
    assert french.json["model"] == "french"
    names = [card["id"] for card in send(engine.url, "/v1/models", method="GET").json["data"]]
    assert names == ["sim", "french"]


def test_sampling_ends(decode: ThreadedEngine) -> None:
    whole = complete(decode, max_tokens=1000)
    choice = whole.json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    words = choice["text"].split()
    stopped = complete(decode, max_tokens=1000, stop=[words[5]]).json["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", words[5])
    assert stopped["text"] == choice["text"].partition(words[5])[0]
    longer = complete(decode, max_tokens=100, ignore_eos=True).json
    assert longer["usage"]["completion_tokens"] == 100
    assert complete(decode, max_tokens=100, min_tokens=90).json["usage"]["completion_tokens"] == 91


def test_the_prefix_cache_serves_a_next_turn(decode: ThreadedEngine) -> None:
    answer = text_of(complete(decode, max_tokens=40, ignore_eos=True))
    usage = complete(decode, PROMPT + answer).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16
    salted = complete(decode, cache_salt="mine").json["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_name_what_a_scheduler_reads(decode: ThreadedEngine) -> None:
    complete(decode)
    text = send(decode.url, "/metrics", method="GET").body.decode()
    labels = '{engine="0",model_name="sim",source="local_compute"}'
    assert f"vllm:prompt_tokens_by_source_total{labels} {len(PROMPT) / 4}" in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="sim"}} 0.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"} 1.0' in text


def test_an_engine_lives_in_the_callers_own_loop() -> None:
    async def run() -> None:
        engine = Engine(num_blocks=64)
        await engine.start()
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        writer.write(completion_bytes(close=True))
        assert b"200 OK" in await reader.read()
        writer.close()
        await writer.wait_closed()
        await engine.stop()
        assert engine.connections_open == 0

    asyncio.run(run())


def test_an_engine_is_a_process_too() -> None:
    command = [sys.executable, "-m", "tests.engine", "--prefill", "0", "--decode", "0"]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        engines = json.loads(process.stdout.readline())
        assert [engine["role"] for engine in engines] == ["prefill", "decode"]
        assert all(send(engine["url"], "/health", method="GET").status == 200 for engine in engines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_nothing_is_left_after_requests_of_every_kind_and_end(start: Start) -> None:
    prefill = start(kv_lease_seconds=0.2)
    decode = start(seconds_per_token=0.0005, max_num_seqs=16)
    for engine in (prefill, decode):
        engine.fault(Fault(cut_after_events=2), probability=0.1)
        engine.fault(Fault(reset="after_head"), probability=0.05)
        engine.fault(Fault(cut_after_bytes=20), probability=0.05)

    async def one(dice: random.Random) -> None:
        prompt = PROMPT + str(dice.random()) * dice.randint(1, 5)
        params: Any = None
        if dice.random() < 0.6:
            got = await asked(prefill, prompt, dice, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            _, _, body = got.partition(b"\r\n\r\n")
            if got.startswith(b"HTTP/1.1 200") and body.endswith(b"}"):
                params = json.loads(body)["kv_transfer_params"]
        await asked(decode, prompt, dice, stream=dice.random() < 0.5, max_tokens=20, kv_transfer_params=params)

    async def asked(engine: ThreadedEngine, prompt: str, dice: random.Random, **more: Any) -> bytes:
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        try:
            writer.write(completion_bytes(prompt, close=True, **more))
            async with asyncio.timeout(dice.choice([0.005, 0.03, 10])):
                return await reader.read()
        except (TimeoutError, ConnectionError):
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(40)

        async def in_turn(number: int) -> None:
            async with gate:
                await one(random.Random(number))

        await asyncio.gather(*(in_turn(number) for number in range(400)))

    asyncio.run(all_of_them())
    for engine in (prefill, decode):
        assert engine.alive, engine.cause_of_death
        engine.wait_for(lambda e: (e.running, e.waiting, e.used_blocks, e.connections_open) == (0, 0, 0, 0))
        assert not [request for request in engine.requests if request.error is not None]
    assert decode.aborted > 0
    assert decode.counter("prompt_tokens_external_kv_transfer") > 0
