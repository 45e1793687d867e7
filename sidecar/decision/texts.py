"""Prompts of text whose blocks are known, so that a later prompt that begins with one is known as far. Pure.

What is kept of a prompt is a keyed hash of its bytes, how many tokens it had, and the names of some of its blocks;
no text, no ids. Whether the engine holds such a block is another's business, and so is where the names come from.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidecar.decision.shape import conversation
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import Fields

PROMPTS_MAX = 4096
"""4 to 12 MB. An engine with room for a million tokens holds as many prompts of 256."""
FRAMES_MAX = 1024
PATH_BLOCKS_MAX = 256
"""Of an answer that are kept."""
MISSES_MAX = 2
"""So often in a row a prompt may not begin with the tokens of one that its text begins with."""
PROMPTS_OF_A_BEGINNING_MAX = 64
"""Turns and forks of one conversation; those that were of use last are kept."""
PROMPT_BYTES_MAX = 4 * 2**20
"""Of a prompt that is remembered; a million tokens of text."""
MEMBERS_MAX = 64
"""Of a body; the APIs have that many fields, and a body may have a million."""
FULL_LOOKS = 2
"""Prompts that are hashed for one request: only one whose end is at its place gets there, so the first is right."""
TEMPLATE_END_TOKENS = 16
"""What a template puts behind the last message (who speaks next, an empty thought) need not be there in the next
turn's prompt, and the last token of a text may become another when more follows."""

_END_BYTES = 64
_NEXT_ITEM = re.compile(rb"[ \t\r\n]*[,\]]")

