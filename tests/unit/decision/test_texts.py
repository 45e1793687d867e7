"""Remembered prompts: found if and only if all that shapes it is the same so far, and never more than fit."""

import gc
import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.decision import texts
from sidecar.decision.texts import (
    FRAMES_MAX,
    MISSES_MAX,
    PATH_BLOCKS_MAX,
    PROMPT_BYTES_MAX,
    PROMPTS_OF_A_BEGINNING_MAX,
    SHAPES_NO_PROMPT,
    Standing,
    Text,
    Texts,
    last_place,
    quarters,
)
from sidecar.exchange.apis import CHAT
from sidecar.exchange.splice import Fields, fields

TOKENS = 1029
BLOCKS, PLACES, PATH = [63, 47, 31, 15], [63, 47, 31, 15], [63, 64]


def said(messages: list[Any], **more: Any) -> Fields:
    return fields(json.dumps({"model": "m", "messages": messages, **more}).encode())


def user(words: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": words, **more}


def remember(memory: Texts, members: Fields, tokens: int = TOKENS, adapter: int | None = None) -> None:
    key = memory.key(CHAT, members, adapter)
    if key is not None:
        memory.remember(key, tokens, BLOCKS, PLACES, PATH)


def find(memory: Texts, members: Fields, adapter: int | None = None) -> Text | None:
    where = memory.where(CHAT, members, adapter)
    found = memory.find(where, CHAT, members) if where is not None else None
    return found[0] if found is not None else None


def standing_of(memory: Texts, members: Fields) -> Standing:
    where = memory.where(CHAT, members, None)
    assert where is not None
    found = memory.find(where, CHAT, members)
    assert found is not None
    return found[1]


# Few words, so that conversations begin alike; with what JSON escapes, and what ends like a message.
words = st.sampled_from(["a" * 40, "b" * 40, "a", "", '"},', '"}]', "\\", "é\U0001f600", "]", '{"role": "user"}'])
roles = st.sampled_from(["user", "assistant", "system"])
message = st.builds(lambda role, text: {"role": role, "content": text}, roles, words)
chats = st.lists(message, min_size=1, max_size=5)
frames = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "n"]),
        "tools": st.sampled_from([[{"type": "function"}], [{"type": "function", "function": {}}]]),
        "cache_salt": st.sampled_from(["s", "t"]),
        "chat_template_kwargs": st.sampled_from([{"x": 1}, {"x": 2}]),
        "what_nobody_knows": st.sampled_from([1, 2]),
    },
)
samplings = st.dictionaries(st.sampled_from(sorted(SHAPES_NO_PROMPT)), st.integers(0, 3), max_size=3)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(chats, frames, samplings), max_size=6), st.tuples(chats, frames, samplings))
def test_found_if_and_only_if_all_so_far_is_the_same(
    history: list[tuple[list[Any], dict[str, Any], dict[str, Any]]],
    asked: tuple[list[Any], dict[str, Any], dict[str, Any]],
) -> None:
    memory = Texts()
    for number, (messages, frame, sampling) in enumerate(history):
        remember(memory, said(messages, **frame, **sampling), TOKENS + number)
    messages, frame, sampling = asked
    fits = [
        (len(before), number)
        for number, (before, shaped, _) in enumerate(history)
        if before == messages[: len(before)] and {"model": "m", **shaped} == {"model": "m", **frame}
    ]
    found = find(memory, said(messages, **frame, **sampling))
    if not fits:
        assert found is None
        return
    # One whose first user's words are not what it begins with as a whole need not be found (`shape.conversation`).
    if found is not None:
        assert found.tokens - TOKENS in [number for _, number in fits]
    if all(each["role"] == "user" and len(each["content"]) == 40 for each in messages[:1]):
        assert found is not None
        assert found.tokens - TOKENS == max(fits)[1], "the longest, as it was told last"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[{"role":"user","content":"%s"}]', '[{"role":"user","content":"%s"},{"role":"user","content":"x"}]'),
        ('[{"role":"user","content":"%s"} ]', '[{"role":"user","content":"%s"}\n ,{"role":"user","content":"x"}]'),
        ('[{"role":"user","content":"%s"}]', '[{"role":"user","content":"%s"}  ]'),
    ],
)
def test_white_space_between_messages_is_none_of_them(before: str, after: str) -> None:
    memory = Texts()
    remember(memory, fields(b'{"messages":%b}' % before.replace("%s", "w" * 99).encode()))
    assert find(memory, fields(b'{"messages":%b}' % after.replace("%s", "w" * 99).encode())) is not None


@pytest.mark.parametrize(
    "other",
    [
        '[{"role":"user","content":"%s" },{"role":"user","content":"x"}]',
        '[{"role": "user","content":"%s"},{"role":"user","content":"x"}]',
        '[{"role":"user","content":"%s!"},{"role":"user","content":"x"}]',
        '[{"role":"user","content":"%s"',
        "[]",
        "7",
        '"[]"',
        '{"a":1}',
    ],
)
def test_what_is_not_the_same_bytes_is_not_found(other: str) -> None:
    memory = Texts()
    remember(memory, fields(b'{"messages":[{"role":"user","content":"%b"}]}' % (b"w" * 99)))
    body = b'{"messages":%b}' % other.replace("%s", "w" * 99).encode()
    if not other.endswith('"'):
        assert find(memory, fields(body)) is None
    # A change in the middle of a long one, behind which all is the same.
    long = "w" * 500
    remember(memory, said([user(long + "x" + long)]))
    assert find(memory, said([user(long + "x" + long), user("")])) is not None
    assert find(memory, said([user(long + "y" + long), user("")])) is None


