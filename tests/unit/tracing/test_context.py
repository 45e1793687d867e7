"""W3C trace context: what is valid, who is traced, what the legs are told."""

from __future__ import annotations

import re

import pytest

from sidecar.tracing.context import Sampler, Trace, parsed

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def header(flags: str = "01", version: str = "00", more: str = "") -> bytes:
    return f"{version}-{TRACE}-{PARENT}-{flags}{more}".encode()


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (header(), 1),
        (header("00"), 0),
        (header("03"), 3),
        (header(version="cc", more="-later"), 1),
        (header(" "[1:] + "01"), 1),
    ],
)
def test_valid_contexts(value: bytes, flags: int) -> None:
    assert parsed([value]) == (TRACE, PARENT, flags)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [header(), header()],
        [header(version="ff")],
        [header(more="-later")],
        [header().upper()],
        [header()[:-1]],
        [header().replace(TRACE.encode(), b"0" * 32)],
        [header().replace(PARENT.encode(), b"0" * 16)],
        [header() + b"\xff"],
    ],
)
def test_invalid_contexts_are_none(values: list[bytes]) -> None:
    assert parsed(values) is None


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_parent_decides(ratio: float) -> None:
    sampler = Sampler(ratio)
    assert sampler.begin((TRACE, PARENT, 0)) is None
    trace = sampler.begin((TRACE, PARENT, 1))
    assert trace is not None
    assert (trace.trace_id, trace.parent_id) == (TRACE, PARENT)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (1.0, 4000, 4000), (0.25, 800, 1200)])
def test_share_of_requests_without_a_context(ratio: float, low: int, high: int) -> None:
    sampler = Sampler(ratio)
    assert low <= sum(sampler.begin(None) is not None for _ in range(4000)) <= high


def test_legs_have_spans_of_their_own() -> None:
    trace = Trace(TRACE, PARENT, 1)
    lines = [trace.for_prefill(), trace.for_prefill(), trace.for_decode(), trace.for_decode()]
    ids = []
    for line in lines:
        found = re.fullmatch(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-01\r\n", line)
        assert found is not None
        assert found.group(1).decode() == TRACE
        ids.append(found.group(2).decode())
    assert ids == [trace.prefill_id, trace.prefill_id, *trace.decode_ids]
    assert len({*ids, trace.span_id, PARENT}) == 5
