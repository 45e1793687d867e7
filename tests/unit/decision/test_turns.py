"""Turns of chats on a model of the engine's cache: what counts as cached is held, and little else is."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.decision.texts import PATH_BLOCKS_MAX
from sidecar.decision.turns import Known, Turn, Turns
from sidecar.exchange.apis import CHAT
from sidecar.exchange.splice import Fields, fields
from tests.unit.transport.test_prefix_index import BLOCK as SMALL
from tests.unit.transport.test_prefix_index import Pool
from transport.prefix_index import AllBlocksCleared, PrefixIndex

BLOCK = 4
assert BLOCK == SMALL
BYTES_PER_TOKEN = 1.0


Messages = list[dict[str, str]]


class Cache(Pool):
    """Frees a prompt from behind, as the engine does."""

    def prompt(self, ids: Sequence[int], lora: Any = None, salt: str | None = None) -> None:
        super().prompt(ids, lora, salt)
        for digest in reversed(self.chain(ids, lora, salt)):
            if digest in self.held:
                self.held.move_to_end(digest)


class Engine:
    """A model that takes a letter for a token, a template, and a cache; all its prompts are chats."""

    def __init__(self, blocks: int = 10_000, *, strips: bool = False, shuffles: bool = False) -> None:
        """`strips`: answers come back in another form than they were generated. `shuffles`: nothing of a prompt is
        where it was in the turn before."""
        self.index = PrefixIndex()
        self.pool = Cache(self.index, blocks)
        self.turns = Turns(self.index, self.first_held)
        self.strips = strips
        self.shuffles = shuffles
        self.pool.prompt([1] * BLOCK)  # tells how long a block is

    def first_held(self, blocks: Sequence[int]) -> int:
        return next((place for place, block in enumerate(blocks) if self.index.holds(block)), -1)

    def render(self, messages: Messages) -> list[int]:
        ids = [len(messages)] * BLOCK if self.shuffles else []
        for each in messages:
            is_answer = each["role"] == "assistant"
            ids += [8 if is_answer else 9]
            ids += [ord(letter) + 1000 * (is_answer and self.strips) for letter in each["content"]]
        return [*ids, *([7] * 3 if self.strips else [8])]

    def ask(
        self,
        messages: Messages,
        answer: str,
        *,
        remote: bool,
        counts: bool = False,
        stream: bool = True,
    ) -> tuple[Known | None, int]:
        """One turn from the question to the end of the answer: what was known, and what really was cached."""
        known, turn, cached = self.begin(messages, remote=remote)
        self.compute(messages, turn, answer, counts=counts, stream=stream)
        return known, cached

    def begin(self, messages: Messages, *, remote: bool) -> tuple[Known | None, Turn | None, int]:
        ids, members = self.render(messages), said(messages)
        known = self.turns.find(CHAT, members, None, BYTES_PER_TOKEN)
        cached = self.pool.cached_tokens(ids, None, None)
        turn = self.turns.begin(CHAT, members, known, json.dumps(ids).encode() if remote else b"", None, None)
        return known, turn, cached

    def compute(self, messages: Messages, turn: Turn | None, answer: str, *, counts: bool, stream: bool) -> None:
        ids = self.render(messages)
        self.pool.prompt(ids)
        if turn is not None and stream:
            turn.first_byte()
        step = max(3, len(answer) // 50)
        for start in range(0, len(answer), step):
            ids += map(ord, answer[start : start + step])
            self.pool.prompt(ids)
        if turn is not None:
            turn.ended(len(self.render(messages)) if counts else 0, ok=True)
            self.turns.close(turn)


def said(messages: Messages) -> Fields:
    return fields(json.dumps({"messages": messages}, separators=(",", ":")).encode())


def user(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


def assistant(words: str) -> dict[str, str]:
    return {"role": "assistant", "content": words}


def letters(count: int, draw: random.Random) -> str:
    return "".join(draw.choices("abcdefgh", k=count))


@pytest.mark.parametrize(("counts", "stream"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("strips", [False, True])
def test_after_one_remote_turn_all_that_follow_are_known(strips: bool, counts: bool, stream: bool) -> None:
    """Whether or not answers come back as they were generated; not more than is held, and little less."""
    draw = random.Random(3)
    engine = Engine(strips=strips)
    messages = [user(letters(400, draw))]
    answer = letters(60, draw)
    engine.ask(messages, answer, remote=True)
    for turn in range(12):
        messages += [assistant(answer), user(letters(30, draw))]
        answer = letters(60, draw)
        known, held = engine.ask(messages, answer, remote=False, counts=counts, stream=stream)
        assert known is not None
        assert known.cached <= held, turn
        assert known.cached - known.answer <= len(engine.render(messages[:-2])) + BLOCK, turn
        if turn:  # it is not yet known what becomes of answers
            assert known.cached >= held - (TEMPLATE_END + 3 * BLOCK), turn
        length = len(engine.render(messages))
        assert length - 3 * BLOCK < known.tokens < length + 200, "the rest is JSON's, which counts as text"


TEMPLATE_END = 16


def test_a_turn_that_went_remote_says_what_becomes_of_answers() -> None:
    for strips in (False, True):
        draw = random.Random(4)
        engine = Engine(strips=strips)
        messages = [user(letters(400, draw))]
        answer = letters(60, draw)
        for _ in range(2):
            engine.ask(messages, answer, remote=True)
            messages = [*messages, assistant(answer), user(letters(30, draw))]
        known, held = engine.ask(messages, "", remote=False)
        assert known is not None
        assert known.standing.answers is not strips
        assert held - 2 * BLOCK - TEMPLATE_END <= known.cached <= held


def test_an_answer_that_the_client_has_edited_does_not_count() -> None:
    draw = random.Random(5)
    engine = Engine()
    messages = [user(letters(400, draw))]
    answer = letters(200, draw)
    engine.ask(messages, answer, remote=True)
    engine.ask([*messages, assistant(answer), user("more")], "", remote=False)
    for edited in ("", "short", letters(600, draw)):
        known = engine.turns.find(CHAT, said([*messages, assistant(edited), user("again")]), None, BYTES_PER_TOKEN)
        assert known is not None
        assert known.cached <= 400 + BLOCK
    known = engine.turns.find(CHAT, said([*messages, user(letters(90, draw))]), None, BYTES_PER_TOKEN)
    assert known is not None
    assert known.cached <= 400 + BLOCK, "what is asked is no answer"


def test_a_template_that_moves_things_is_found_out() -> None:
    """Two turns of one conversation are mistaken, no more; then it is as if nothing was remembered."""
    draw = random.Random(6)
    engine = Engine(shuffles=True)
    mistaken = 0
    for _ in range(4):
        messages = [user(letters(400, draw))]
        engine.ask(messages, "", remote=True)
        for _ in range(4):
            messages += [assistant(letters(20, draw)), user(letters(30, draw))]
            known, held = engine.ask(messages, "", remote=False)
            mistaken += known is not None and known.cached > held
    assert mistaken == 2
    engine.shuffles = False  # the engine was started anew with another
    messages = [user(letters(400, draw))]
    engine.ask(messages, "", remote=True)
    messages += [user("x")]
    known, _ = engine.ask(messages, "", remote=True)
    assert known is not None
    assert not known.cached
    assert engine.turns.find(CHAT, said([*messages, user("y")]), None, 1.0).cached > 380  # type: ignore[union-attr]


def test_two_turns_that_go_on_from_one_at_once_teach_nothing() -> None:
    draw = random.Random(7)
    engine = Engine()
    first = [user(letters(400, draw))]
    engine.ask(first, "", remote=True)
    forks = [[*first, user(letters(80, draw))] for _ in range(2)]
    open_turns = [engine.begin(fork, remote=False)[1] for fork in forks]
    for fork in forks:
        engine.pool.prompt(engine.render(fork))
    for turn in open_turns:
        assert turn is not None
        turn.first_byte()
        turn.ended(0, ok=True)
        engine.turns.close(turn)
    for fork in forks:
        known, held = engine.ask([*fork, user("more")], "", remote=False)
        assert known is not None
        assert known.cached <= 400 + BLOCK <= held
        assert known.standing.is_trusted


def test_of_two_turns_at_once_none_takes_the_others_blocks() -> None:
    """One is asked again, so the engine has all of it; what is stored meanwhile is the other's."""
    draw = random.Random(11)
    engine = Engine()
    first = [user(letters(400, draw))]
    engine.ask(first, "", remote=True)
    again, other = [[*first, user(letters(80, draw))] for _ in range(2)]
    engine.pool.prompt(engine.render(again))
    turn = engine.begin(again, remote=False)[1]
    engine.begin(other, remote=False)
    engine.pool.prompt(engine.render(other))
    assert turn is not None
    turn.first_byte()
    turn.ended(len(engine.render(again)), ok=True)
    engine.turns.close(turn)
    engine.pool.held.clear()  # all of it is evicted, and of both turns the other alone is computed anew
    engine.index.apply(AllBlocksCleared())
    engine.pool.prompt(engine.render(other))
    known = engine.turns.find(CHAT, said([*again, user("more")]), None, BYTES_PER_TOKEN)
    assert known is not None
    assert known.cached <= 400


