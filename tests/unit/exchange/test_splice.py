"""JSON that is changed without being decoded: only what is named changes, everything else stays byte for byte.

What a body means is judged by Python's own parser, which is the engine's.
"""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.exchange import splice
from sidecar.exchange.apis import APIS, FORBIDDEN, Api
from sidecar.exchange.splice import (
    LARGE_BYTES,
    Fields,
    NotAnObject,
    decode_body,
    fields,
    fields_if_object,
    is_object,
    prefill_body,
    remove,
    replaced,
    with_members,
    without_forbidden,
)
from tests.unit.exchange.bodies import STORIES, Member, Writer, holds_forbidden, spelled

PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1, 2]],"x":1.0}'


def prefilled(api: Api, members: Fields, params: bytes) -> bytes:
    """The prefill body, the same in whatever parts it comes."""
    whole = b"".join(prefill_body(api, members, params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "LARGE_BYTES", 4)
        assert b"".join(prefill_body(api, members, params)) == whole
    return whole


bounded = settings(max_examples=150, deadline=None, database=None)


def pairs(body: bytes) -> list[tuple[str, Any]]:
    """The top-level members as the engine's parser meets them, repeated ones too."""
    found: list[list[tuple[str, Any]]] = []

    def keep(members: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(members)
        return dict(members)

    json.loads(body, object_pairs_hook=keep)
    return found[-1]


# -- random bodies ---------------------------------------------------------------------------------------------

KEYS = (
    *("model", "prompt", "messages", "input", "token_ids", "tools", "max_tokens", "max_completion_tokens"),
    *("max_output_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_sequences", "stream", "store"),
    *("stream_options", "temperature", "seed", "cache_salt", "ignore_eos", "best_of", "sampling_params", "é", ""),
)


def plain_body(story: bytes) -> bytes:
    """A body without any forbidden key at the top, with white space around it."""
    writer = Writer(story)
    before, after = writer.space(), writer.space()
    content = writer.object(writer.members(lambda: writer.pick(KEYS), 8))
    return (before + content + after).encode()


PLAIN = STORIES.map(plain_body)


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


# -- what a client may never set -------------------------------------------------------------------------------


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


# -- the prefill body ------------------------------------------------------------------------------------------

MODEL = ("model", "temperature", "top_p", "seed", "cache_salt", "logit_bias", "lora", "priority", "user")
CONTRACT: dict[str, tuple[dict[str, Any], set[str], tuple[str, ...]]] = {
    "completions": (
        {"stream": False, "max_tokens": 1, "ignore_eos": True},
        {"n", "stop", "stop_token_ids", "min_tokens", "stream_options"},
        ("prompt", "suffix", "add_special_tokens", "mm_processor_kwargs", *MODEL),
    ),
    "chat": (
        {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "ignore_eos": True},
        {"n", "stop", "stop_token_ids", "min_tokens", "stream_options"},
        ("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", *MODEL),
    ),
    "responses": (
        {"stream": False, "max_output_tokens": 1, "store": False},
        {"stop", "stop_token_ids", "stream_options"},
        ("input", "instructions", "tools", "tool_choice", "reasoning", "text", "metadata", *MODEL),
    ),
    "messages": (
        {"stream": False, "max_tokens": 1},
        {"stop_sequences"},
        ("messages", "system", "tools", "tool_choice", "thinking", "metadata", *MODEL),
    ),
    "generate": (
        {"stream": False},
        {"stream_options"},
        ("token_ids", "features", *MODEL),
    ),
}
"""By API, and not taken from `apis.py`: what the prefill body must hold, what it must not, what must not change."""
INNER_CONTRACT = ({"max_tokens": 1, "ignore_eos": True}, {"n", "stop", "stop_token_ids", "min_tokens"})
"""The same for the `sampling_params` of generate."""

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")


def body_for(api: Api, story: bytes) -> bytes:
    """A body of this API with any of its limits, repeated, absent, null, in any order."""
    writer = Writer(story)
    caps, dropped, prompt = CONTRACT[api.name]
    keys = (*caps, *dropped, *prompt, *LIMITS, "response_format", "logprobs")
    drawn = writer.members(lambda: writer.pick(keys), 9)
    if api.sampling:
        inner_keys = (*INNER_CONTRACT[0], *INNER_CONTRACT[1], "temperature", "seed", "logprobs", "extra_args")
        for _ in range(writer.choose(3)):
            inner = writer.object(writer.members(lambda: writer.pick(inner_keys), 6))
            drawn.insert(writer.choose(len(drawn) + 1), writer.member("sampling_params", inner))
    return writer.object(drawn).encode()


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
@bounded
@given(story=STORIES)
def test_prefill_body(api: Api, story: bytes) -> None:
    """Cases 15 to 19: every limit of every API, present, absent or null; all that shapes the prompt as it was."""
    body = body_for(api, story)
    caps, dropped, _ = CONTRACT[api.name]
    before, out = fields(body), prefilled(api, fields(body), PARAMS)
    after = fields(out)
    meaning = pairs(out)
    assert len(meaning) == len(dict(meaning)), "a key stands twice"
    assert bytes(after["kv_transfer_params"]) == PARAMS
    for key, value in caps.items():
        assert json.loads(bytes(after[key])) == value
        assert type(json.loads(bytes(after[key]))) is type(value)
    assert not dropped & set(after)
    for key, raw in before.items():
        if key not in caps and key not in dropped and key != api.sampling:
            assert bytes(after[key]) == bytes(raw), f"{key} has changed"
    assert [key for key in after if key in before] == [key for key in before if key in after], "another order"
    if api.sampling:
        _check_sampling(before.get(api.sampling), after[api.sampling])


def _check_sampling(before: Any, after: Any) -> None:
    caps, dropped = INNER_CONTRACT
    old = fields(before) if before is not None else {}
    new = fields(after)
    assert {key: json.loads(bytes(new[key])) for key in caps} == caps
    assert not dropped & set(new)
    for key, raw in old.items():
        if key not in caps and key not in dropped:
            assert bytes(new[key]) == bytes(raw)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_contract_is_whole(api: Api) -> None:
    """Caps that this file does not know of would go untested."""
    caps, dropped, _ = CONTRACT[api.name]
    if api.sampling:
        assert (set(api.caps), api.drop) == (set(INNER_CONTRACT[0]), INNER_CONTRACT[1])
        assert (set(api.outer_caps), api.outer_drop) == (set(caps), dropped)
    else:
        assert set(api.caps) - {"ignore_eos"} == set(caps) - {"ignore_eos"}
        assert api.drop == dropped


@pytest.mark.parametrize("limit", ["100", "null", "0", "1", "-1", '"5"', "1e3", None])
@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_limits_at_both_legs(api: Api, limit: str | None) -> None:
    """Case 17: absent stays absent, null stays null and 0 stays 0 at decode; prefill makes one token."""
    names = [name for name in api.caps if name.startswith("max_")]
    inner = ",".join(f'"{name}":{limit}' for name in names) if limit is not None else '"seed":1'
    body = (f'{{"{api.sampling}":{{{inner}}},"a":1}}' if api.sampling else f'{{{inner},"a":1}}').encode()
    prefill = json.loads(prefilled(api, fields(body), PARAMS))
    prefill = prefill[api.sampling] if api.sampling else prefill
    assert [prefill[name] for name in names] == [1] * len(names)
    head, rest = decode_body(body, PARAMS)
    assert (head + bytes(rest)).endswith(body[1:])


def test_order_of_tool_schemas_is_kept() -> None:
    """Case 18."""
    tools = b'[ {"type":"function", "function":{"name":"z","parameters":{"b":1,"a":{"d":1.0,"c":2}}}} ]'
    body = b'{"tools":' + tools + b',"messages":[],"max_tokens":7}'
    assert tools in prefilled(APIS[b"/v1/chat/completions"], fields(body), PARAMS)


def test_spellings_are_remembered_within_a_bound() -> None:
    body = json.dumps({f"key{n}": n for n in range(3 * splice._MAX_SPELLINGS)}).encode()
    assert fields(with_members(fields(body), {})) == fields(body)
    assert len(splice._spellings) <= splice._MAX_SPELLINGS
    long = json.dumps({"x" * 5000: 1}).encode()
    assert with_members(fields(long), {}) == long.replace(b": ", b":")


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


def test_a_large_prompt_is_sent_from_where_it_lies() -> None:
    prompt = json.dumps("x" * LARGE_BYTES).encode()
    parts = prefill_body(
        APIS[b"/v1/completions"], fields(b'{"model":"m","prompt":%b,"max_tokens":5}' % prompt), PARAMS
    )
    before, view, behind = parts
    assert isinstance(view, memoryview)
    assert view == prompt
    assert before == b'{"model":"m","prompt":'
    assert bytes(behind).startswith(b',"max_tokens":1,"stream":false')
