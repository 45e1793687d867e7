"""Mooncake's contract: what both legs carry; a decode leg that lacks one key waits for ever."""

import json

import msgspec
import pytest

from sidecar.connectors.connector import EngineFacts, Handoff, PrefillAnswer, Rejection, Source
from sidecar.connectors.mooncake import MOONCAKE, from_engine
from tests.unit.handoffs import answer

decode = msgspec.json.Decoder(PrefillAnswer).decode


def read(tokens: int = 40, host: str = "10.0.0.5", block_size: int = 16, rank: int = 0) -> Handoff | Rejection:
    source = Source(frozenset({host}), EngineFacts(block_size), 0, "name", host, 8998, rank)
    return MOONCAKE.read(decode(answer(..., prompt_tokens=tokens)), source)


def test_both_legs_carry_one_name() -> None:
    handoff = read(rank=3)
    assert isinstance(handoff, Handoff)
    sent = json.loads(MOONCAKE.prefill_params("name"))
    assert sent == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "name"}
    assert json.loads(MOONCAKE.decode_params(from_engine(handoff, "engine"))) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "name",
        "remote_bootstrap_addr": "http://10.0.0.5:8998",
        "remote_engine_id": "engine",
    }
    assert (handoff.host, handoff.port, handoff.rank, handoff.blocks) == ("10.0.0.5", 8998, 3, 3)


def test_ipv6_hosts_are_in_brackets() -> None:
    handoff = read(host="fd00::5")
    assert isinstance(handoff, Handoff)
    assert json.loads(handoff.params)["remote_bootstrap_addr"] == "http://[fd00::5]:8998"


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2)])
def test_the_last_block_crosses_full_or_not(tokens: int, blocks: int) -> None:
    handoff = read(tokens)
    assert isinstance(handoff, Handoff)
    assert handoff.blocks == blocks
    assert not handoff.empty


def test_an_answer_that_counts_no_tokens() -> None:
    missing = read(tokens=0)
    assert isinstance(missing, Rejection)
    assert missing.fault == "missing"
