"""Turns of chats: how far one begins with a prompt that the engine holds, and what it teaches about the next. Pure.

A turn that went remote tells its token ids. Of one that was computed here only the blocks are seen that the engine
stores behind those that it began with; they tell as well whether text that is the same had the same tokens, which
templates decide. Knows blocks by the index's names.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from sidecar.decision.texts import PATH_BLOCKS_MAX, Key, Standing, Text, Texts, last_place, quarters
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import Fields
from transport.prefix_index import PrefixIndex

LATE_S = 0.5
"""The events of an answer's last blocks may come behind it."""
_EARLY_TOKENS = 16
"""Of an answer, that the engine may have generated when its first byte is here."""
_MARKS = 4
_REST_BYTES_MAX = 32768
"""Of what follows a remembered prompt, to look for the answer in it."""
_ANSWER_RATIO = 2.0
"""An answer whose text is so many times longer or shorter than its tokens were has been edited."""

_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Known(NamedTuple):
    """What is known of a prompt that begins with a remembered one."""

    tokens: int
    """Of all of it: what was counted, and an estimate of what has been added."""
    cached: int
    """Of which the engine holds the KV now."""
    text: Text
    """What it begins with."""
    standing: Standing
    is_whole: bool
    """Every known block of the remembered prompt is held."""
    answer: int = 0
    """How many of `cached` are the engine's own answer to it: taken for what the client sends back if answers were
    before, and if its length fits."""


class Turn:
    """One turn that decode is computing or answering."""

    __slots__ = (
        "_at_first_byte",
        "_counted",
        "_follow",
        "_is_judged",
        "_known",
        "_ok",
        "_settled",
        "_text",
        "_turns",
        "is_shared",
        "key",
        "start",
    )

    def __init__(self, turns: "Turns", key: Key, known: Known | None, text: Text | None) -> None:
        """`text`: of a turn whose ids were told. Else `known` tells what it begins with."""
        self._turns = turns
        self.key = key
        self._known = known
        self._text = text
        self._at_first_byte = 0
        self._counted = 0
        self._ok = False
        self._settled = -1
        self.is_shared = False
        """Another went on from the same at the same time, so that nobody can tell whose blocks are whose."""
        self._is_judged = text is not None
        start = known.text if known is not None and text is None else text
        assert start is not None
        self.start = start.path
        """The blocks behind which it is followed."""
        self._follow = turns.index.follow(start.path)
        if text is not None:
            self._follow.room = PATH_BLOCKS_MAX  # all that comes is its answer

    def first_byte(self) -> None:
        """Of a stream: what is stored by now is the prompt."""
        if self._text is None and self._known is not None and self._follow.attached >= 0:
            self._at_first_byte = self._known.text.places[0] + self._follow.attached + len(self._follow.path)
            self._follow.room = len(self._follow.path) + PATH_BLOCKS_MAX

    def ended(self, prompt_tokens: int, *, ok: bool) -> None:
        """The answer has ended. `prompt_tokens`: as it counts them, 0 if it does not."""
        self._ok = ok
        self._counted = prompt_tokens
        self.settle()
        self._turns.ended(self)

    def close(self, *, in_time: bool) -> None:
        """Whatever comes now is another's. `in_time`: its own must have come by now."""
        self.settle()
        self._turns.index.unfollow(self._follow)
        known = self._known
        if not in_time or self._is_judged or not self._ok or self._follow.lost:
            return
        if known is None or not known.is_whole or known.text.is_forked:
            return
        # Nothing was stored behind what it should have begun with, though more than that was needed.
        begun = known.text.places[0] + len(self.start) - 1
        if known.tokens >= (begun + 2) * self._turns.index.block_size and self._follow.attached < 0:
            known.standing.saw(same=False)

    def settle(self) -> None:
        """Learn from what has been stored so far."""
        follow = self._follow
        if self.is_shared and self._known is not None:
            self._known.text.is_forked = True
        if follow.lost or follow.attached < 0 or self.is_shared:
            return
        if (stored := len(follow.path) + follow.branches) == self._settled:
            return
        self._settled = stored
        if self._text is not None:
            if follow.attached == len(self.start) - 1:  # behind the prompt, not from within it
                path = self.start + follow.path
                self._text.path = path[:PATH_BLOCKS_MAX]
                self._text.is_forked |= len(path) >= PATH_BLOCKS_MAX
        elif self._known is not None:
            self._learn_from_blocks(self._known)

    def _learn_from_blocks(self, known: Known) -> None:
        """Of a turn that was computed here: its blocks are those that it began with and what came behind them."""
        text, follow, size = known.text, self._follow, self._turns.index.block_size
        first, prompt_end = text.places[0], text.tokens // size
        begun, before = first + follow.attached, first + len(self.start) - 1
        if not self._is_judged:
            self._is_judged = True
            known.standing.saw(same=True)
            if before > prompt_end:
                known.standing.answers = begun >= before
        if self._counted:
            tokens = least = self._counted
        elif self._at_first_byte:
            seen = self._at_first_byte * size
            tokens = min(max(known.tokens, seen), seen + size - 1)
            least = max(min(known.tokens, tokens), seen - _EARLY_TOKENS)
        else:
            tokens = known.tokens
            least = tokens - (tokens - text.tokens) // 2 - _EARLY_TOKENS  # what is new has been estimated
        path = [*self.start[: follow.attached + 1], *follow.path]
        place = min(max(last_place(least, size), first), first + len(path) - 1)
        others = slice(1 if len(text.blocks) == _MARKS else 0, _MARKS)
        self._turns.texts.remember(
            self.key,
            tokens,
            (path[place - first], *text.blocks[others]),
            (place, *text.places[others]),
            path[place - first :],
        )


