"""The handoff check: what would hang, kill or mislead a decode engine never gets to it.

The rows are those of experiments with vLLM 0.32 (NixlConnector, pull): which values of `kv_transfer_params` its
decode side survives, and which it does not.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import EngineFacts, Handoff, PrefillAnswer, PrefillUsage, Rejection, Source
from sidecar.connectors.nixl import MAX_GROUPS, NIXL_PUSH, NIXLV2
from tests.unit.handoffs import BLOCK_SIZE, ENGINE_ID, HOST, answer, params

decode_answer = msgspec.json.Decoder(PrefillAnswer).decode
HOSTS = frozenset({HOST})
SOURCE = Source(HOSTS, EngineFacts(block_size=BLOCK_SIZE, num_blocks=1000))


def read(body: bytes, source: Source = SOURCE) -> Handoff | Rejection:
    return NIXLV2.read(decode_answer(body), source)


def verdict(handoff: Any = None, *, source: Source = SOURCE, prompt_tokens: int = 40, **changes: Any) -> str:
    """ "ok", "empty" or the fault of an answer with this handoff, or with the good one so changed."""
    whole = params(**changes) if handoff is None else handoff
    result = read(answer(whole, prompt_tokens=prompt_tokens), source)
    if isinstance(result, Rejection):
        assert result.detail
        assert "\n" not in result.detail
        return result.fault
    return "empty" if result.empty else "ok"


# -- good ones -------------------------------------------------------------------------------------------------


def test_bytes_pass_untouched() -> None:
    """Case 8: a number, a space or a key that we do not know is none of our business."""
    raw = (
        b'{ "do_remote_prefill" : true,"do_remote_decode":false, "remote_block_ids":[ [11,12 ,13] ],'
        b'"remote_engine_id":"%b","remote_request_id":"cmpl-\\u0061-0","remote_host":"10.0.0.5","remote_port":5600,'
        b'"tp_size":1,"future":{"x":1.0,"big":9007199254740993},"remote_num_tokens":40 }' % ENGINE_ID.encode()
    )
    body = b'{"usage":{"prompt_tokens":40},"kv_transfer_params":' + raw + b"}"
    handoff = read(body)
    assert isinstance(handoff, Handoff)
    assert handoff.params == raw
    assert NIXLV2.decode_params(handoff) == raw
    assert (handoff.engine_id, handoff.host, handoff.port) == (ENGINE_ID, HOST, 5600)
    assert (handoff.tp_size, handoff.pp_size, handoff.prompt_tokens) == (1, 1, 40)


def test_another_address_changes_two_values_and_nothing_else() -> None:
    handoff = read(answer())
    assert isinstance(handoff, Handoff)
    moved = handoff.via("127.77.0.3", 5601)
    before, after = json.loads(handoff.params), json.loads(moved.params)
    assert after == {**before, "remote_host": "127.77.0.3", "remote_port": 5601}
    assert list(after) == list(before)
    assert (moved.host, moved.port) == (HOST, 5600), "what it came from is remembered"
    odd = b'{"remote_\\u0068ost":"a","remote_port":1,"x":1.0,"remote_port":2}'
    assert json.loads(Handoff(odd, 1).via("b", 3).params) == {"remote_host": "b", "remote_port": 3, "x": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp_size": ..., "pp_size": ..., "dcp_size": ..., "transfer_mode": ..., "remote_num_tokens": ...},
        {"do_remote_decode": ...},
        {"remote_blocks_expiry_time": ...},
        {"remote_blocks_expiry_time": 123.5},
        {"remote_prefill_cached_tokens": ...},
        {"remote_prefill_cached_tokens": None},
        {"transfer_mode": None},
        {"tp_size": 8, "pp_size": 2, "dcp_size": 4},
        {"remote_engine_id": ENGINE_ID + "_dp3"},
        {"future_field": {"deep": [1, 2]}, "another": None},
        {"remote_port": 1},
        {"remote_port": 65535},
        {"remote_block_ids": [[0, 1, 999]]},
        {"remote_block_ids": [[11, 12, 13], [5]]},
        {"remote_block_ids": [[5], [11, 12, 13]]},
        # The null block, where a window or a chunk of local attention holds nothing.
        {"remote_block_ids": [[11, 12, 13], [0, 0, 7]]},
        {"remote_block_ids": [[0, 0, 7]]},
        {"remote_request_id": "x" * 512},
    ],
    ids=str,
)
def test_good(changes: dict[str, Any]) -> None:
    assert verdict(**changes) == "ok"


def test_block_ids_are_compared_with_what_is_known_later() -> None:
    """The engine's /metrics had not been read when the prefill answer came."""
    unknown = Source(HOSTS, EngineFacts(block_size=BLOCK_SIZE))
    handoff = read(answer(params(remote_block_ids=[[11, 12, 1000]])), unknown)
    assert isinstance(handoff, Handoff)
    assert NIXLV2.fits(handoff, EngineFacts(BLOCK_SIZE, num_blocks=1001), 0) is None
    rejection = NIXLV2.fits(handoff, EngineFacts(BLOCK_SIZE, num_blocks=1000), 0)
    assert rejection is not None
    assert "1000 blocks" in rejection.detail


