"""What other routers would decide: their published rules, with the knowledge of the cache that they have. No I/O.

Each stands in the place of its router: it sees every request of a sample from the beginning, chooses, and the
sidecar (`--disagg on`) only moves what is to be moved. Written from public sources, which are named; the words
and the code are ours.

Dynamo (`lib/kv-router`; documentation 1.6.2, advanced-customizations/conditional-disaggregation): local if the
tokens that the decode worker does not hold are fewer than `eff_isl_threshold` (2048) and less than
`eff_isl_ratio_threshold` (0.7) of the prompt (`isl_bounding`, its default policy); with `isl_or_load` also if the
prefill worker's active prefill tokens exceed `prefill_busy_threshold` times its `max_num_batched_tokens`. What the
decode worker holds comes from its KV events, which the feature requires: exact, generated tokens included.

llm-d (llm-d/llm-d-router, `prefix-based-pd-decider` of the EPP): remote if prompt tokens less cached blocks times
their size are at least `nonCachedTokens` (16 in its deployment files; 0, the default in code, turns remote prefill
off). What the decode pod holds comes from `approx-prefix-cache-producer`: blocks of the prompts that were sent
there, of the engine's block size, at most 256 of a prompt, 31,250 in all, least recently used ones first out. What
the engine generates is not in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from e2e.latency.driver import Leg
from e2e.latency.measure import BLOCK_SIZE, MAX_BATCHED_TOKENS

TARGET_HEADER = "x-prefiller-host-port"
DYNAMO_LEAST_TOKENS, DYNAMO_RATIO = 2048, 0.7
LLM_D_LEAST_TOKENS = 16
_LLM_D_PROMPT_BLOCKS, _LLM_D_BLOCKS = 256, 31_250


def blocks(ids: Sequence[int], size: int = BLOCK_SIZE) -> Iterator[int]:
    """A key for each whole block, which stands for all tokens up to its end."""
    key = 0
    for at in range(0, len(ids) // size * size, size):
        key = hash((key, tuple(ids[at : at + size])))
        yield key


@dataclass(frozen=True)
class Seen:
    """What a rule sees of one request."""

    tokens: int
    cached: int
    prefill_tokens: int
    """Prompt tokens of requests on their way at the prefill engine."""

    @property
    def new(self) -> int:
        return self.tokens - min(self.cached, self.tokens)


class Router:
    """Chooses by `is_remote`. `exact`: the decode engine tells what it holds; else it is what was sent there."""

    def __init__(self, is_remote: Callable[[Seen], bool], prefill: str, decode_url: str, *, exact: bool) -> None:
        self._is_remote = is_remote
        self._remote = Leg(headers=((TARGET_HEADER, prefill),))
        self._local = Leg(base_url=decode_url, decision="local; reason=rule")
        self._is_exact = exact
        self._held: OrderedDict[int, None] = OrderedDict()
        self._prefill_tokens = 0

    def begin(self, prompt: Sequence[int]) -> Leg:
        keys = list(blocks(prompt))
        if not self._is_exact:
            keys = keys[:_LLM_D_PROMPT_BLOCKS]
        held = 0
        for key in keys:
            if key not in self._held:
                break
            held += 1
        seen = Seen(len(prompt), held * BLOCK_SIZE, self._prefill_tokens)
        if not self._is_exact:
            self._hold(keys)
        if not self._is_remote(seen):
            return self._local
        self._prefill_tokens += len(prompt)
        return self._remote

    def first_token(self, prompt: Sequence[int], leg: Leg) -> None:
        if leg is self._remote:
            self._prefill_tokens -= len(prompt)

    def end(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if self._is_exact:
            # The KV of the last token is never computed.
            self._hold(blocks([*prompt, *answer[:-1]]))

    def _hold(self, keys: Sequence[int] | Iterator[int]) -> None:
        for key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
        while not self._is_exact and len(self._held) > _LLM_D_BLOCKS:
            self._held.popitem(last=False)


def dynamo(least_tokens: int = DYNAMO_LEAST_TOKENS, busy: float | None = None) -> Callable[[str, str], Router]:
    """`busy`: the policy is `isl_or_load` with this `prefill_busy_threshold`, else `isl_bounding`."""

    def is_remote(seen: Seen) -> bool:
        if busy is not None and seen.prefill_tokens > busy * MAX_BATCHED_TOKENS:
            return False
        return not (seen.new < least_tokens and seen.new / max(seen.tokens, 1) < DYNAMO_RATIO)

    return lambda prefill, decode_url: Router(is_remote, prefill, decode_url, exact=True)


def llm_d(least_tokens: int = LLM_D_LEAST_TOKENS) -> Callable[[str, str], Router]:
    return lambda prefill, decode_url: Router(
        lambda seen: seen.new >= least_tokens, prefill, decode_url, exact=False
    )
