"""What kills, hangs or deceives a real decode engine does not reach it.

A lying prefill endpoint answers with each handoff that vLLM 0.32 is known to die of (and some that it survives by
luck); each goes through the sidecar to a real decode engine. After every one of them the same process is alive, and
the client has the text that its own engine would have given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    COMPLETIONS,
    GENERATE,
    Api,
    Questions,
    ask,
    eventually,
    local_text,
    request_body,
    text_of,
    token_ids,
)
from e2e.pair import Pair, idle, mend, paired

if TYPE_CHECKING:
    from e2e.rig import Rig
    from e2e.tap import Passed, Tap
    from tests.integration.client import Answer
    from tests.integration.sidecar import Sidecar

Handoff = dict[str, Any]
Lie = Callable[[Handoff], Any]
"""The real handoff → what is sent in its place: JSON, or bytes for the whole answer."""

NOTHING = object()
"""The answer has no `kv_transfer_params` at all."""


def put(**members: Any) -> Lie:
    return lambda handoff: {**handoff, **members}


def without(*names: str) -> Lie:
    return lambda handoff: {key: value for key, value in handoff.items() if key not in names}


def instead(value: Any) -> Lie:
    return lambda _handoff: value


def blocks(change: Callable[[list[int]], Any]) -> Lie:
    """`change` sees the ids of the one KV group and gives the groups."""
    return lambda handoff: {**handoff, "remote_block_ids": change(handoff["remote_block_ids"][0])}


def raw(text: str) -> Lie:
    """`text` as the whole answer, with %s for the members of the real handoff."""
    return lambda handoff: text.replace("%s", json.dumps(handoff)[1:-1]).encode()


USAGE = '"usage":{"prompt_tokens":290,"completion_tokens":1,"total_tokens":291}'
REQUIRED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
IDS = ("remote_engine_id", "remote_request_id")

MISSING: dict[str, Lie] = {
    "no field": instead(NOTHING),
    "null": instead(None),
}
INVALID: dict[str, Lie] = {
    "list": instead([]),
    "string": instead("do_remote_prefill"),
    "number": instead(1),
    "true": instead(True),
    "empty": instead({}),
    "flag only": instead({"do_remote_prefill": True}),
    "flag absent": without("do_remote_prefill"),
    "flag false": put(do_remote_prefill=False),
    "flag 1": put(do_remote_prefill=1),
    "for prefill": put(do_remote_decode=True),
    **{f"no {name}": without(name) for name in REQUIRED},
    "nothing but ids": without("remote_host", "remote_port"),
    **{f"{name} null": put(**{name: None}) for name in REQUIRED},
    **{f"{name} list": put(**{name: ["x"]}) for name in REQUIRED},
    **{f"{name} object": put(**{name: {"x": 1}}) for name in REQUIRED},
    **{f"{name} int": put(**{name: 7}) for name in (*IDS, "remote_host", "remote_block_ids")},
    **{f"{name} true": put(**{name: True}) for name in REQUIRED},
    **{f"{name} empty": put(**{name: ""}) for name in REQUIRED},
    **{f"{name} with a comma": put(**{name: "a,b"}) for name in IDS},
    **{f"{name} endless": put(**{name: "a" * 100_000}) for name in IDS},
    "flat ids": blocks(lambda ids: ids),
    "ids string": put(remote_block_ids="[[1,2,3]]"),
    "ids of strings": blocks(lambda ids: [[str(one) for one in ids]]),
    "ids of floats": blocks(lambda ids: [[float(one) for one in ids]]),
    "ids of halves": blocks(lambda ids: [[one + 0.5 for one in ids]]),
    "ids null": blocks(lambda ids: [[None for _ in ids]]),
    "ids true": blocks(lambda ids: [[True for _ in ids]]),
    "ids nested": blocks(lambda ids: [[ids]]),
    "ids negative": blocks(lambda ids: [[-1, *ids[1:]]]),
    "ids huge": blocks(lambda ids: [[2**63, *ids[1:]]]),
    "ids beyond int64": blocks(lambda ids: [[2**64, *ids[1:]]]),
    "ids out of range": blocks(lambda ids: [[999_999, *ids[1:]]]),
    "ids repeated": blocks(lambda ids: [[ids[0], *ids[:-1]]]),
    "one id": blocks(lambda ids: [ids[:1]]),
    "one foreign id": blocks(lambda _ids: [[999_999]]),
    "one id short": blocks(lambda ids: [ids[:-1]]),
    "one id more": blocks(lambda ids: [[*ids, max(ids) + 1]]),
    "twice as many ids": blocks(lambda ids: [[*ids, *(max(ids) + 1 + n for n in range(len(ids)))]]),
    "too many groups": blocks(lambda ids: [ids] * 1000),
    "port 0": put(remote_port=0),
    "port negative": put(remote_port=-1),
    "port too large": put(remote_port=99_999),
    "port word": put(remote_port="abc"),
    "port string": lambda handoff: {**handoff, "remote_port": str(handoff["remote_port"])},
    "port float": lambda handoff: {**handoff, "remote_port": handoff["remote_port"] + 0.5},
    **{
        f"{name} {value!r}": put(**{name: value})
        for name in ("tp_size", "pp_size", "dcp_size")
        for value in (0, -1, "1", None, [], 2_000_000_000)
    },
    "tokens a string": put(remote_num_tokens="300"),
    "tokens negative": put(remote_num_tokens=-5),
    "expiry a string": put(remote_blocks_expiry_time="soon"),
    "mode push": put(transfer_mode="push"),
    "mode a number": put(transfer_mode=5),
    "cached a string": put(remote_prefill_cached_tokens="all"),
    "cached negative": put(remote_prefill_cached_tokens=-1),
    "no JSON": raw("handoff"),
    "no answer at all": raw(""),
    "half an answer": raw('{"kv_transfer_params":{%s},"usage":{"prompt_'),
    "an array": raw("[{%s}]"),
    "no usage": raw('{"kv_transfer_params":{%s}}'),
    "usage of nothing": raw('{"kv_transfer_params":{%s},"usage":{"prompt_tokens":0}}'),
    "usage a string": raw('{"kv_transfer_params":{%s},"usage":{"prompt_tokens":"290"}}'),
    "a second, bare one": raw(
        '{"kv_transfer_params":{%s},"kv_transfer_params":{"do_remote_prefill":true},' + USAGE + "}"
    ),
    "an escaped second one": raw(
        '{"kv_transfer_params":{%s},"kv_transfer\\u005fparams":{"do_remote_prefill":true},' + USAGE + "}"
    ),
    "a key twice": raw('{"kv_transfer_params":{%s,"remote_request_id":null},' + USAGE + "}"),
    "an escaped key twice": raw('{"kv_transfer_params":{%s,"remote_\\u0068ost":[]},' + USAGE + "}"),
    "nested for ever": raw('{"kv_transfer_params":{"x":' + "[" * 5000 + "]" * 5000 + ",%s}," + USAGE + "}"),
    "NaN": raw('{"kv_transfer_params":{%s,"remote_port":NaN},' + USAGE + "}"),
}
WRONG_HOST: dict[str, Lie] = {
    f"host {host}": put(remote_host=host)
    for host in (
        "localhost",
        "0.0.0.0",
        "::",
        "::1",
        "127.0.0.2",
        "127.1",
        "2130706433",
        "0x7f000001",
        "169.254.169.254",
        "999.1.1.1",
        "metadata.internal",
        "127.0.0.1:80",
        "127.0.0.1@evil",
        "*",
    )
}
DEAD: dict[str, Lie] = {"a dead port": put(remote_port=1)}
INCOMPATIBLE: dict[str, Lie] = {
    "another engine": put(remote_engine_id="another"),
    "a tensor-parallel size that is not": put(tp_size=2),
    "a pipeline size that is not": put(pp_size=2),
    "both": put(tp_size=64, pp_size=64),
}
HARMLESS: dict[str, Lie] = {
    "honest": put(),
    "unknown members": put(remote_colour="blue", kv_transfer_params={"do_remote_prefill": True}),
    "another request's id": put(remote_request_id="cmpl-somebody-else-0-00000000"),
    "everything cached": put(remote_prefill_cached_tokens=290),
}

TABLE = [
    pytest.param(lie, reason, id=f"{reason or 'harmless'}: {name}")
    for reason, lies in (
        ("missing", MISSING),
        ("invalid", INVALID),
        ("wrong_host", WRONG_HOST),
        ("side_channel_dead", DEAD),
        ("incompatible", INCOMPATIBLE),
        ("", HARMLESS),
    )
    for name, lie in lies.items()
]


class Line:
    """A sidecar between a prefill engine that lies on demand and the real decode engine."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.tap: Tap = pair.tap(pair.prefill)
        self.sidecar: Sidecar = pair.serve(prefill=self.tap.address)
        self.questions = Questions(pair.decode, tokens=290, generate=6)
        self.lies_in_a_row = 0

    def ask(self) -> Answer:
        """One request, another kind at every turn; its text is checked."""
        return self.questions.next().ask(self.sidecar)

    def lie(self, lie: Lie) -> Answer:
        def answered(_passed: object, answer: Any) -> Any:
            said = lie(answer.pop("kv_transfer_params"))
            if isinstance(said, bytes):
                return said
            return answer if said is NOTHING else {**answer, "kv_transfer_params": said}

        self.tap.answered = answered
        try:
            return self.ask()
        finally:
            self.tap.honest()


