"""What a client may never set is taken out, in every place and spelling; bodies that we cannot read are refused.

What a body means is judged by Python's own parser, which is the engine's.
"""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.exchange.apis import FORBIDDEN
from sidecar.exchange.splice import NotAnObject, fields, fields_if_object, remove, without_forbidden
from tests.unit.exchange.bodies import STORIES, Member, Writer, bounded, holds_forbidden, pairs, spelled

# -- what is removed -------------------------------------------------------------------------------------------


def nasty_text(story: bytes) -> str:
    """A body in which forbidden keys may stand anywhere, in any spelling, any number of times."""
    writer = Writer(story)

    def inner() -> str:
        return writer.object(writer.members(lambda: writer.pick((*FORBIDDEN, "a", "b", "kv_transfer_param")), 4, 1))

    def member() -> Member:
        match writer.choose(8):
            case 0 | 1:
                return writer.member(writer.pick(FORBIDDEN), writer.value(1))
            case 2 | 3:
                return writer.member("vllm_xargs", inner() if writer.choose(4) else writer.value())
            case 4 | 5 if writer.choose(4):
                keys = ("extra_args", "extra_args", "n", *FORBIDDEN)
                members = [
                    writer.member(writer.pick(keys), inner() if writer.choose(4) else writer.value())
                    for _ in range(writer.choose(4))
                ]
                return writer.member("sampling_params", writer.object(members))
            case 4 | 5:
                return writer.member("sampling_params", writer.value())
            case _:
                return writer.member(writer.pick(("model", "prompt", "a")), writer.value())

    return writer.object([member() for _ in range(writer.choose(8))])


NASTY = STORIES.map(nasty_text)


def _without(meaning: dict[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        return {k: v for k, v in value.items() if k not in FORBIDDEN} if isinstance(value, dict) else value

    out = clean(meaning)
    if "vllm_xargs" in out:
        out["vllm_xargs"] = clean(out["vllm_xargs"])
    if isinstance(out.get("sampling_params"), dict) and "extra_args" in out["sampling_params"]:
        inner = out["sampling_params"]
        out["sampling_params"] = {**inner, "extra_args": clean(inner["extra_args"])}
    return out


@settings(bounded, max_examples=300)
@given(NASTY.map(str.encode))
def test_forbidden_keys_are_removed_and_nothing_else(body: bytes) -> None:
    before = json.loads(body)
    cleaned = without_forbidden(body, fields(body))
    if cleaned is None:
        assert not holds_forbidden(before)
        return
    assert holds_forbidden(before)
    after = json.loads(cleaned)
    assert after == _without(before)
    assert without_forbidden(cleaned, fields(cleaned)) is None
    old, new = fields(body), fields(cleaned)
    assert list(new) == [key for key in old if key not in FORBIDDEN]
    for key, raw in new.items():
        if key not in ("vllm_xargs", "sampling_params"):
            assert bytes(raw) == bytes(old[key])
    # Repeated members that stay, stay in order and number.
    assert [k for k, _ in pairs(cleaned)] == [k for k, _ in pairs(body) if k not in FORBIDDEN]


@pytest.mark.parametrize("key", FORBIDDEN)
@pytest.mark.parametrize("style", [0, 1, 0b10, 0xFFFF, 0x5555])
@pytest.mark.parametrize(
    "value", ["null", '{"do_remote_prefill":true}', "[]", '"x"', "1", "{}", '"}"', '{"a":"\\"}"}']
)
def test_every_place_and_spelling(key: str, style: int, value: str) -> None:
    bad = f"{spelled(key, style)} : {value}"
    for template, expected in (
        ("{%s}", "{}"),
        ('{%s,"a":1}', '{"a":1}'),
        ('{"a":1 , %s}', '{"a":1}'),
        ('{"a":1, %s ,"b":[2]}', '{"a":1, "b":[2]}'),
        ('{%s,%s,"a":1}', '{"a":1}'),
        ('{"a":1,%s,%s}', '{"a":1}'),
        ('{%s,"a":1,%s}', '{"a":1}'),
        ('{"vllm_xargs":{%s},"a":1}', '{"vllm_xargs":{},"a":1}'),
        ('{"vllm_xargs":{"b":2,%s}}', '{"vllm_xargs":{"b":2}}'),
        ('{"vllm_\\u0078args":{%s}}', '{"vllm_\\u0078args":{}}'),
        ('{"sampling_params":{"n":1,"extra_args":{%s,"c":3}}}', '{"sampling_params":{"n":1,"extra_args":{"c":3}}}'),
        ('{%s,"vllm_xargs":{%s},"a":1}', '{"vllm_xargs":{},"a":1}'),
    ):
        body = template.replace("%s", bad).encode()
        assert without_forbidden(body, fields(body)) == expected.encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata":{"kv_transfer_params":{}}}',
        b'{"messages":[{"kv_transfer_params":1}]}',
        b'{"prompt":"\\"kv_transfer_params\\":{}"}',
        b'{"vllm_xargs":"kv_transfer_params"}',
        b'{"vllm_xargs":[{"kv_transfer_params":1}]}',
        b'{"sampling_params":{"kv_transfer_params":1}}',
        b'{"extra_args":{"kv_transfer_params":1}}',
        b'{"vllm_xargs":{"kv_transfer_params":1},"vllm_xargs":{}}',
        b'{"KV_TRANSFER_PARAMS":1}',
    ],
)
def test_what_the_engine_does_not_read_stays(body: bytes) -> None:
    assert without_forbidden(body, fields(body)) is None


