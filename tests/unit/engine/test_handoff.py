"""Handoffs between two simulated engines; what real ones do with them is in test_contract.py."""

from __future__ import annotations

import http.client
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from tests.engine import Fault, ThreadedEngine
from tests.unit.engine.client import PROMPT, Wire, complete, completion_bytes, prefilled, text_of

if TYPE_CHECKING:
    from tests.unit.engine.conftest import Start


def local_text(start: Start, prompt: str) -> str:
    return text_of(complete(start(), prompt))


def test_the_decode_engine_continues_the_kv_that_it_read(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    params = prefilled(prefill)
    assert prefill.held_blocks == len(params["remote_block_ids"][0])
    assert text_of(complete(decode, kv_transfer_params=params)) == local_text(start, PROMPT)
    assert prefill.held_blocks == 0
    assert decode.counter("prompt_tokens_external_kv_transfer") == len(PROMPT) / 4
    assert decode.counter("prompt_tokens_local_compute") == 0


def test_foreign_blocks_give_the_foreign_text(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    other = PROMPT.replace("fox", "cat")
    params = {**prefilled(prefill), "remote_block_ids": prefilled(prefill, other)["remote_block_ids"]}
    assert text_of(complete(decode, kv_transfer_params=params)) == local_text(start, other)


def test_wrong_kv_stays_in_the_cache_of_the_decode_engine(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    other = PROMPT.replace("fox", "cat")
    params = {**prefilled(prefill), "remote_block_ids": prefilled(prefill, other)["remote_block_ids"]}
    complete(decode, kv_transfer_params=params)
    assert text_of(complete(decode)) != local_text(start, PROMPT)


def test_more_than_one_token_at_prefill_still_hands_over_the_prompt(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    # 108 tokens and 3 more end in the block where the prompt ends.
    reply = complete(prefill, max_tokens=4, kv_transfer_params={"do_remote_decode": True})
    params = reply.json["kv_transfer_params"]
    assert params["remote_num_tokens"] == len(PROMPT) / 4 + 3
    assert "remote_prefill_cached_tokens" not in params
    assert text_of(complete(decode, kv_transfer_params=params)) == local_text(start, PROMPT)


def test_one_that_generated_into_a_further_block_hands_over_wrong_kv(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "kv_transfer_params": {"do_remote_decode": True}}
    params = complete(prefill, **body).json["kv_transfer_params"]
    assert text_of(complete(decode, kv_transfer_params=params)) != local_text(start, PROMPT)


def test_a_late_pull_reads_what_is_there_by_then(start: Start, decode: ThreadedEngine) -> None:
    prefill = start(num_blocks=12, kv_lease_seconds=0.05)
    params = prefilled(prefill)
    prefill.wait_for(lambda engine: engine.held_blocks == 0)
    # Not used again yet: still right.
    assert text_of(complete(decode, kv_transfer_params=params)) == local_text(start, PROMPT)
    decode.call(decode.engine.cores[0].pool.reset_prefix_cache)
    complete(prefill, PROMPT.replace("fox", "cat"))
    assert text_of(complete(decode, kv_transfer_params=params)) != local_text(start, PROMPT)
    assert prefill.counter("nixl_num_kv_expired_reqs_total") == 1
    assert prefill.counter("nixl_num_notifications_after_expiry_total") == 2


def test_a_full_prefill_engine_waits_for_its_leases(start: Start) -> None:
    prefill = start(num_blocks=8, kv_lease_seconds=0.2)
    prefilled(prefill)
    began = time.monotonic()
    prefilled(prefill, PROMPT.replace("fox", "cat"))
    assert time.monotonic() - began > 0.1


def waits_for_longer_than_its_lease(start: Start, **headers: str) -> tuple[ThreadedEngine, ThreadedEngine]:
    """Prefill and decode, after a request with a handoff has waited for another one's end."""
    prefill = start(kv_lease_seconds=0.9)
    decode = start(kv_lease_seconds=0.9, max_num_seqs=1, seconds_per_token=0.15)
    complete(decode, max_tokens=1, kv_transfer_params=prefilled(prefill))
    busy = threading.Thread(target=complete, args=(decode, "busy"), kwargs={"max_tokens": 12, "ignore_eos": True})
    busy.start()
    decode.wait_for(lambda engine: engine.running == 1)
    other = PROMPT.replace("fox", "cat")
    params = prefilled(prefill, other, headers=tuple((name.replace("_", "-"), it) for name, it in headers.items()))
    assert params["remote_request_id"].startswith(f"cmpl-{headers.get('x_request_id', '')}")
    complete(decode, other, max_tokens=1, kv_transfer_params=params)
    busy.join()
    return prefill, decode


def test_heartbeats_renew_the_lease_of_a_request_that_waits(start: Start) -> None:
    prefill, decode = waits_for_longer_than_its_lease(start)
    assert prefill.counter("nixl_num_kv_expired_reqs_total") == 0
    assert decode.counter("prompt_tokens_external_kv_transfer") == 2 * len(PROMPT) / 4


def test_a_comma_in_the_request_id_keeps_a_lease_from_being_renewed(start: Start) -> None:
    prefill, _ = waits_for_longer_than_its_lease(start, x_request_id="a,b")
    assert prefill.counter("nixl_num_kv_expired_reqs_total") == 1


def test_a_number_as_request_id_kills_when_a_heartbeat_is_due(start: Start) -> None:
    prefill = start()
    decode = start(kv_lease_seconds=0.06, seconds_per_token=0.2, max_num_seqs=1)
    complete(decode, max_tokens=1, kv_transfer_params=prefilled(prefill))
    busy = threading.Thread(target=complete, args=(decode, "busy"))
    busy.start()
    decode.wait_for(lambda engine: engine.running == 1)
    params = {**prefilled(prefill), "remote_request_id": 5}
    assert complete(decode, kv_transfer_params=params).status == 500
    busy.join()
    assert "TypeError" in (decode.cause_of_death or "")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_dead_prefill_engine_fails_fast_when_known_and_slowly_when_not(start: Start, policy: str) -> None:
    prefill = start()
    decode = start(kv_load_failure_policy=policy)
    complete(decode, kv_transfer_params=prefilled(prefill))
    other = PROMPT.replace("fox", "cat")
    params = prefilled(prefill, other)
    prefill.kill()
    status = 200 if policy == "recompute" else 500

    def seconds() -> float:
        began = time.monotonic()
        assert complete(decode, other, kv_transfer_params=params).status == status
        return time.monotonic() - began

    assert seconds() < 0.25
    decode.forget_peers()
    decode.call(decode.engine.cores[0].pool.reset_prefix_cache)
    assert seconds() > 0.28
    assert decode.counter("nixl_num_failed_transfers_total") == 2


def test_handshakes_with_dead_engines_wait_for_each_other(start: Start) -> None:
    decode = start()
    gone = []
    for _ in range(3):
        engine = start()
        gone.append(prefilled(engine))
        engine.kill()
    began = time.monotonic()
    threads = [
        threading.Thread(target=complete, args=(decode,), kwargs={"kv_transfer_params": params}) for params in gone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began > 0.85


def test_a_frozen_prefill_engine_hangs_a_decode_engine_that_knows_it(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    complete(decode, kv_transfer_params=prefilled(prefill))
    other = PROMPT.replace("fox", "cat")
    params = prefilled(prefill, other)
    prefill.freeze()
    with Wire(decode, 0.3) as wire:
        wire.send(completion_bytes(other, kv_transfer_params=params))
        with pytest.raises(TimeoutError):
            wire.rest()
    # The client has left; the blocks stay until the read ends.
    decode.wait_for(lambda engine: engine.running == 0)
    assert decode.used_blocks > 0
    assert decode.aborted == 1
    prefill.thaw()
    decode.wait_for(lambda engine: engine.used_blocks == 0)


def test_a_frozen_prefill_engine_answers_no_handshake(
    start: Start, prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    params = prefilled(prefill)
    prefill.freeze()
    assert text_of(complete(decode, kv_transfer_params=params)) == local_text(start, PROMPT)
    assert decode.handshakes_tried == 1
    assert prefill.handshakes_served == 0
    prefill.thaw()


def test_a_restarted_engine_at_the_same_address_replaces_the_old_one(
    prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    first = prefilled(prefill)
    complete(decode, kv_transfer_params=first)
    prefill.restart()
    second = prefilled(prefill)
    assert second["remote_engine_id"] != first["remote_engine_id"]
    assert (second["remote_host"], second["remote_port"]) == (first["remote_host"], first["remote_port"])
    decode.call(decode.engine.cores[0].pool.reset_prefix_cache)
    complete(decode, kv_transfer_params=second)
    assert decode.engine.cores[0].known_engines == [second["remote_engine_id"]]
    assert prefill.held_blocks == 0


def test_engines_of_different_builds_never_meet(start: Start, prefill: ThreadedEngine) -> None:
    decode = start(compat_salt="another vLLM")
    params = prefilled(prefill)
    assert complete(decode, kv_transfer_params=params).status == 200
    assert decode.counter("nixl_num_failed_transfers_total") == 1
    assert prefill.held_blocks > 0


def test_what_p_found_in_its_cache_is_what_d_reports(prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
    prefilled(prefill)
    params = prefilled(prefill)
    assert params["remote_prefill_cached_tokens"] == 96
    usage = complete(decode, kv_transfer_params=params).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96
    del params["remote_prefill_cached_tokens"]
    decode.call(decode.engine.cores[0].pool.reset_prefix_cache)
    params = {**prefilled(prefill), **params}
    usage = complete(decode, kv_transfer_params={**params, "remote_prefill_cached_tokens": None}).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


def test_a_prefill_engine_that_is_sent_a_whole_handoff_hangs_and_loses_blocks(start: Start) -> None:
    prefill = start()
    params = {**prefilled(prefill), "do_remote_decode": True, "do_remote_prefill": False}
    with Wire(prefill, 0.2) as wire:
        wire.send(completion_bytes(PROMPT.replace("fox", "cat"), kv_transfer_params=params))
        with pytest.raises(TimeoutError):
            wire.rest()
    prefill.wait_for(lambda engine: engine.running == 0)
    assert prefill.used_blocks > prefill.held_blocks
    bad = {**params, "remote_num_tokens": "many"}
    assert complete(prefill, kv_transfer_params=bad).status == 500
    assert not prefill.alive


@pytest.mark.parametrize(
    "frames",
    [[b"", b"\x01garbage"], [b"", b"not", b"two"], [b""], [b"", b"\x93\xc4\x0cget_meta_msg\x05\x00"]],
    ids=["no msgpack", "too many frames", "too few frames", "no such rank"],
)
def test_one_wrong_message_ends_the_side_channel_for_good(prefill: ThreadedEngine, frames: list[bytes]) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://127.0.0.1:{prefill.side_channel_port}")
        socket.send_multipart(frames)
        prefill.wait_for(lambda engine: not engine.side_channel_alive)
    finally:
        context.destroy(linger=0)
    connection = http.client.HTTPConnection(prefill.host, prefill.port)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_wrong_verb_with_right_ranks_is_answered(prefill: ThreadedEngine) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.connect(f"tcp://127.0.0.1:{prefill.side_channel_port}")
        socket.send(b"\x93\xc4\x04verb\x00\x00")
        assert len(socket.recv_multipart()) == 2
    finally:
        context.destroy(linger=0)
    assert prefill.side_channel_alive


def test_a_malformed_handoff_is_a_fault_of_the_prefill_engine(
    prefill: ThreadedEngine, decode: ThreadedEngine
) -> None:
    prefill.fault(Fault(handoff=lambda params: {**params, "remote_block_ids": [[0]]}), nth=1)
    prefill.fault(Fault(handoff_absent=True), nth=1)
    assert prefilled(prefill)["remote_block_ids"] == [[0]]
    assert prefilled(prefill) is None
    assert len(prefilled(prefill)["remote_block_ids"][0]) > 1
