"""What the machine of an exchange asks of the edge: one command follows each event. Data alone."""

import msgspec

from sidecar.connectors.connector import Handoff
from sidecar.exchange.failures import Row
from sidecar.prefill.endpoints import Endpoint


class Prefill(msgspec.Struct, frozen=True):
    """Send the prefill leg to `endpoint`."""

    endpoint: Endpoint


class Decode(msgspec.Struct, frozen=True):
    """Send the decode leg to the local engine, with `handoff` or without one."""

    handoff: Handoff | None


class Check(msgspec.Struct, frozen=True):
    """Find out whether the local engine can pull `handoff`, and under what address."""

    handoff: Handoff


class Relay(msgspec.Struct, frozen=True):
    """Pass on the answer at hand: the prefill endpoint's whole one, or the decode engine's from its head on."""


class Peek(msgspec.Struct, frozen=True):
    """Hold the decode engine's answer back until its first event says whether the KV could be loaded."""


class Answer(msgspec.Struct, frozen=True):
    """Answer with our own error."""

    row: Row
    detail: str = ""


class BreakOff(msgspec.Struct, frozen=True):
    """The answer cannot be completed: say so in the stream, or cut it."""

    row: Row


class ToFirstByte(msgspec.Struct, frozen=True):
    """Nobody waits any more, but the engine is let to its first byte before its connection is closed."""


class Wait(msgspec.Struct, frozen=True):
    """Nobody waits for an answer, but an event that is still to come says what has to be done."""


class Close(msgspec.Struct, frozen=True):
    """Close what is open; nobody waits for an answer."""


Command = Prefill | Check | Decode | Relay | Peek | Answer | BreakOff | ToFirstByte | Wait | Close

RELAY, PEEK, TO_FIRST_BYTE, WAIT, CLOSE = Relay(), Peek(), ToFirstByte(), Wait(), Close()
