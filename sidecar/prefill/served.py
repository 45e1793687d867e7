"""Which models and LoRA adapters an engine serves, and who may prefill a request that names one of them.

Pure. It knows what engines have told, not how they are asked (adapters.py), and nothing of their load (slots.py).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from sidecar.prefill.endpoints import Endpoint

MAX_NAME_BYTES = 512
"""A longer name is nobody's: such a request is treated as if nothing were known."""
MAX_NAMES = 4096
REFUSED_FOR_S = 60.0
"""An endpoint that answered 404 for an adapter is asked for it again after this time, or once it lists it."""
MAX_REFUSED = 64

ADAPTER_CALLS = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
"""After these the engine serves other adapters than before."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_decode_cards = msgspec.json.Decoder(_Cards).decode
_decode_name = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine serves at present."""

    base: frozenset[str]
    """Names of the model itself."""
    adapters: frozenset[str]
    loads: bool = True
    """It may load an adapter that it does not list when a request names it (vLLM's resolver plugins)."""


def parse_served(body: bytes) -> Served | None:
    """The answer of vLLM 0.32 to `GET /v1/models` (entrypoints/openai/models/serving.py: an adapter has a parent).
    None if it is none, names no model, or names more than anyone would serve."""
    try:
        cards = _decode_cards(body).data
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not cards or len(cards) > MAX_NAMES:
        return None
    known = [card for card in cards if 0 < len(card.id.encode("utf-8", "replace")) <= MAX_NAME_BYTES]
    return Served(
        frozenset(card.id for card in known if not card.parent),
        frozenset(card.id for card in known if card.parent),
    )


class Told:
    """What an engine has told of its models, until when that counts, and when it is to be asked again. All times
    are those of one monotonic clock, in seconds."""

    __slots__ = ("_refused", "_until", "ask_at", "ask_loads_at", "doubted", "is_doubted", "served")

    def __init__(self) -> None:
        self.served: Served | None = None
        """The newest that it told, however old."""
        self.is_doubted = False
        """It has to be asked anew, and soon."""
        self.doubted: Callable[[], None] = lambda: None
        """Hears of it."""
        self.ask_at = self.ask_loads_at = float("-inf")
        self._until = float("-inf")
        self._refused: dict[str, float] = {}

    def tell(self, served: Served, until: float) -> None:
        self.served, self._until = served, until

    @property
    def until(self) -> float:
        return self._until

    def fresh(self, now: float) -> Served | None:
        """None: it has not told, or too long ago."""
        return self.served if now < self._until else None

    def refused(self, adapter: str, now: float) -> None:
        """It answered 404 to a request that names this adapter. What it lists may be old, too."""
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[adapter] = now
        if self.served is not None and adapter in self.served.adapters:
            self.served = replace(self.served, adapters=self.served.adapters - {adapter})

    def has_refused(self, adapter: str, now: float) -> bool:
        """Lately."""
        return now - self._refused.get(adapter, float("-inf")) < REFUSED_FOR_S

    def doubt(self) -> None:
        """It was told to serve other adapters: what it said before counts no more."""
        self.is_doubted = True
        self._until = float("-inf")
        self.doubted()


def named(model: msgspec.Raw | None) -> str:
    """The name that a request's `model` has, "" for none that could be anybody's."""
    if model is None or not 2 < len(memoryview(model)) <= 6 * MAX_NAME_BYTES:  # a character may be `\\u0041`
        return ""
    try:
        name = _decode_name(model)
    except msgspec.MsgspecError:
        return ""  # null: the base model; anything else the engine refuses
    return name if len(name) <= MAX_NAME_BYTES else ""


class Serving(NamedTuple):
    """Who may prefill a request, as far as its model goes."""

    candidates: Sequence["Endpoint"]
    adapter: str = ""
    """The adapter that it names, if the decode engine lists it or may load it."""
    problem: str = ""
    """Why it is none of the candidates, and what to change; names nothing that the decode engine does not list."""


def serving(name: str, own: Told, candidates: Sequence["Endpoint"], listed: Collection[str], now: float) -> Serving:
    """`own`: the decode engine. `listed`: the adapters of all endpoints. Whoever has not told counts as serving it.
    `candidates` itself comes back where nobody is left out."""
    if not name or own.served is None:
        return Serving(candidates)
    served = own.fresh(now)
    if served is None:  # it may have been told to load one a moment ago
        return Serving(candidates) if name in own.served.base else _perhaps(name, candidates, now)
    if name in served.adapters:
        return _adapter(name, candidates, now)
    if name in served.base:  # the common case
        return _base(name, candidates, now) if name in listed else Serving(candidates)
    if served.loads:
        return _perhaps(name, candidates, now)
    if name not in listed or not any(_lists(one, name, now) for one in candidates):
        return Serving(candidates)
    return Serving(
        (),
        problem="an adapter that prefill endpoints have is not on the decode engine, whose 404 is the answer: "
        "load it there too",
    )


def _adapter(name: str, candidates: Sequence["Endpoint"], now: float) -> Serving:
    having, loading = [], []
    for one in candidates:
        served = one.models.fresh(now)
        if served is not None and name in served.adapters:
            having.append(one)
        elif one.models.has_refused(name, now):
            continue
        elif served is None:
            having.append(one)
        elif served.loads and name not in served.base:
            loading.append(one)
    if len(having) == len(candidates):
        return Serving(candidates, name)
    if having or loading:
        return Serving(having or loading, name)
    return Serving(
        (),
        name,
        f"adapter {name!r} is on the decode engine and on none of the prefill endpoints: load it there too",
    )


def _perhaps(name: str, candidates: Sequence["Endpoint"], now: float) -> Serving:
    """An adapter, or nobody's name: as long as nothing speaks against it, as ever."""
    willing = [one for one in candidates if _lists(one, name, now) or not one.models.has_refused(name, now)]
    if willing:
        return Serving(willing if len(willing) < len(candidates) else candidates, name)
    why = (
        "a name that the decode engine may know is none to prefill endpoints: is an adapter to be loaded there too?"
    )
    return Serving((), problem=why)


def _base(name: str, candidates: Sequence["Endpoint"], now: float) -> Serving:
    """KV of an adapter is no KV of the model: the decode engine would go on with it and never know."""
    others = [one for one in candidates if not _lists(one, name, now)]
    if others:
        return Serving(others if len(others) < len(candidates) else candidates)
    why = f"{name!r} is the decode engine's own model and an adapter on every prefill endpoint: rename the adapter"
    return Serving((), problem=why)


def _lists(endpoint: "Endpoint", name: str, now: float) -> bool:
    served = endpoint.models.fresh(now)
    return served is not None and name in served.adapters
