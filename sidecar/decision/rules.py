"""The decision rules of one rank of the local engine: what they know beyond the request, and what they learn.

Counts what is on its way, keeps the fits, and asks the prefix index. Holds no request and does no I/O.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sidecar.decision.cost import Costs, Inputs, Verdict
from sidecar.decision.shape import BYTES_PER_TOKEN
from sidecar.decision.signals import Signals
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import Fields

BYTES_PER_TOKEN_BOUNDS = (1.0, 16.0)
"""Outside of these a prompt is not mainly text (a data URL, say) and teaches nothing about text."""
SMOOTHING = 0.05
FIRST_IDS = 257
"""More than the largest block: with less, no block could be found."""

_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_text = msgspec.json.Decoder(str).decode


class PrefixLookup(Protocol):
    """`transport.kv_events.KvEvents`."""

    def cached_tokens(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> int | None: ...


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
        self.costs = costs
        self.index = index
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
        if self.index is None:
            return 0
        prompt = bytes(members[api.prompt[0]])
        try:
            beginning = _decode_ids(_first(prompt, FIRST_IDS))
            salt = _text(members.get("cache_salt"))
            model = _text(members.get("model"))
        except msgspec.MsgspecError:
            return 0  # the engine refuses it
        is_base = model is None or model in self.signals.model_names
        if not is_base and not self.signals.model_names:
            return 0  # nobody has told yet what the base model is called
        lora_name = None if is_base else model
        if not self.index.cached_tokens(beginning, lora_name=lora_name, cache_salt=salt):
            return 0  # most prompts are new: not worth reading to their end
        try:
            ids = _decode_ids(prompt)
        except msgspec.MsgspecError:
            return 0
        return self.index.cached_tokens(ids, lora_name=lora_name, cache_salt=salt) or 0

    def weigh(self, tokens: int, cached: int, prefill_ahead: int) -> tuple[Inputs, Verdict]:
        """The rule for a prompt that no guard has kept here."""
        load = self.signals.fresh(self._now())
        inputs = Inputs(
            tokens,
            cached,
            self.signals.streams(self._running_now()),
            load.waiting if load is not None else 0,
            self.local_ahead,
            prefill_ahead,
        )
        if self.costs is None or load is None:
            return inputs, Verdict(remote=True, reason="long", static="off" if self.costs is None else "stale")
        return inputs, self.costs.weigh(inputs)

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