@pytest.mark.parametrize(
    "kept",
    [
        b'"metadata":{"kv_transfer_params":2}',
        b'"sampling_params":{"kv_transfer_params":2}',
        b'"extra_args":{"kv_transfer_params":2}',
        b'"vllm_xargs":["kv_transfer_params",{"kv_transfer_params":1}]',
        b'"vllm_xargs":"{\\"kv_transfer_params\\":1}"',
        b'"sampling_params":{"extra_args":[{"ec_transfer_params":1},"kv_transfer_params"]}',
        b'"sampling_params":[{"extra_args":{"kv_transfer_params":1}}]',
        b'"a":{"vllm_xargs":{"kv_transfer_params":1}}',
        b'"a":[{"b":1},{"kv_transfer_params":{}}]',
    ],
)
def test_what_the_engine_does_not_read_stays_also_where_something_goes(kept: bytes) -> None:
    for body in (b'{"kv_transfer_params":1,' + kept + b"}", b"{" + kept + b' , "ec_transfer_params":{}}'):
        assert without_forbidden(body, fields(body)) == b"{" + kept + b"}"


def test_removal_keeps_what_surrounds_the_object() -> None:
    assert remove(b' \n{"a":1,"kv_transfer_params":2}\r\n ', [("kv_transfer_params",)]) == b' \n{"a":1}\r\n '


@pytest.mark.parametrize("filler", [b"\\\\" * 500_000, b'\\"' * 500_000, b"[]{}," * 200_000, b"x" * 1_000_000])
def test_removal_takes_time_in_proportion(filler: bytes) -> None:
    body = b'{"prompt":"' + filler + b'","kv_transfer_params":{}}'
    start = time.process_time()
    assert without_forbidden(body, fields(body)) == b'{"prompt":"' + filler + b'"}'
    assert time.process_time() - start < 2.0


# -- what is refused -------------------------------------------------------------------------------------------

LENIENT = [
    b'{"a":NaN}',
    b'{"a":[Infinity]}',
    b'{"a":{"b":-Infinity}}',
    b'{"a":"\\ud800"}',
    b'{"a":["\\udc00\\ud800"]}',
    b'{"\\ud800":1}',
    b'{"a":{"\\ud83d":1}}',
    b'\xef\xbb\xbf{"a":1}',
    '{"a":1}'.encode("utf-16"),
    '{"a":1}'.encode("utf-16-le"),
    '{"a":1}'.encode("utf-32"),
    '{"a":1}'.encode("utf-32-be"),
]
"""What Python's parser takes and ours does not: it must not be relayed unread."""

