"""The decision rules of one rank of the local engine: what they know beyond the request, and what they learn.

Counts what is on its way, keeps the fits, and asks the prefix index. Holds no request and does no I/O.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from sidecar.decision.cost import Costs, Inputs, Verdict
from sidecar.decision.shape import BYTES_PER_TOKEN
from sidecar.decision.signals import Signals
from sidecar.decision.turns import Known, Turn, Turns
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import Fields
from sidecar.prefill.served import Told
from transport.prefix_index import PrefixIndex

BYTES_PER_TOKEN_BOUNDS = (1.0, 16.0)
"""Outside of these a prompt is not mainly text (a data URL, say) and teaches nothing about text."""
SMOOTHING = 0.05
FIRST_IDS = 257
"""More than the largest block: with less, no block could be found."""

_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_text = msgspec.json.Decoder(str).decode


class PrefixLookup(Protocol):
    """`transport.kv_events.KvEvents`."""

    @property
    def index(self) -> PrefixIndex: ...

    def cached_tokens(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> int | None: ...

    def first_held(self, blocks: Sequence[int]) -> int: ...


class _Keys(NamedTuple):
    """What else than its tokens tells a prompt's blocks from another's."""

    lora_name: str | None
    cache_salt: str | None


class Rules:
    """`min_remote_tokens`: prompts with fewer uncached tokens stay local. `costs` None: the static rule only."""

    def __init__(
        self,
        min_remote_tokens: int,
        now: Callable[[], float],
        *,
        costs: Costs | None = None,
        index: PrefixLookup | None = None,
        running_now: Callable[[], int] = lambda: 0,
        remote_media: bool = False,
    ) -> None:
        """`running_now`: this sidecar's open decode legs. `remote_media`: prompts with media behind URLs may be
        split."""
        self.min_remote_tokens = min_remote_tokens
        self.remote_media = remote_media
        self.signals = Signals()
        self.models = Told()
        """Of the local engine."""
        self.costs = costs
        self.index = index
        self._turns = Turns(index.index, index.first_held) if index is not None else None
        self.local_ahead = 0
        """Prompt tokens sent to the decode engine without a handoff, of requests without a first byte."""
        self._now = now
        self._running_now = running_now
        self._bytes_per_token: dict[str, float] = {}

    # -- asked by the guards --

    def bytes_per_token(self, api: Api) -> float:
        """Of this API's prompts, learnt from those that the prefill engines counted."""
        return self._bytes_per_token.get(api.name, BYTES_PER_TOKEN)

    def cached_tokens(self, api: Api, members: Fields) -> int:
        """Prompt tokens of which the decode engine holds the KV, exactly, for a prompt of token ids; 0 if nothing
        is known. A few microseconds for a prompt that it does not know, about one for each block that it holds."""
        keys = self._keys(members)
        if self.index is None or keys is None:
            return 0
        prompt = bytes(members[api.prompt[0]])
        try:
            beginning = _decode_ids(_first(prompt, FIRST_IDS))
            if not self.index.cached_tokens(beginning, lora_name=keys.lora_name, cache_salt=keys.cache_salt):
                return 0  # most prompts are new: not worth reading to their end
            ids = _decode_ids(prompt)
        except msgspec.MsgspecError:
            return 0  # the engine refuses it
        return self.index.cached_tokens(ids, lora_name=keys.lora_name, cache_salt=keys.cache_salt) or 0

    def known(self, api: Api, members: Fields) -> Known | None:
        """What is known of a prompt of text that begins with an earlier one; None if it begins with none."""
        if self._turns is None or (keys := self._keys(members)) is None:
            return None
        return self._turns.find(api, members, keys.lora_name, self.bytes_per_token(api))

    def _keys(self, members: Fields) -> _Keys | None:
        """None where the engine will refuse them, and while nobody has told what the base model is called."""
        try:
            salt, model = _text(members.get("cache_salt")), _text(members.get("model"))
        except msgspec.MsgspecError:
            return None
        is_base = model is None or model in self.signals.model_names
        if not is_base and not self.signals.model_names:
            return None
        return _Keys(None if is_base else model, salt)

    def weigh(self, tokens: int, cached: int, prefill_ahead: int) -> tuple[Inputs, Verdict]:
        """The rule for a prompt that no guard has kept here."""
        load = self.signals.fresh(self._now())
        streams = self.signals.streams(self._running_now())
        inputs = Inputs(
            tokens,
            cached,
            streams,
            load.waiting if load is not None else 0,
            self.local_ahead,
            prefill_ahead,
            round(self.signals.allowance.used(streams), 3),
        )
        if self.costs is None or load is None:
            return inputs, Verdict(remote=True, reason="long", static="off" if self.costs is None else "stale")
        verdict = self.costs.weigh(inputs)
        if not verdict.remote:
            self.signals.allowance.take(inputs.streams)
        return inputs, verdict

    # -- told by requests --

    def learn_length(self, api: Api, prompt_bytes: int, tokens: int) -> None:
        """A prompt of so many bytes had so many tokens."""
        if not tokens:
            return
        ratio = prompt_bytes / tokens
        low, high = BYTES_PER_TOKEN_BOUNDS
        if low <= ratio <= high:
            known = self._bytes_per_token.get(api.name, BYTES_PER_TOKEN)
            self._bytes_per_token[api.name] = known + SMOOTHING * (ratio - known)

    def begin_turn(self, api: Api, members: Fields, known: Known | None, token_ids: bytes) -> Turn | None:
        """A chat is sent to the decode engine. `token_ids`: a JSON array, b"" if prefill has not told them. A
        millisecond for 32,000: not between a request and its decision. None if nothing is to be learnt of it."""
        if self._turns is None or (keys := self._keys(members)) is None:
            return None
        return self._turns.begin(api, members, known, token_ids, keys.lora_name, keys.cache_salt)

    def close_turn(self, turn: Turn) -> None:
        """`LATE_S` after its answer has ended."""
        if self._turns is not None:
            self._turns.close(turn)

    def began_here(self, tokens: int) -> int:
        """A prompt is sent to the decode engine to be computed; returns the tokens that it finds before it."""
        ahead = self.local_ahead
        self.local_ahead += tokens
        return ahead

    def ended_here(self, tokens: int) -> None:
        """It has its first byte, or none will come."""
        self.local_ahead -= tokens


def _first(array: bytes, count: int) -> bytes:
    """The first items of a flat JSON array, as one."""
    end = 0
    for _ in range(count):
        end = array.find(b",", end) + 1
        if not end:
            return array
    return array[: end - 1] + b"]"


def _text(raw: msgspec.Raw | None) -> str | None:
    """A member's value, None if it is absent or null. Raises `msgspec.MsgspecError` if it is no string."""
    return None if raw is None or bytes(raw) == b"null" else _decode_text(raw)