def test_turns_of_other_conversations_go_on_at_once() -> None:
    """Also where they begin with the same words."""
    draw = random.Random(12)
    engine = Engine()
    chats = [[user("hello" * 20), user(letters(400, draw))] for _ in range(3)]
    for messages in chats:
        engine.ask(messages, "", remote=True)
    for messages in chats:
        messages.append(user(letters(200, draw)))
    turns = [engine.begin(messages, remote=False)[1] for messages in chats]
    for messages, turn in zip(chats, turns, strict=True):
        engine.compute(messages, turn, "", counts=True, stream=False)
    for messages in chats:
        known = engine.turns.find(CHAT, said([*messages, user("more")]), None, BYTES_PER_TOKEN)
        assert known is not None
        assert known.cached > 650


def test_an_answer_that_is_too_long_to_be_followed_is_no_mistake() -> None:
    """What comes back of it lies behind what is known: it does not count, and nothing is concluded from it."""
    draw = random.Random(10)
    engine = Engine()
    for conversation in range(3):
        messages = [user(letters(200, draw))]
        answer = letters((PATH_BLOCKS_MAX + 30) * BLOCK, draw)
        engine.ask(messages, answer, remote=True)
        messages += [assistant(answer), user(letters(60, draw))]
        known, held = engine.ask(messages, "", remote=False)
        assert known is not None
        assert 180 <= known.cached <= 204 < held, conversation
        assert known.standing.is_trusted
    assert sum(map(len, engine.index._follows.values())) == 0