def test_members_order_says_nothing_and_an_adapter_does() -> None:
    memory = Texts()
    prompt = user("w" * 99)
    remember(memory, fields(json.dumps({"messages": [prompt], "model": "m", "x": 1}).encode()), adapter=3)
    turned = fields(json.dumps({"x": 1, "model": "m", "messages": [prompt, prompt]}).encode())
    assert find(memory, turned, adapter=3) is not None
    assert find(memory, turned, adapter=4) is None
    assert find(memory, turned) is None


def test_places_are_those_that_a_longer_prompt_has_too() -> None:
    assert last_place(1029, 16) == 63, "the last of 64 may hold what the template puts behind the messages"
    assert [last_place(tokens, 16) for tokens in (0, 16, 31, 32, 48)] == [0, 0, 0, 1, 2]
    assert quarters(63) == [63, 47, 31, 15]
    assert [quarters(blocks) for blocks in (0, 1, 2, 3, 4)] == [[], [1], [2, 1], [3, 2, 1], [4, 3, 2, 1]]


def test_what_a_frame_has_shown() -> None:
    memory = Texts()
    remember(memory, said([user("w" * 99)]))
    standing = standing_of(memory, said([user("w" * 99)]))
    assert standing.is_trusted
    for _ in range(MISSES_MAX):
        standing.saw(same=False)
    again = standing_of(memory, said([user("w" * 99), user("x")]))
    assert not again.is_trusted
    other = memory.where(CHAT, said([user("w" * 99)], tools=[]), None)
    assert other is not None
    assert memory.standing(other.frame).is_trusted, "another template's"
    standing.saw(same=True)
    assert again.is_trusted
    for number in range(FRAMES_MAX):
        memory.standing(number)
    assert memory.standing(other.frame) is not again


def test_the_memory_is_bounded_and_keeps_what_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PROMPTS_MAX", 10)
    memory = Texts()
    first = [user("first" * 20)]
    remember(memory, said(first))
    for number in range(30):
        assert find(memory, said([*first, user("next")])) is not None, number
        remember(memory, said([user(f"{number} other" * 20)]))
        assert len(memory) <= 10
    assert find(memory, said([user("3 other" * 20)])) is None
    assert find(memory, said([user("29 other" * 20)])) is not None


def test_turns_of_one_conversation_are_bounded() -> None:
    memory = Texts()
    first = user("first" * 20)
    for number in range(PROMPTS_OF_A_BEGINNING_MAX * 2):
        remember(memory, said([first, user(str(number))]))
    assert len(memory) == PROMPTS_OF_A_BEGINNING_MAX
    remember(memory, said([first, user(str(number))]))
    assert len(memory) == PROMPTS_OF_A_BEGINNING_MAX, "the same again takes its own place"
    assert find(memory, said([first, user("0")])) is None
    assert find(memory, said([first, user(str(number))])) is not None


def test_what_is_too_large_is_not_kept() -> None:
    memory = Texts()
    remember(memory, said([user("w" * PROMPT_BYTES_MAX)]))
    remember(memory, said([user("w" * 99)], **{f"x{number}": 1 for number in range(99)}))
    assert len(memory) == 0


def test_memory_of_a_full_memory() -> None:
    tracemalloc.start()
    try:
        memory = Texts()
        for number in range(texts.PROMPTS_MAX + 100):
            key = memory.key(CHAT, said([user(f"{number} " * 30)]), None)
            assert key is not None
            blocks = [2**62 + number + block for block in range(PATH_BLOCKS_MAX)]
            memory.remember(key, 1000 + number, blocks[:4], [900, 700, 500, 300], blocks)
        gc.collect()
        assert len(memory) == texts.PROMPTS_MAX
        assert tracemalloc.get_traced_memory()[0] < 13 * 2**20
    finally:
        tracemalloc.stop()


def test_adversarial_bodies_cost_little() -> None:
    """A million messages, a million members, and many prompts that differ only in their middle."""
    memory = Texts()
    remember(memory, said([user("w" * 99)]))
    many = fields(b'{"messages":[{"role":"user","content":"%b"}%b]}' % (b"w" * 99, b",{}" * 1_000_000))
    members = fields(b"{%b}" % b",".join(b'"x%d":1,"messages":[]' % number for number in range(300_000)))
    end = "e" * 2000
    for number in range(PROMPTS_OF_A_BEGINNING_MAX):
        remember(memory, said([user("s" * 2000 + f"{number:09d}" + "m" * 2_000_000 + end)]))
    twin = said([user("s" * 2000 + "x" * 9 + "m" * 2_000_000 + end), user("")])
    for body in (many, members, twin):
        best = min(_seconds(memory, body) for _ in range(5))
        assert best < 0.01


def _seconds(memory: Texts, members: Fields) -> float:
    began = time.perf_counter()
    find(memory, members)
    return time.perf_counter() - began