class Turns:
    """The turns of one engine (one rank)."""

    def __init__(self, index: PrefixIndex, first_held: Callable[[Sequence[int]], int]) -> None:
        """`first_held`: which of these blocks is the first that the engine holds, -1 for none."""
        self.index = index
        self.texts = Texts()
        self._first_held = first_held
        self._open: dict[int, list[Turn]] = {}
        """Turns that are being answered, by how their conversations begin."""
        self._late: dict[int, list[Turn]] = {}
        """Those that have just been."""

    def find(self, api: Api, members: Fields, lora_name: str | None, bytes_per_token: float) -> Known | None:
        """None for a prompt that begins with none that is remembered."""
        if not len(self.texts):
            return None
        where = self.texts.where(api, members, self.index.lora_id(lora_name))
        if where is None:
            return None
        if late := self._late.get(where.beginning):
            self._first_held(())  # follows what has arrived
            for turn in late:
                turn.settle()
        found = self.texts.find(where, api, members)
        if found is None:
            return None
        text, standing = found
        place = self._first_held(text.blocks) if standing.is_trusted else -1
        cached = text.places[place] * self.index.block_size if place >= 0 else 0
        rest = memoryview(members[api.prompt[0]])[text.size_bytes :]
        tokens, rest_bytes, is_whole = text.tokens, len(rest), place == 0
        if (
            is_whole
            and standing.answers
            and not text.is_forked
            and (answer := self._answer(text, rest, bytes_per_token))
        ):
            tokens = (text.places[0] + len(text.path) - 1) * self.index.block_size
            cached, rest_bytes = tokens, rest_bytes - answer
        answer_tokens = tokens - text.tokens
        return Known(tokens + int(rest_bytes / bytes_per_token), cached, text, standing, is_whole, answer_tokens)

    def _answer(self, text: Text, rest: memoryview, bytes_per_token: float) -> int:
        """How many of the bytes that follow a remembered prompt are the engine's own answer to it, whose blocks it
        holds; 0 if that is not known."""
        size = self.index.block_size
        tokens = (text.places[0] + len(text.path) - 1) * size - text.tokens
        if tokens < size or len(rest) > _REST_BYTES_MAX or self._first_held(text.path[-1:]) < 0:
            return 0
        begin = bytes(rest).find(b",")
        try:
            items = _decode_items(b"[" + bytes(rest[begin + 1 :])) if begin >= 0 else []
        except msgspec.MsgspecError:
            return 0
        if len(items) < 2:  # the last message is no answer, but what is asked
            return 0
        answer = len(memoryview(items[0]))
        ratio = answer / bytes_per_token / tokens
        return answer if 1 / _ANSWER_RATIO < ratio < _ANSWER_RATIO else 0

    def begin(
        self,
        api: Api,
        members: Fields,
        known: Known | None,
        token_ids: bytes,
        lora_name: str | None,
        cache_salt: str | None,
    ) -> Turn | None:
        """Decode is asked. `token_ids`: the prompt's as a JSON array, b"" if they were not told: a millisecond for
        32,000. None if nothing is to be learnt of it."""
        if not token_ids and known is None:
            return None
        key = self.texts.key(api, members, self.index.lora_id(lora_name))
        if key is None:
            return None
        for late in tuple(self._late.get(key.where.beginning, ())):
            self._close(late, in_time=False)
        text = None
        if token_ids:
            ids = _decode_ids(token_ids)
            chain = self.index.chain(ids, lora_name=lora_name, cache_salt=cache_salt)
            if known is not None:
                self._judge(known, chain)
            text = self._remember(key, len(ids), chain)
            if text is None:
                return None
        turn = Turn(self, key, known, text)
        open_now = self._open.setdefault(key.where.beginning, [])
        for one in open_now:
            if one.start[0] == turn.start[0]:
                one.is_shared = turn.is_shared = True
        open_now.append(turn)
        return turn

    def _remember(self, key: Key, tokens: int, chain: Sequence[int]) -> Text | None:
        size = self.index.block_size
        places = quarters(min(last_place(tokens, size), len(chain))) if size else []
        if not places:
            return None
        return self.texts.remember(
            key, tokens, [chain[place - 1] for place in places], places, chain[places[0] - 1 :]
        )

    def _judge(self, known: Known, chain: Sequence[int]) -> None:
        """Whether a prompt had the blocks that it was thought to begin with."""
        text = known.text
        first = text.places[0]
        same = len(chain) >= first and chain[first - 1] == text.blocks[0]
        known.standing.saw(same=same)
        last = first + len(text.path) - 1
        if same and last > text.tokens // self.index.block_size:
            known.standing.answers = len(chain) >= last and chain[last - 1] == text.path[-1]

    def ended(self, turn: Turn) -> None:
        _take(self._open, turn)
        self._late.setdefault(turn.key.where.beginning, []).append(turn)

    def close(self, turn: Turn) -> None:
        """`LATE_S` after its answer has ended."""
        if turn in self._late.get(turn.key.where.beginning, ()):  # else another goes on from it
            self._close(turn, in_time=True)

    def _close(self, turn: Turn, *, in_time: bool) -> None:
        _take(self._late, turn)
        turn.close(in_time=in_time)


def _take(turns: dict[int, list[Turn]], turn: Turn) -> None:
    of_beginning = turns[turn.key.where.beginning]
    of_beginning.remove(turn)
    if not of_beginning:
        del turns[turn.key.where.beginning]
