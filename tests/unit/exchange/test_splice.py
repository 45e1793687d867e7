"""JSON that is changed without being decoded: only what is named changes, everything else stays byte for byte.

What a body means is judged by Python's own parser, which is the engine's.
"""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.exchange import splice
from sidecar.exchange.apis import APIS
from sidecar.exchange.splice import (
    LARGE_BYTES,
    NotAnObject,
    decode_body,
    fields,
    fields_if_object,
    is_object,
    prefill_body,
    replaced,
    with_members,
    without_forbidden,
)
from tests.unit.exchange.bodies import PARAMS, PLAIN, STORIES, Member, Writer, bounded, pairs, prefilled

# -- the decode body -------------------------------------------------------------------------------------------


@bounded
@given(PLAIN)
@example(b"{}")
@example(b" { } ")
@example(b"{" + b" " * 200 + b"}")
@example(b"{" + b"\n" * 200 + b'"a":1}')
def test_decode_body_is_the_clients_plus_the_handoff(body: bytes) -> None:
    head, rest = decode_body(body, PARAMS)
    whole = head + bytes(rest)
    brace = body.index(b"{") + 1
    comma = b"," if pairs(body) else b""
    assert whole == body[:brace] + b'"kv_transfer_params":' + PARAMS + comma + body[brace:]
    assert pairs(whole) == [("kv_transfer_params", json.loads(PARAMS)), *pairs(body)]


def test_decode_body_does_not_copy_the_body() -> None:
    body = b'{"a":"' + b"x" * 100_000 + b'"}'
    head, rest = decode_body(body, PARAMS)
    assert rest.obj is body
    assert len(head) < 200


@bounded
@given(PLAIN)
def test_fields_are_the_last_of_each_key_as_written(body: bytes) -> None:
    top = fields(body)
    expected = dict(pairs(body))
    assert list(top) == list(expected)
    for key, raw in top.items():
        assert bytes(raw) in body
        assert json.loads(bytes(raw)) == expected[key]
        assert is_object(raw) is isinstance(expected[key], dict)


# -- members ---------------------------------------------------------------------------------------------------


@bounded
@given(PLAIN, st.sampled_from(["model", "a", "new"]))
def test_with_members_changes_only_what_is_named(body: bytes, key: str) -> None:
    before = fields(body)
    after = fields(with_members(before, {key: b"[ 1 ]"}))
    assert bytes(after[key]) == b"[ 1 ]"
    assert {k: bytes(v) for k, v in after.items() if k != key} == {
        k: bytes(v) for k, v in before.items() if k != key
    }
    assert [k for k in after if k in before] == list(before)


def test_spellings_are_remembered_within_a_bound() -> None:
    body = json.dumps({f"key{n}": n for n in range(3 * splice._MAX_SPELLINGS)}).encode()
    assert fields(with_members(fields(body), {})) == fields(body)
    assert len(splice._spellings) <= splice._MAX_SPELLINGS
    long = json.dumps({"x" * 5000: 1}).encode()
    assert with_members(fields(long), {}) == long.replace(b": ", b":")


# -- large bodies come as buffers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer(kind: Any) -> None:
    body = b' {"prompt":"a", "kv_transfer_params":1 ,"n":1}'
    top = fields(kind(body))
    assert {key: bytes(raw) for key, raw in top.items()} == {
        "prompt": b'"a"',
        "kv_transfer_params": b"1",
        "n": b"1",
    }
    assert without_forbidden(kind(body), top) == b' {"prompt":"a", "n":1}'
    clean = kind(b' {"prompt":"a"}')
    head, rest = decode_body(clean, PARAMS)
    assert head + bytes(rest) == b' {"kv_transfer_params":' + PARAMS + b',"prompt":"a"}'
    assert rest.obj is (clean if kind is not memoryview else clean.obj)
    assert fields_if_object(kind(b"no json")) == {}
    with pytest.raises(NotAnObject):
        fields_if_object(kind('{"kv_transfer_params":1}'.encode("utf-16")))
    assert json.loads(prefilled(APIS[b"/v1/completions"], fields(clean), b"{}"))["prompt"] == "a"


@pytest.mark.parametrize("large", ["prompt", "user"])
def test_what_is_large_is_sent_from_where_it_lies(large: str) -> None:
    value = json.dumps("x" * LARGE_BYTES).encode()
    body = b'{"model":"m","%b":%b,"max_tokens":5}' % (large.encode(), value)
    parts = prefill_body(APIS[b"/v1/completions"], fields(body), len(body), PARAMS)
    before, view, behind = parts
    assert isinstance(view, memoryview)
    assert view == value
    assert before == b'{"model":"m","%b":' % large.encode()
    assert bytes(behind).startswith(b',"max_tokens":1,"stream":false')


# -- two values of a handoff -----------------------------------------------------------------------------------

NEW = {"remote_host": b'"127.77.0.1"', "remote_port": b"5601"}


def handoff_text(story: bytes) -> bytes:
    """An object that holds both keys, as every checked handoff does, in any spelling, perhaps elsewhere as well."""
    writer = Writer(story)
    keys = ("remote_host", "remote_port", "remote_hosts", "x", '"remote_port"')
    values = (
        "5600",
        '"10.0.0.5"',
        '"a\\"b"',
        '"remote_port"',
        '{"remote_port":5}',
        '[{"remote_host":"a"}]',
        "null",
    )

    def member() -> Member:
        value = writer.pick(values) if writer.choose(4) else writer.value(1)
        key = writer.pick(keys)
        return Member(f'"{key}"' if writer.choose(3) and '"' not in key else writer.string(key), value)

    members = [member() for _ in range(writer.choose(7))]
    members += [writer.member("remote_port", "5600"), writer.member("remote_host", '"10.0.0.5"')]
    members += [member() for _ in range(writer.choose(2))]
    return writer.object(members).encode()


@settings(bounded, max_examples=300)
@given(STORIES.map(handoff_text))
@example(b'{"remote_host":"a","remote_port":1}')
@example(b'{"x":{"remote_port":1},"remote_port":2,"remote_host":"b"}')
def test_replaced_values(body: bytes) -> None:
    before, out = fields(body), replaced(body, NEW)
    after = fields(out)
    assert {key: bytes(after[key]) for key in NEW} == NEW
    assert {key: bytes(raw) for key, raw in after.items() if key not in NEW} == {
        key: bytes(raw) for key, raw in before.items() if key not in NEW
    }