def test_an_engine_that_claims_more_blocks_than_there_are_numbers() -> None:
    source = Source(HOSTS, EngineFacts(BLOCK_SIZE, num_blocks=10**30))
    assert verdict(source=source) == "ok"
    assert verdict(source=source, remote_block_ids=[[11, 12, 2**31]]) == "invalid"


# -- keys that the engine reads (case 1) -----------------------------------------------------------------------

NEEDED = (
    *(
        "do_remote_prefill",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
    ),
)


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", [..., None, [], {}, "", True, False, 1.5, -1, "a,b", ["x"]], ids=str)
def test_needed_key_of_a_wrong_kind(key: str, value: object) -> None:
    right = {"do_remote_prefill": [True], "remote_block_ids": [[]]}
    if value in right.get(key, []) and value is True:
        return
    assert verdict(**{key: value}) in ("invalid", "wrong_host")


@pytest.mark.parametrize("handoff", [[], "x", 1, True, 1.5, [{}], "null"], ids=str)
def test_what_is_no_object(handoff: object) -> None:
    assert verdict(handoff) == "invalid"


@pytest.mark.parametrize("handoff", [..., None], ids=str)
def test_none_at_all(handoff: object) -> None:
    """Cases 6 and 7."""
    result = read(answer(...) if handoff is ... else b'{"kv_transfer_params": null,"usage":{"prompt_tokens":4}}')
    assert isinstance(result, Rejection)
    assert result.fault == "missing"


def test_empty_object() -> None:
    assert verdict({}) == "invalid"


def test_flag_alone_kills_an_engine() -> None:
    assert verdict({"do_remote_prefill": True}) == "invalid"


