"""The P2P tier's contract: what both legs carry, and that nothing of it is the prefill engine's to say."""

import json

import msgspec
import pytest

from sidecar.connectors.connector import EngineFacts, Handoff, PrefillAnswer, Rejection, Source
from sidecar.connectors.offloading import OFFLOADING, with_kv_source
from tests.unit.handoffs import answer

decode = msgspec.json.Decoder(PrefillAnswer).decode


def read(tokens: int = 40, host: str = "10.0.0.5", block_size: int = 16, fallback: int = 0) -> Handoff | Rejection:
    source = Source(frozenset({host}), EngineFacts(block_size), fallback, "name", host, 7778)
    return OFFLOADING.read(decode(answer(..., prompt_tokens=tokens)), source)


def test_both_legs_carry_one_name() -> None:
    handoff = read()
    assert isinstance(handoff, Handoff)
    assert json.loads(OFFLOADING.prefill_params("name")) == {"remote_decoder": {"kv_request_id": "name"}}
    assert json.loads(OFFLOADING.decode_params(handoff)) == {
        "remote_prefiller": {"kv_request_id": "name", "remote_host": "10.0.0.5", "remote_port": 7778}
    }
    assert (handoff.host, handoff.port, handoff.blocks) == ("10.0.0.5", 7778, 2)


def test_ipv6_hosts_are_in_brackets() -> None:
    """The engine makes tcp://HOST:PORT of it."""
    handoff = read(host="fd00::5")
    assert isinstance(handoff, Handoff)
    assert json.loads(handoff.params)["remote_prefiller"]["remote_host"] == "[fd00::5]"
    assert handoff.host == "fd00::5"


@pytest.mark.parametrize(("tokens", "blocks"), [(15, 0), (16, 1), (17, 1), (32, 2)])
def test_only_whole_blocks_are_kept(tokens: int, blocks: int) -> None:
    for handoff in (read(tokens), read(tokens, block_size=0, fallback=16)):
        assert isinstance(handoff, Handoff)
        assert handoff.blocks == blocks
        assert handoff.empty is (not blocks)


def test_what_cannot_be_told() -> None:
    unknown = read(block_size=0)
    assert isinstance(unknown, Rejection)
    assert unknown.fault == "unverifiable"
    missing = read(tokens=0)
    assert isinstance(missing, Rejection)
    assert missing.fault == "missing"


def test_a_peer_that_may_have_the_prefix() -> None:
    source = {"kv_request_id": "n", "remote_host": "10.0.0.9", "remote_port": 7777}
    assert json.loads(with_kv_source(b"", "n", "10.0.0.9", 7777)) == {"remote_kv_source": source}
    both = json.loads(with_kv_source(OFFLOADING.prefill_params("m"), "n", "10.0.0.9", 7777))
    assert both == {"remote_decoder": {"kv_request_id": "m"}, "remote_kv_source": source}
