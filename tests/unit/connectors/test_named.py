"""What holds for every connector whose handoff is a name: nothing of it is the prefill engine's to say."""

import json
from typing import Any

import msgspec
import pytest

from sidecar.connectors.connector import Connector, EngineFacts, Handoff, PrefillAnswer, Source
from sidecar.connectors.mooncake import MOONCAKE
from sidecar.connectors.offloading import OFFLOADING
from tests.unit.handoffs import answer, params

decode = msgspec.json.Decoder(PrefillAnswer).decode
LIES: dict[str, Any] = {"remote_bootstrap_addr": "http://6.6.6.6:1", "remote_prefiller": {"kv_request_id": "other"}}
both = pytest.mark.parametrize("connector", [MOONCAKE, OFFLOADING], ids=["mooncake", "offloading"])


def read(connector: Connector, body: bytes) -> Handoff:
    source = Source(frozenset({"10.0.0.5"}), EngineFacts(16), 0, "name", "10.0.0.5", 7777)
    handoff = connector.read(decode(body), source)
    assert isinstance(handoff, Handoff)
    return handoff


@both
def test_token_ids_go_with_it(connector: Connector) -> None:
    """KV of another prompt is wrong text with 200 here too."""
    handoff = msgspec.structs.replace(read(connector, answer(..., prompt_tokens=40)), token_ids=b"[1,2]")
    assert json.loads(connector.decode_params(handoff))["prompt_token_ids"] == [1, 2]


@both
def test_what_an_answer_says_of_addresses_is_not_believed(connector: Connector) -> None:
    handoff = read(connector, answer(params(remote_host="6.6.6.6", transfer_id="other", **LIES)))
    assert handoff.host == "10.0.0.5"
    assert b"6.6.6.6" not in handoff.params
    assert b"other" not in handoff.params