# -- impossible values (case 2), row by row of the experiments -------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_prefill": False},
        {"do_remote_prefill": 1},
        {"do_remote_prefill": "true"},
        {"do_remote_decode": True},
        {"do_remote_decode": None},
        # Blocks
        {"remote_block_ids": [11, 12, 13]},
        {"remote_block_ids": "11,12,13"},
        {"remote_block_ids": [["a", "b", "c"]]},
        {"remote_block_ids": [[11.0, 12.0, 13.0]]},
        {"remote_block_ids": [[11, 12, True]]},
        {"remote_block_ids": [[11, 12, None]]},
        {"remote_block_ids": [[11, 12, [13]]]},
        {"remote_block_ids": [[-1, 12, 13]]},
        {"remote_block_ids": [[2**31, 12, 13]]},
        {"remote_block_ids": [[2**64, 12, 13]]},
        {"remote_block_ids": [[11, 12, 1000]]},
        {"remote_block_ids": [[999_999]]},
        {"remote_block_ids": [[11, 12]]},
        {"remote_block_ids": [[11]]},
        {"remote_block_ids": [[11, 12, 13, 14]]},
        {"remote_block_ids": [[11, 12, 12]]},
        {"remote_block_ids": [[11, 12, 13], [7, 7]]},
        {"remote_block_ids": [[11, 12, 13], [0, 0, 7, 7]]},
        {"remote_block_ids": [[11, 12, 13], [1000]]},
        {"remote_block_ids": [[11, 12, 13], 5]},
        {"remote_block_ids": {"0": [11, 12, 13]}},
        {"remote_block_ids": [[11, 12, 13]] + [[]] * MAX_GROUPS},
        # Names
        {"remote_request_id": 7},
        {"remote_request_id": "a,b"},
        {"remote_request_id": "a b"},
        {"remote_request_id": "a\n"},
        {"remote_request_id": "a\x00"},
        {"remote_request_id": "x" * 513},
        {"remote_request_id": {"a": 1}},
        {"remote_host": HOST + "\n"},
        {"remote_engine_id": ENGINE_ID + "\n"},
        {"remote_engine_id": 7},
        {"remote_engine_id": ["a"]},
        {"remote_engine_id": ""},
        # Addresses
        {"remote_port": 0},
        {"remote_port": -1},
        {"remote_port": 65536},
        {"remote_port": 70000},
        {"remote_port": 99999},
        {"remote_port": 5600.0},
        {"remote_port": "5600"},
        {"remote_port": "abc"},
        {"remote_port": True},
        # Sizes: one that is too large ends the prefill side's listener
        *[
            {name: value}
            for name in ("tp_size", "pp_size", "dcp_size")
            for value in (0, -1, 4097, 2_000_000_000, "1", 1.0)
        ],
        *[{name: None} for name in ("tp_size", "pp_size", "dcp_size")],
        # The rest
        {"remote_num_tokens": "40"},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": 40.0},
        {"remote_prefill_cached_tokens": -1},
        {"remote_prefill_cached_tokens": "1000000000"},
        {"remote_prefill_cached_tokens": 2**31},
        {"remote_blocks_expiry_time": "soon"},
        {"transfer_mode": "push"},
        {"transfer_mode": 1},
        {"transfer_mode": "PULL"},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_bad(changes: dict[str, Any]) -> None:
    assert verdict(**changes) == "invalid"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{"remote_port":NaN}}',
        b'{"kv_transfer_params":{"remote_port":1e999}}',
        b'{"kv_transfer_params":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"kv_transfer_params":{"remote_block_ids":' + b"[" * 900 + b"]" * 900 + b"}}",
    ],
    ids=lambda raw: repr(raw[:50]),
)
def test_odd_json(raw: bytes) -> None:
    try:
        result = read(raw)
    except (msgspec.MsgspecError, RecursionError):
        return  # the machine takes it for an invalid answer
    assert isinstance(result, Rejection)


def test_numbers_that_lost_their_precision_are_not_made_good() -> None:
    """Case 8: 2**53 + 1 as a block id is out of range anyway; `1.0` is no block id."""
    assert verdict(remote_block_ids=[[2**53 + 1, 2, 3]]) == "invalid"
    assert verdict(remote_block_ids=[[1.0, 2.0, 3.0]]) == "invalid"


# -- the host (case 9) -----------------------------------------------------------------------------------------


OTHERS = (
    *("localhost", "127.0.0.1", "0.0.0.0", "::", "::1", "10.0.0.6", "169.254.169.254", "example.com"),
    *("10.0.0.5.evil.com", "010.0.0.5", "10.0.0.5:80", "http://10.0.0.5", "0xa000005", "167772165"),
    *("10.0.0.5%eth0", "*", "10.0.0.5/"),
)


