"""Random JSON as clients write it: any spacing, key order, escapes, repeated keys, odd numbers.

Written from a story, a few hundred random bytes of which each decides one choice: much faster than a strategy for
each choice, and it still shrinks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from sidecar.exchange import splice
from sidecar.exchange.apis import FORBIDDEN, Api
from sidecar.exchange.splice import Fields, prefill_body

SPACES = ("", "", "", " ", "\n", "\t", "\r\n  ")
NUMBERS = (
    *("0", "-0", "1", "1.0", "0.10", "1e5", "1E+2", "-1.5e-3", "1.7976931348623157e309", "1e-400", "7", "4096"),
    *("9007199254740993", "18446744073709551616", "123456789012345678901234567890", "-9223372036854775809"),
)
WORDS = ("true", "false", "null")
TEXTS = (
    *(
        "",
        "a",
        "Hello, world",
        "é",
        "日本語",
        "\U0001f600",
        '"',
        "\\",
        "a\\",
        '\\"',
        "},{",
        '":',
        "]",
        " \n",
        "\x00",
    ),
    *("kv_transfer_params", '"kv_transfer_params":{}', "\ufeff", "\u2028", "\x7f"),
)


def spelled(text: str, style: int) -> str:
    """`text` as a JSON string; each bit of `style` says whether a character is escaped."""
    out = []
    for index, char in enumerate(text):
        if style >> (index % 16) & 1:
            units = char.encode("utf-16-be")
            out += [f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2)]
        else:
            out.append(json.dumps(char, ensure_ascii=False)[1:-1])
    return '"' + "".join(out) + '"'


@dataclass(frozen=True)
class Member:
    """One member of an object, as written."""

    key: str
    value: str


class Writer:
    """Writes JSON as its story goes. A story that has ended chooses the first of everything."""

    def __init__(self, story: bytes) -> None:
        self._story = iter(story)

    def choose(self, options: int) -> int:
        return next(self._story, 0) % options

    def pick(self, options: Sequence[str]) -> str:
        return options[self.choose(len(options))]

    def space(self) -> str:
        return self.pick(SPACES)

    def string(self, text: str) -> str:
        return spelled(text, (0, 0, 1, 0b10, 0xFFFF, 0x5A5A)[self.choose(6)])

    def value(self, depth: int = 3) -> str:
        kind = self.choose(8 if depth else 4)
        if kind <= 1:
            return self.pick(NUMBERS)
        if kind == 2:
            return self.pick(WORDS)
        if kind <= 4:
            return self.string(self.pick(TEXTS))
        if kind <= 5:
            parts = [self.space() + self.value(depth - 1) + self.space() for _ in range(self.choose(4))]
            return "[" + ",".join(parts) + "]"
        return self.object(self.members(lambda: self.pick(("a", "b", *TEXTS)), 4, depth - 1))

    def members(self, key: Callable[[], str], at_most: int, depth: int = 3) -> list[Member]:
        return [self.member(key(), self.value(depth)) for _ in range(self.choose(at_most + 1))]

    def member(self, key: str, value: str) -> Member:
        return Member(self.string(key), value)

    def object(self, members: Sequence[Member]) -> str:
        if not members:
            return "{" + self.space() + "}"
        parts = [
            f"{self.space()}{member.key}{self.space()}:{self.space()}{member.value}{self.space()}"
            for member in members
        ]
        return "{" + ",".join(parts) + "}"


STORIES = st.binary(max_size=500)


def holds_forbidden(meaning: Any) -> bool:
    """Whether the engine would find a forbidden key: it reads four places and the last of a repeated key."""
    if not isinstance(meaning, dict):
        return False
    places = [meaning, meaning.get("vllm_xargs")]
    if isinstance(sampling := meaning.get("sampling_params"), dict):
        places.append(sampling.get("extra_args"))
    return any(isinstance(place, dict) and any(key in place for key in FORBIDDEN) for place in places)


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

bounded = settings(max_examples=150, deadline=None, database=None)


def pairs(body: bytes) -> list[tuple[str, Any]]:
    """The top-level members as the engine's parser meets them, repeated ones too."""
    found: list[list[tuple[str, Any]]] = []

    def keep(members: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(members)
        return dict(members)

    json.loads(body, object_pairs_hook=keep)
    return found[-1]


PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1, 2]],"x":1.0}'


def prefilled(api: Api, members: Fields, params: bytes) -> bytes:
    """The prefill body, the same in whatever parts it comes."""
    (whole,) = prefill_body(api, members, 0, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "LARGE_BYTES", 4)
        assert b"".join(prefill_body(api, members, 4, params)) == whole
    assert isinstance(whole, bytes)
    return whole
