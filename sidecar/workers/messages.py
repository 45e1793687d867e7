"""What the hub and its workers tell each other. Data only.

Times are seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

from typing import Literal

import msgspec

from sidecar.connectors.connector import EngineFacts
from sidecar.decision import signals
from sidecar.prefill import breaker, ranks
from sidecar.prefill.served import Served
from sidecar.prefill.slots import Slots
from sidecar.settings import Settings
from sidecar.workers.totals import Totals


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Address of a prefill endpoint."""

    host: str
    port: int


# -- hub to worker ---------------------------------------------------------------------------------------------


class Welcome(_Message):
    """The first one."""

    number: int
    settings: Settings
    salt: int
    """For the choice of a conversation's endpoint, which must not depend on the worker."""
    lock: int
    """Descriptor of the budget's memory."""


class State(_Message):
    """As `sidecar.edge.service.Live`."""

    mode: str
    draining: bool
    engine_facts: EngineFacts


class Discovered(_Message):
    """The whole set: address, and whether it may get requests."""

    members: list[tuple[Place, bool]]


class News(_Message):
    """Everything that requests need to know of one endpoint."""

    place: Place
    is_brought: bool
    """A header brought it: workers that have not seen that header know it from now on."""
    blocked: str
    facts: EngineFacts
    joined_at: float
    failures: int
    breaker: breaker.Standing
    trial_of: int
    """Number of the worker whose request is the breaker's trial, 0 if there is none."""
    ranks: ranks.Standing
    heard: int
    """The last `Outcome` of this worker that is taken into account here."""


class NoKv(_Message):
    """Prefills in a row, of all endpoints, that brought nothing; `heard` as in `News`."""

    count: int
    heard: int


class Elsewhere(_Message):
    """Legs that the other workers have open at an endpoint, and their prompt tokens."""

    place: Place
    in_flight: int
    tokens: int


class RankUse(msgspec.Struct, frozen=True, array_like=True):
    """What requests do at one rank of the decode engine."""

    in_flight: int = 0
    tokens: int = 0
    """Of prompts that are yet to be computed there."""
    long_gaps: float = 0.0
    """That local prompts have made since the worker's start: see `sidecar.decision.allowance`."""


class DecodeElsewhere(_Message):
    """What the other workers do at each rank of the decode engine."""

    ranks: list[RankUse]


class Load(_Message):
    """A scrape of one rank of the decode engine."""

    rank: int
    load: signals.Load
    at: float


class OwnModels(_Message):
    """Which models a rank of the decode engine serves: see `sidecar.prefill.served.Served`."""

    rank: int
    served: Served
    until: float


class Models(_Message):
    """The same of a prefill endpoint, and the slots of its adapters."""

    place: Place
    served: Served
    until: float
    slots: Slots | None
    slots_until: float


class Located(_Message):
    """Answer to `Locate`: the address, or a fault of the failure table and its detail."""

    question: int
    host: str
    port: int
    fault: str
    detail: str


class Answered(_Message):
    """Answer to `AskAlive`: "" or what is wrong."""

    question: int
    problem: str


class Tell(_Message):
    """The worker is to report."""

    question: int
    decisions: bool


_Told = State | Discovered | News | NoKv | Elsewhere | DecodeElsewhere | Load | OwnModels | Models
ToWorker = Welcome | _Told | Located | Answered | Tell


# -- worker to hub ---------------------------------------------------------------------------------------------


class Serves(_Message):
    """All ports are open, or `problem` says which is not."""

    problem: str


class Learned(_Message):
    """A request's header named an endpoint that this worker did not know."""

    place: Place


Event = Literal["trial", "abandoned", "failed", "succeeded", "brought_kv", "brought_no_kv"]


class Outcome(_Message):
    """What a request says of an endpoint."""

    number: int
    """Counts up, for `News.heard`."""
    place: Place
    """Of `brought_no_kv` without meaning."""
    event: Event
    trial: bool = False
    """It speaks as the breaker's trial."""
    at_once: bool = False
    rank: int = -1


class Use(_Message):
    """What this worker's requests have open at an endpoint."""

    place: Place
    in_flight: int
    tokens: int
    users: int
    """Requests that may still need something of it."""


class DecodeUse(_Message):
    """The same at each rank of the decode engine."""

    ranks: list[RankUse]


class Reloaded(_Message):
    """A rank of the decode engine was told to serve other adapters."""

    rank: int


class Locate(_Message):
    """Where may the decode engine pull this handoff from?"""

    question: int
    place: Place
    host: str
    port: int
    engine_id: str
    tp_size: int
    pp_size: int


class AskAlive(_Message):
    """Does the side channel answer for this engine?"""

    question: int
    host: str
    port: int
    engine_id: str
    timeout_s: float


class Report(_Message):
    """Answer to `Tell`, and unasked (0) before the end. `decisions`: JSON, newest first; b"" if not asked for."""

    question: int
    totals: Totals
    decisions: bytes


ToHub = Serves | Learned | Outcome | Use | DecodeUse | Reloaded | Locate | AskAlive | Report