@pytest.mark.parametrize("host", OTHERS)
def test_another_host(host: str) -> None:
    result = read(answer(params(remote_host=host)))
    assert isinstance(result, Rejection)
    assert result.fault == "wrong_host"
    assert host in result.detail
    assert HOST in result.detail


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("10.0.0.5", {"prefill-0.svc", "10.0.0.5"}),
        ("prefill-0.svc", {"prefill-0.svc", "10.0.0.5"}),
        ("Prefill-0.SVC.", {"prefill-0.svc"}),
        ("FD00:0:0::5", {"fd00::5"}),
        ("[fd00::5]", {"fd00::5"}),
        ("::ffff:10.0.0.5", {"10.0.0.5"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"localhost", "127.0.0.1"}),
    ],
)
def test_the_endpoints_host_in_every_spelling(host: str, known: set[str]) -> None:
    """Loopback is allowed where the endpoint itself is listed by it: all on one machine."""
    assert verdict(source=Source(frozenset(known), SOURCE.facts), remote_host=host) == "ok"


def test_no_known_host_means_none() -> None:
    assert verdict(source=Source(frozenset(), SOURCE.facts)) == "wrong_host"


# -- blocks and tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "blocks", "expected"),
    [
        *[
            (1, 1, "ok"),
            (15, 1, "ok"),
            (16, 1, "ok"),
            (16, 2, "invalid"),
            (17, 1, "invalid"),
            (17, 2, "ok"),
            (17, 3, "invalid"),
        ],
        *[
            (17, 4, "invalid"),
            (32, 2, "ok"),
            (32, 3, "invalid"),
            (33, 2, "invalid"),
            (33, 3, "ok"),
            (1600, 100, "ok"),
        ],
        *[(1601, 100, "invalid"), (1, 3, "invalid"), (0, 1, "invalid"), (-5, 1, "invalid")],
    ],
)
def test_blocks_must_fit_the_prompt(tokens: int, blocks: int, expected: str) -> None:
    """Too few end the engine, too many make it read others."""
    assert verdict(prompt_tokens=tokens, remote_block_ids=[list(range(blocks))]) == expected


@settings(max_examples=100, deadline=None, database=None)
@given(st.integers(1, 400), st.integers(0, 40), st.sampled_from([1, 8, 16, 32, 128]))
def test_what_passes_covers_the_prompt(tokens: int, blocks: int, block_size: int) -> None:
    source = Source(HOSTS, EngineFacts(block_size, 1000))
    result = verdict(source=source, prompt_tokens=tokens, remote_block_ids=[list(range(blocks))])
    if result == "ok":
        assert tokens <= blocks * block_size < tokens + block_size
    elif result == "empty":
        assert blocks == 0
        assert tokens < block_size


@pytest.mark.parametrize("blocks", [[], [[]], [[], []]], ids=str)
def test_empty_lists(blocks: list[object]) -> None:
    """Case 14: valid for a prompt shorter than a block, and a lie for a longer one."""
    assert verdict(remote_block_ids=blocks, prompt_tokens=15) == "empty"
    assert verdict(remote_block_ids=blocks, prompt_tokens=16) == "invalid"
    assert verdict(remote_block_ids=blocks, prompt_tokens=5000) == "invalid"
    assert verdict(source=Source(HOSTS), remote_block_ids=blocks) == "empty"
    assert verdict(remote_block_ids=blocks, prompt_tokens=0) == "invalid"


def test_block_size_of_the_local_engine_stands_in() -> None:
    assert verdict(source=Source(HOSTS, EngineFacts(), 16)) == "ok"
    assert verdict(source=Source(HOSTS, EngineFacts(), 8)) == "invalid"
    assert verdict(source=Source(HOSTS, EngineFacts(16), 8)) == "ok"


def test_without_any_block_size_nothing_can_be_verified() -> None:
    assert verdict(source=Source(HOSTS)) == "unverifiable"