@pytest.fixture(scope="module")
def whole_line(rig: Rig) -> Iterator[Line]:
    with paired(rig.prefill[0], rig.decode[0]) as pair:
        line = Line(pair)
        yield line
        idle(line.sidecar)


@pytest.fixture
def line(whole_line: Line) -> Line:
    mend(whole_line.pair.prefill, whole_line.pair.decode)
    return whole_line


@pytest.mark.parametrize(("lie", "reason"), TABLE)
def test_no_handoff_kills(line: Line, lie: Lie, reason: str) -> None:
    answer = line.lie(lie)
    honest = f"remote; prefill={line.tap.address}"
    assert answer.decision == (f"recompute; reason=handoff_{reason}" if reason else honest)
    assert line.pair.decode.healthy()
    # The next honest one is used: nothing of the lie is left behind in the sidecar or in the engines. (The third
    # lie in a row would open the breaker.)
    line.lies_in_a_row += 1
    if line.lies_in_a_row == 2 or reason not in ("invalid", "wrong_host"):
        eventually(lambda: line.ask().decision == honest)
        line.lies_in_a_row = 0
    assert line.pair.prefill.healthy()


@pytest.mark.parametrize("by", [-40, -1, 1, 40])
@pytest.mark.parametrize("api", [COMPLETIONS, GENERATE], ids=str)
def test_nor_does_the_handoff_of_another_prompt(line: Line, api: Api, by: int) -> None:
    """True in every word, but of more or fewer tokens, as another tokenizer or a truncation makes them."""

    def asked(passed: Passed) -> None:
        name = "prompt" if api is COMPLETIONS else "token_ids"
        ids = passed.json[name]
        passed.body = json.dumps({**passed.json, name: ids[:by] if by < 0 else [*ids, *ids[:by]]}).encode()

    body = request_body(api, token_ids(290))
    line.tap.asked = asked
    try:
        answer = ask(line.sidecar, api, body)
    finally:
        line.tap.honest()
    assert answer.decision == "recompute; reason=handoff_invalid"
    assert line.pair.decode.healthy()
    assert text_of(answer) == local_text(line.pair.decode, api, body)
    eventually(lambda: line.ask().decision == f"remote; prefill={line.tap.address}")
