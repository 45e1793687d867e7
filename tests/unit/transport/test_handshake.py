"""The handshake's frames: strict about requests, patient with metadata of other versions, never surprised."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import handshake
from transport.handshake import AgentMetadata, HandshakeError, Payload, Rank, Ranks

pack = msgspec.msgpack.encode

# One request of vLLM 0.32 on the wire, recorded: bin, not str.
RECORDED = b"\x93\xc4\x0cget_meta_msg\x00\x00"


def metadata(**changes: Any) -> AgentMetadata:
    fields: dict[str, Any] = {
        "engine_id": "engine-1",
        "agent_metadata": b"opaque",
        "kv_caches_base_addr": [0x7F0000000000, 2**64 - 1],
        "device_id": 0,
        "num_blocks": 100,
        "block_lens": [4096, 4096],
        "block_strides": [4096, 8192],
        "kv_cache_layout": "LBHNC",
        "block_size": 16,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 2,
        "region_names": ["a", "b"],
        "region_members": [["a"], ["b"]],
        "packed_member_layouts": {"a": (0, 4096)},
    }
    return AgentMetadata(**(fields | changes))


def payload(inner: bytes, compatibility_hash: str = "h") -> bytes:
    return pack(Payload(compatibility_hash, inner))


def plain(found: AgentMetadata) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__}


@given(st.integers(0, 1023), st.integers(0, 1023))
def test_requests_survive_the_trip(pp: int, tp: int) -> None:
    assert handshake.decode_request(handshake.encode_request(Rank(pp, tp))) == Rank(pp, tp)


def test_the_request_is_the_recorded_one() -> None:
    assert handshake.encode_request(Rank(0, 0)) == RECORDED
    assert handshake.decode_request(RECORDED) == Rank(0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        RECORDED[:-1],
        RECORDED + b"\x00",
        pack(("get_meta_msg", 0, 0)),
        pack((b"get_meta_msg", 0)),
        pack((b"get_meta_msg", 0, 0, 0)),
        pack((b"get_meta_msg", -1, 0)),
        pack((b"get_meta_msg", 0, 1024)),
        pack((b"get_meta_msg", 0, 2**63)),
        pack((b"get_meta_msg", True, 0)),
        pack((b"get_meta_msg", 0.5, 0)),
        pack((b"get_meta_msg", None, 0)),
        pack({"get_meta_msg": 0}),
        pack((b"another_verb", 0, 0)),
        b"\x91" * 60,
        pack((b"get_meta_msg", 0, 0)).ljust(65, b"\0"),
    ],
)
def test_anything_but_a_request_is_refused(body: bytes) -> None:
    with pytest.raises(HandshakeError):
        handshake.decode_request(body)


@given(st.binary(max_size=80))
def test_no_bytes_make_the_decoders_raise_anything_else(garbage: bytes) -> None:
    for decode in (
        handshake.decode_request,
        handshake.decode_clock,
        handshake.decode_payload,
        handshake.decode_metadata,
        handshake.describe,
    ):
        try:
            decode(garbage)
        except HandshakeError as error:
            assert error.kind in ("request", "verb", "clock", "payload", "metadata")  # noqa: PT017


@given(st.binary(max_size=200))
def test_any_agent_metadata_at_all_can_be_described(inner: bytes) -> None:
    described = handshake.describe(payload(inner))
    assert described.compatibility_hash == "h"
    assert described.schema == "unknown"


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(AgentMetadata.__struct_fields__) | st.text(max_size=10), anything, max_size=6)
)
def test_single_fields_of_any_kind_never_break_the_description(changes: dict[str, Any]) -> None:
    fields = plain(metadata()) | changes
    described = handshake.describe(payload(pack(fields)))
    if described.geometry is not None:
        assert described.geometry.num_blocks > 0
        assert described.geometry.physical_per_logical > 0


def test_this_version_is_recognised_and_summed_up() -> None:
    described = handshake.describe(payload(pack(metadata())))
    assert (described.schema, described.engine_id) == ("14", "engine-1")
    assert described.geometry is not None
    assert described.geometry.logical_blocks == 50
    assert described.geometry.logical_block_size == 32
    assert not described.geometry.recurrent


def test_a_newer_version_is_said_to_be_unknown_and_what_is_known_of_it_is_used() -> None:
    fields = plain(metadata()) | {"tomorrow": [1], "\x1b[31m": 0}
    described = handshake.describe(payload(pack(fields)))
    assert described.schema == "unknown"
    assert described.geometry is not None


def test_an_older_version_is_said_to_be_unknown_and_keeps_its_engine_id() -> None:
    fields = plain(metadata())
    del fields["block_strides"], fields["ple_block_len"]
    described = handshake.describe(payload(pack(fields)))
    assert described.schema == "unknown"
    assert described.missing_fields == ("block_strides", "ple_block_len")
    assert described.engine_id == "engine-1"
    assert described.geometry is None


def test_equal_metadata_is_equal_and_shareable() -> None:
    one, two = (handshake.describe(payload(pack(metadata()))) for _ in "12")
    assert one == two
    assert len({one.geometry, two.geometry}) == 1


def test_replies_have_two_frames_and_a_finite_clock() -> None:
    good = (payload(b""), handshake.encode_clock(1.5))
    assert handshake.split_reply(good) == good
    assert handshake.decode_clock(good[1]) == 1.5
    for bad in (
        good[:1],
        (*good, b""),
        (),
        (good[0], b"\xc1"),
        (good[0], pack(float("nan"))),
        (good[0], bytes(20)),
    ):
        with pytest.raises(HandshakeError):
            handshake.split_reply(bad)


def test_what_must_not_be_decodable_is_not_except_for_its_clock() -> None:
    frame, clock = handshake.UNDECODABLE
    with pytest.raises(HandshakeError):
        handshake.decode_payload(frame)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(frame, type=Payload)
    assert handshake.decode_clock(clock) == 0.0


def test_large_payloads_are_refused_unread() -> None:
    with pytest.raises(HandshakeError, match="bytes"):
        handshake.decode_payload(bytes(handshake.PAYLOAD_BYTES_MAX + 1))


def test_ranks() -> None:
    ranks = Ranks(2, 3)
    assert len(ranks.all()) == 6
    assert all(map(ranks.covers, ranks.all()))
    assert not ranks.covers(Rank(2, 0))
    assert not ranks.covers(Rank(0, 3))
    assert not ranks.covers(Rank(0, -1))