def test_a_cache_that_is_cleared_holds_nothing() -> None:
    draw = random.Random(8)
    engine = Engine()
    messages = [user(letters(400, draw))]
    engine.ask(messages, letters(40, draw), remote=True)
    _, turn, _ = engine.begin([*messages, user("more")], remote=False)
    engine.index.apply(AllBlocksCleared())
    engine.pool.held.clear()
    assert turn is not None
    turn.first_byte()
    turn.ended(0, ok=True)
    engine.turns.close(turn)
    known = engine.turns.find(CHAT, said([*messages, user("more")]), None, BYTES_PER_TOKEN)
    assert known is not None
    assert known.cached == 0


def test_nothing_is_left_of_turns_that_are_over() -> None:
    draw = random.Random(9)
    engine = Engine()
    for _ in range(5):
        messages = [user(letters(400, draw))]
        for number in range(4):
            engine.ask(messages, letters(20, draw), remote=number == 0)
            messages = [*messages, user(letters(30, draw))]
    assert not engine.turns._open
    assert not engine.turns._late
    assert not engine.index._follows


turns_of = st.lists(
    st.tuples(
        st.integers(0, 3),  # the conversation
        st.integers(0, 60),  # how much is asked
        st.integers(0, 40),  # and answered
        st.booleans(),  # remote
        st.sampled_from(["goes on", "forks", "is left"]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(turns_of, st.integers(60, 400), st.booleans())
def test_never_more_than_is_held(history: list[Any], blocks: int, strips: bool) -> None:
    """Whatever the engine evicts in between, and however conversations fork."""
    draw = random.Random(1)
    engine = Engine(blocks, strips=strips)
    chats: dict[int, Messages] = {}
    for conversation, asked, answered, remote, then in history:
        messages = chats.setdefault(conversation, [user(letters(50 + conversation, draw))])
        answer = letters(answered, draw)
        known, held = engine.ask(messages, answer, remote=remote)
        if known is not None:
            assert known.cached <= held
        if then == "is left":
            del chats[conversation]
        elif then == "goes on":
            chats[conversation] = [*messages, assistant(answer), user(letters(asked, draw))]
        else:
            chats[conversation] = [*messages[:-1], user(letters(asked, draw))]