def test_number_of_blocks_unknown() -> None:
    assert verdict(source=Source(HOSTS, EngineFacts(16)), remote_block_ids=[[11, 12, 2**31]]) == "invalid"
    assert verdict(source=Source(HOSTS, EngineFacts(16)), remote_block_ids=[[], [11, 12, 2**31]]) == "invalid"
    assert verdict(source=Source(HOSTS, EngineFacts(16)), remote_block_ids=[[11, 12, 2**31 - 1]]) == "ok"


# -- usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "total", "cached"),
    [
        ({"prompt_tokens": 40}, 40, None),
        ({"prompt_tokens": 40, "prompt_tokens_details": None}, 40, None),
        ({"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}, 40, 32),
        ({"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 0}}, 40, 0),
        ({"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": None}}, 40, None),
        ({"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": "x"}}, 40, None),
        ({"prompt_tokens": 40, "prompt_tokens_details": {}}, 40, None),
        ({"input_tokens": 40, "input_tokens_details": {"cached_tokens": 16}}, 40, 16),
        ({"input_tokens": 8, "cache_read_input_tokens": 32}, 40, 32),
        ({"input_tokens": 40, "cache_read_input_tokens": 0}, 40, 0),
        ({"input_tokens": 40, "cache_read_input_tokens": None, "cache_creation_input_tokens": None}, 40, None),
        ({"input_tokens": 8, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 16}, 40, 16),
        ({"prompt_tokens": None, "input_tokens": None}, 0, None),
        ({}, 0, None),
    ],
    ids=str,
)
def test_usage_of_every_api(usage: dict[str, Any], total: int, cached: int | None) -> None:
    parsed = msgspec.json.decode(json.dumps(usage), type=PrefillUsage)
    assert (parsed.total, parsed.cached) == (total, cached)


def test_cached_count_is_needed_only_where_the_handoff_does_not_say_it() -> None:
    """Case 26: the decode engine reports what the handoff says; only engines without the key are corrected."""
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    said = read(answer(params(remote_prefill_cached_tokens=16), usage=usage))
    unsaid = read(answer(params(remote_prefill_cached_tokens=...), usage=usage))
    assert isinstance(said, Handoff)
    assert isinstance(unsaid, Handoff)
    assert (said.cached_tokens, unsaid.cached_tokens) == (None, 32)


@pytest.mark.parametrize("usage", [..., None, {}, {"prompt_tokens": 0}])
def test_answer_that_does_not_say_how_long_the_prompt_was(usage: object) -> None:
    result = read(answer(params(), usage=usage))
    assert isinstance(result, Rejection)
    assert result.fault == "invalid"


# -- fuzz ------------------------------------------------------------------------------------------------------

SCALARS = st.sampled_from([None, True, False, 0, 1, -1, 5600, 2**31, 2**63, 1.0, "", "a", HOST, "a,b", ENGINE_ID])
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.lists(st.lists(SCALARS, max_size=4), max_size=3))


@settings(max_examples=300, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from(sorted(params())), VALUES, max_size=4), st.integers(0, 60))
def test_nothing_harmful_passes(changes: dict[str, Any], tokens: int) -> None:
    whole = {**params(), **changes}
    result = read(answer(whole, prompt_tokens=tokens))
    if isinstance(result, Rejection):
        assert result.fault in ("invalid", "wrong_host")
        return
    assert whole["do_remote_prefill"] is True
    assert whole["do_remote_decode"] is False
    assert whole["remote_host"] == HOST
    assert type(whole["remote_port"]) is int
    assert 1 <= whole["remote_port"] <= 65535
    assert all(isinstance(whole[key], str) and whole[key] for key in ("remote_engine_id", "remote_request_id"))
    assert "," not in whole["remote_request_id"]
    blocks = whole["remote_block_ids"]
    assert all(type(block) is int and 0 <= block < 1000 for group in blocks for block in group)
    assert result.empty or max(map(len, blocks)) * BLOCK_SIZE >= tokens > 0
    assert all(type(whole[key]) is int and whole[key] >= 1 for key in ("tp_size", "pp_size", "dcp_size"))