MALFORMED = [
    *(b"", b" ", b"{", b"}", b"[]", b"null", b"1", b'"a"', b'{"a"}', b'{"a":}', b'{"a":1,}', b"{a:1}", b"{'a':1}"),
    *(b'{"a":1}}', b'{"a":1}{', b'{"a":01}', b'{"a":1.}', b'{"a":.5}', b'{"a":+1}', b'{"a":1e}', b'{"a":tru}'),
    *(b'{"a":"\x01"}', b'{"a":"\n"}', b'{"a":"\\x"}', b'{"a":"\\u12"}', b'{"a":[1,]}', b'{"a":1 /*c*/}'),
    *(b'{"a":1}\x00', b'\x0b{"a":1}', b'{"a":1;"b":2}', b'{"\xff":1}', b'{"a":0x1}', b"\xff\xfe{}", b"{1:2}"),
]


@pytest.mark.parametrize("body", LENIENT + MALFORMED, ids=lambda body: repr(body[:24]))
def test_refused(body: bytes) -> None:
    with pytest.raises(NotAnObject):
        fields(body)


@pytest.mark.parametrize("body", LENIENT, ids=lambda body: repr(body[:24]))
def test_refused_bodies_are_ones_that_the_engine_would_read(body: bytes) -> None:
    assert isinstance(json.loads(body), dict)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("depth", [10, 500, 990, 1000, 1100, 5_000, 200_000])
def test_depth_is_refused_and_never_an_exception_of_another_kind(opening: bytes, depth: int) -> None:
    closing = opening.replace(b'"a":', b"").translate(bytes.maketrans(b"[{", b"]}"))[::-1]
    body = b'{"a":' + opening * depth + b"1" + closing * depth + b"}"
    try:
        top = fields(body)
    except NotAnObject:
        assert depth > 400
    else:
        assert depth < sys.getrecursionlimit()
        assert without_forbidden(body, top) is None


def test_depth_is_refused_on_a_deep_stack_as_well() -> None:
    body = b'{"a":' + b"[" * 600 + b"]" * 600 + b"}"

    def descend(levels: int) -> object:
        return fields(body) if levels == 0 else descend(levels - 1)

    assert fields(body)
    with pytest.raises(NotAnObject):
        descend(600)


DAMAGE = (b"", b'"', b"\\", b"{", b"}", b",", b":", b" ", b"\x00", b"NaN", b"\xff", b"\\ud800", b"\xef\xbb\xbf")

ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")


def damaged(text: str, encoding: str, changes: list[tuple[int, int, bytes]]) -> bytes:
    """A body in some encoding with bytes changed, left out or put in."""
    body = bytearray(text.encode(encoding))
    for at, width, change in changes:
        place = at % (len(body) + 1)
        body[place : place + width] = change
    return bytes(body)


CHANGES = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 1), st.sampled_from(DAMAGE)), max_size=2)

DAMAGED = st.builds(damaged, NASTY, st.sampled_from(ENCODINGS), CHANGES)


@settings(bounded, max_examples=300)
@given(DAMAGED)
def test_no_body_brings_a_forbidden_key_past_us(body: bytes) -> None:
    """On paths that we know, and on those that we do not: refused, or cleaned, or nothing is in it."""
    for read in (fields, fields_if_object):
        try:
            top = read(body)
        except NotAnObject:
            continue
        cleaned = without_forbidden(body, top) if top else None
        sent = body if cleaned is None else cleaned
        try:
            meaning = json.loads(sent)
        except (ValueError, RecursionError):
            assert cleaned is None, "the removal made it unreadable"
            continue
        assert not holds_forbidden(meaning)


@pytest.mark.parametrize(
    "body", [b"", b"abc", b"[1]", b"\x00\x01", b"a=b&c=d", b"null", b'{"a":NaN}', b"\xff" * 10]
)
def test_other_bodies_on_other_paths_are_no_business_of_ours(body: bytes) -> None:
    assert fields_if_object(body) == {}
