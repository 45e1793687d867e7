"""The ZMTP codec: what libzmq sends is read however it is cut, everything else is refused early and cheaply."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import zmtp

# What libzmq 4.3.5 sends as a REQ socket, recorded: greeting in three writes, then READY.
LIBZMQ_REQ = (
    b"\xff\0\0\0\0\0\0\0\x01\x7f"
    b"\x03" + b"\x01NULL".ljust(53, b"\0") + b"\x04&\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity\0\0\0\0"
)
OPENING = zmtp.GREETING + zmtp.encode_ready(zmtp.REQ)


def wire(frame_bytes_max: int = 1000, parts_max: int = 8) -> zmtp.Wire:
    return zmtp.Wire(frozenset({zmtp.REQ}), frame_bytes_max=frame_bytes_max, parts_max=parts_max)


def fed(*pieces: bytes, into: zmtp.Wire | None = None) -> list[tuple[bytes, ...]]:
    into = into or wire()
    return [message for piece in pieces for message in into.feed(piece)]


def refused(*pieces: bytes) -> str:
    with pytest.raises(zmtp.ProtocolError) as raised:
        fed(*pieces)
    return raised.value.kind


messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=8).map(tuple), min_size=1, max_size=5)


@given(messages, st.lists(st.integers(0, 3000), max_size=20))
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[bytes, ...]], cuts: list[int]
) -> None:
    stream = LIBZMQ_REQ + b"".join(zmtp.encode_message(*parts) for parts in sent)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    reader = wire(frame_bytes_max=300 * 8)
    assert fed(*pieces, into=reader) == sent
    assert reader.peer == zmtp.REQ
    assert len(reader._buffer) == 0


@given(st.binary(max_size=400), st.sampled_from([b"", zmtp.GREETING, OPENING]))
def test_garbage_raises_nothing_but_protocol_errors_and_is_not_hoarded(garbage: bytes, before: bytes) -> None:
    reader = wire(frame_bytes_max=64)
    try:
        fed(before, garbage, into=reader)
    except zmtp.ProtocolError:
        return
    assert len(reader._buffer) <= 64 + 9


def test_our_own_opening_is_what_we_read() -> None:
    reader = wire()
    assert reader.feed(OPENING) == []
    assert reader.peer == zmtp.REQ
    assert len(zmtp.GREETING) == 64


def test_sizes_around_that_of_a_short_frame() -> None:
    sent = [(bytes(size), b"") for size in (254, 255, 256, 257)]
    assert fed(OPENING, *(zmtp.encode_message(*parts) for parts in sent)) == sent


def test_an_http_request_is_refused_at_its_first_byte() -> None:
    assert refused(b"G") == "not_zmtp"
    assert refused(b"\xff\0\0\0\0\0\0\0\x01\x00") == "not_zmtp"


def test_old_versions_and_other_mechanisms_are_refused() -> None:
    assert refused(zmtp.GREETING[:10] + b"\x01") == "old_version"
    assert refused(zmtp.GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32)) == "mechanism"


def test_sizes_are_refused_before_they_are_received() -> None:
    hundred_megabytes = b"\x02" + (100 * 2**20).to_bytes(8, "big")
    assert refused(OPENING, hundred_megabytes) == "too_large"
    assert refused(OPENING, b"\x02" + b"\xff" * 8) == "too_large"
    assert refused(OPENING, b"\x06" + (4097).to_bytes(8, "big")) == "too_large"
    assert refused(OPENING, b"\x01\x00" * 9) == "too_large"
    assert refused(OPENING, (b"\x03" + (1000).to_bytes(8, "big") + bytes(1000)) * 3) == "too_large"


def test_order_flags_and_socket_types_are_checked() -> None:
    assert refused(zmtp.GREETING, zmtp.encode_message(b"", b"x")) == "order"
    assert refused(zmtp.GREETING, b"\x04\x05\x04PING") == "order"
    assert refused(zmtp.GREETING, zmtp.encode_ready(b"PUSH")) == "socket_type"
    assert refused(zmtp.GREETING, b"\x04\x06\x05READY") == "socket_type"
    assert refused(zmtp.GREETING, b"\x04\x11\x05READY\x0bSocket-Typ") == "ready"
    assert refused(OPENING, b"\x08\x00") == "flags"
    assert refused(OPENING, b"\x05\x00") == "flags"
    assert refused(OPENING, b"\x04\x07\x05ERROR\x00") == "refused"


def test_a_heartbeat_is_answered_with_its_context_and_unknown_commands_are_ignored() -> None:
    reader = wire()
    assert fed(OPENING, b"\x04\x0a\x04PING\x00\x0actx", b"\x04\x05\x04WHAT", b"\x04\x00", into=reader) == []
    assert reader.answer == b"\x04\x08\x04PONGctx"