def test_rejections_name_no_value() -> None:
    """They are logged: names of fields and types, never ids or blocks."""
    result = read(answer(params(remote_request_id="secret,id", remote_port="secret")))
    assert isinstance(result, Rejection)
    assert "secret" not in result.detail


# -- what goes into the legs -----------------------------------------------------------------------------------


def test_prefill_leg_carries_one_wish_and_nothing_that_leaks_blocks() -> None:
    """A prefill engine hangs or dies on `remote_*` values; nulls are ignored."""
    sent = json.loads(NIXLV2.prefill_params(""))
    assert sent.pop("do_remote_decode") is True
    assert sent.pop("do_remote_prefill", False) is False
    assert set(sent.values()) <= {None}


def test_connectors_by_name() -> None:
    assert set(CONNECTORS) == {"nixlv2", "nixl-push", "offloading", "mooncake", "shared-storage", "lmcache", "none"}
    assert all(name == connector.name for name, connector in CONNECTORS.items())
    crosses = {name for name, connector in CONNECTORS.items() if connector.hands_off}
    assert crosses == {"nixlv2", "nixl-push", "offloading", "mooncake"}
    assert CONNECTORS["nixlv2"].splits
    assert not CONNECTORS["none"].splits


def test_none_never_has_a_handoff() -> None:
    none = CONNECTORS["none"]
    assert isinstance(none.read(decode_answer(answer()), SOURCE), Rejection)
    json.loads(none.prefill_params(""))
    assert none.decode_params(Handoff(b"{}", 1)) == b"{}"


# -- push ------------------------------------------------------------------------------------------------------


def pushed(**changes: Any) -> Handoff | Rejection:
    return NIXL_PUSH.read(decode_answer(answer(params(**{"transfer_mode": "push", **changes}))), SOURCE)


def test_push_passes_as_it_came() -> None:
    handoff = pushed()
    assert isinstance(handoff, Handoff)
    assert NIXL_PUSH.decode_params(handoff) == handoff.params
    assert json.loads(handoff.params)["transfer_mode"] == "push"


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_mode": "pull"},
        {"transfer_mode": None},
        {"transfer_mode": ...},
        {"tp_size": ...},  # a KeyError in the decode engine, and its end
        {"tp_size": 0},
        {"remote_request_id": ...},
        {"remote_engine_id": None},
        {"remote_port": 0},
    ],
)
def test_what_a_push_must_say(changes: dict[str, Any]) -> None:
    result = pushed(**changes)
    assert isinstance(result, Rejection)
    assert result.fault == "invalid"


def test_a_push_is_no_pull() -> None:
    assert verdict(transfer_mode="push") == "invalid"


# -- stores that both engines share ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shared-storage", "lmcache"])
def test_nothing_crosses_with_a_store(name: str) -> None:
    store = CONNECTORS[name]
    assert store.prefill_params("") == b""
    handoff = store.read(decode_answer(b'{"usage":{"prompt_tokens":40}}'), SOURCE)
    assert isinstance(handoff, Handoff)
    assert handoff.empty
    assert handoff.prompt_tokens == 40
    for body in (b"{}", b'{"usage":{}}', b'{"usage":null}'):
        assert isinstance(store.read(decode_answer(body), SOURCE), Rejection)


def test_bytes_that_are_no_text_are_refused_wherever_they_stand() -> None:
    """The engine's parser reads all of the body: a client whose request is good would get its 400."""
    whole = answer(params(future=["?"]))
    for bad in (b"\xff", b"\xc1", b"\xed\xa0\x80"):
        result = read(whole.replace(b"?", bad))
        assert isinstance(result, Rejection)
        assert (result.fault, result.detail) == ("invalid", "kv_transfer_params: not UTF-8")
    assert isinstance(read(whole.replace(b"?", "é".encode())), Handoff)