SHAPES_NO_PROMPT = frozenset(
    {
        # How the answer is sampled, how long it gets, what of it is sent (vLLM 0.32 chat_completion/protocol.py).
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias", "bad_words", "allowed_token_ids"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "repetition_detection"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "watermarking"),
        *("stream", "stream_options", "stream_interval", "logprobs", "top_logprobs", "logprob_token_ids"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
        *("priority", "request_id", "session_id", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    }
)
"""Members that a client may change between turns without the engine's prompt being another. Every other member
counts: of one that is not known here nobody can say what a template makes of it."""


class Text(msgspec.Struct, gc=False):
    """One prompt."""

    size_bytes: int
    """Of its messages, as JSON, up to behind the last one."""
    end: int
    """Hash of their last bytes."""
    whole: int
    """Hash of all of them, and of every other member that shapes a prompt."""
    tokens: int
    blocks: tuple[int, ...]
    """The last block that is the same in a longer prompt, then others towards the beginning."""
    places: tuple[int, ...]
    """How many blocks the prompt has up to each, itself included."""
    path: "array[int]"
    """Consecutive blocks from `blocks[0]` on, into the answer as far as that is known."""
    is_forked: bool = False
    """Blocks may follow these that nobody has told of."""


class Where(NamedTuple):
    """Among what a prompt is looked for."""

    frame: int
    """Hash of all that shapes it besides the messages."""
    beginning: int
    """The same with what a conversation's turns have in common from the first one on."""


class Key(NamedTuple):
    """What a prompt is remembered under."""

    where: Where
    size_bytes: int
    end: int
    whole: int


class Standing(msgspec.Struct, gc=False):
    """What prompts of one frame have shown: templates differ in what they make of the same messages later."""

    misses: int = 0
    """In a row: the tokens were others, though the text was the same."""
    answers: bool = False
    """The last answer that came back among the messages was found to be the tokens that had been generated."""

    @property
    def is_trusted(self) -> bool:
        return self.misses < MISSES_MAX

    def saw(self, same: bool) -> None:
        """A prompt had the tokens of the one that its text began with, or others."""
        self.misses = 0 if same else self.misses + 1


class Texts:
    """A bounded memory of prompts, the ones that were of no use for longest forgotten first."""

    def __init__(self) -> None:
        self._of_beginning: OrderedDict[int, list[Text]] = OrderedDict()
        """By what conversations have in common from their first turn on; in a list the longest use is behind."""
        self._standings: OrderedDict[int, Standing] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def where(self, api: Api, members: Fields, adapter: int | None) -> Where | None:
        """Among what a prompt is to be looked for; None if it has too many members. `adapter`: the LoRA adapter's
        number, None for none."""
        frame = _frame(api, members, adapter)
        return Where(frame, hash((frame, conversation(api, members)))) if frame is not None else None

    def find(self, where: Where, api: Api, members: Fields) -> tuple[Text, Standing] | None:
        """The longest prompt that this one begins with: the same messages, byte for byte, and perhaps more behind
        them; every other member that shapes a prompt the same. Costs what hashing the prompt once does, and next to
        nothing where none begins alike."""
        frame, beginning = where
        known = self._of_beginning.get(beginning)
        if known is None:
            return None
        prompt = memoryview(members[api.prompt[0]])
        looks = FULL_LOOKS
        for text in sorted(known, key=_size_bytes, reverse=True):
            size = text.size_bytes
            if size >= len(prompt) or hash(bytes(prompt[max(size - _END_BYTES, 0) : size])) != text.end:
                continue
            if not _NEXT_ITEM.match(prompt, size):
                continue
            if not looks:
                break
            looks -= 1
            if hash((frame, bytes(prompt[:size]))) == text.whole:
                known.remove(text)
                known.append(text)
                self._of_beginning.move_to_end(beginning)
                return text, self.standing(frame)
        return None

    def key(self, api: Api, members: Fields, adapter: int | None) -> Key | None:
        """What this prompt is remembered under; None if it is too much, or no list of messages."""
        prompt = bytes(memoryview(members[api.prompt[0]])[: PROMPT_BYTES_MAX + 1])
        if not prompt.endswith(b"]") or len(prompt) > PROMPT_BYTES_MAX:
            return None
        where = self.where(api, members, adapter)
        if where is None:
            return None
        messages = prompt[:-1].rstrip(b" \t\r\n")
        return Key(where, len(messages), hash(messages[-_END_BYTES:]), hash((where.frame, messages)))

    def standing(self, frame: int) -> Standing:
        standing = self._standings.get(frame)
        if standing is None:
            standing = self._standings[frame] = Standing()
        self._standings.move_to_end(frame)
        if len(self._standings) > FRAMES_MAX:
            self._standings.popitem(last=False)
        return standing

    def remember(
        self, key: Key, tokens: int, blocks: Sequence[int], places: Sequence[int], path: Sequence[int]
    ) -> Text:
        """A prompt had so many tokens; see `Text` for its blocks."""
        kept = array("Q", path[:PATH_BLOCKS_MAX])
        is_cut = len(path) >= PATH_BLOCKS_MAX
        text = Text(key.size_bytes, key.end, key.whole, tokens, tuple(blocks), tuple(places), kept, is_cut)
        known = self._of_beginning.setdefault(key.where.beginning, [])
        before = len(known)
        known[:] = [one for one in known if one.whole != text.whole or one.size_bytes != text.size_bytes]
        known.append(text)
        del known[:-PROMPTS_OF_A_BEGINNING_MAX]
        self._count += len(known) - before
        self._of_beginning.move_to_end(key.where.beginning)
        while self._count > PROMPTS_MAX:
            _, gone = self._of_beginning.popitem(last=False)
            self._count -= len(gone)
        return text


def _size_bytes(text: Text) -> int:
    return text.size_bytes


def last_place(tokens: int, block_size: int) -> int:
    """How many whole blocks of a prompt of so many tokens are the same in a longer one."""
    return max(tokens - TEMPLATE_END_TOKENS, 0) // block_size


def quarters(blocks: int) -> list[int]:
    """Of so many blocks the last one, and those at three, two and one quarter: what is left of a prompt that the
    engine is about to forget from its end."""
    return sorted({blocks * quarter // 4 for quarter in (4, 3, 2, 1)} - {0}, reverse=True)


def _frame(api: Api, members: Fields, adapter: int | None) -> int | None:
    """All that shapes the prompt besides the messages, under this process's secret key; None if it is too much."""
    if len(members) > MEMBERS_MAX:
        return None
    frame = hash((api.name, adapter))
    for name in sorted(members):
        if name not in SHAPES_NO_PROMPT and name != api.prompt[0]:
            frame = hash((frame, name, bytes(members[name])))
    return frame
