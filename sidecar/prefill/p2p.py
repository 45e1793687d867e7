"""Whether engines can be reached on the control channel of their P2P tier. Decides nothing beyond that.

vLLM 0.32 must never be told to dial a peer that is not there: its dealer to a port that refuses outlives its
monitor, and the first event that nobody reads any more stops the one thread that does all of the engine's P2P
(v1/kv_offload/tiering/p2p/control/zmq.py, `ZmqConnection.close`). From then on every transfer of that engine, with
whomever, takes 40 s and fails, until it is restarted. So each peer is asked immediately before: whoever accepts
greets at once (ZMTP 3, RFC 23), from that thread; a frozen engine takes a connection too, and says nothing.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from sidecar.background import Background
from sidecar.connectors.connector import Handoff, Rejection
from sidecar.log import Limited
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import Endpoint
from transport.descriptors import OutOfDescriptors, shortage

_log = logging.getLogger("sidecar")

_SIGNATURE = 0xFF
"""First byte of every ZMTP greeting."""


async def greeting(address: Address, timeout_s: float) -> str:
    """ "" if a ZMTP peer greets there in time, else what is wrong. Raises `OutOfDescriptors`."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                first = await reader.read(1)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"no greeting within {timeout_s:g} s"
    except OSError as error:
        if own := shortage(error):
            raise OutOfDescriptors(own) from None
        if error.errno and error.errno > 0:
            return os.strerror(error.errno)
        return error.strerror or type(error).__name__  # a name that is not known, say
    return "" if first and first[0] == _SIGNATURE else "it does not speak ZMTP"


async def alive(handoff: Handoff, timeout_s: float) -> str:
    """ "" if the channel that the handoff names answers, or cannot be asked."""
    try:
        problem = await greeting(Address(handoff.host, handoff.port), timeout_s)
    except OutOfDescriptors:
        return ""
    return f"P2P channel {handoff.host}:{handoff.port}: {problem}" if problem else ""


class P2PGate:
    """The gate of handoffs that go over the P2P tier, for one decode engine (`own`: its channel, None: unknown)."""

    def __init__(self, background: Background, own: Address | None, timeout_s: float) -> None:
        self._background = background
        self.own = own
        self._timeout_s = timeout_s
        self._own_problem = ""
        self._limited = Limited(_log)

    def admit(self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]) -> None:
        """Calls `admitted` with the handoff, or with why the local engine must not have it."""

        async def ask() -> None:
            admitted(await self._verdict(Address(handoff.host, handoff.port)) or handoff)

        self._background.start(f"P2P channel of {endpoint.label}", ask())

    def reach(self, source: Address, reached: Callable[[bool], None]) -> None:
        """Calls `reached` with whether blocks may be fetched from this peer."""

        async def ask() -> None:
            rejection = await self._verdict(source)
            if rejection is not None:
                self._limited.warning(f"{source}", "KV cache source %s is not used: %s", source, rejection.detail)
            reached(rejection is None)

        self._background.start(f"P2P channel of {source}", ask())

    async def _verdict(self, peer: Address) -> Rejection | None:
        try:
            own, theirs = await asyncio.gather(self._ask_own(), greeting(peer, self._timeout_s))
        except OutOfDescriptors as error:
            return Rejection("unverifiable", str(error))
        except Exception as error:  # whatever it was, a request waits for the answer
            _log.exception("asking P2P channel %s", peer)
            return Rejection("side_channel_dead", f"asking it failed: {type(error).__name__}")
        if own:
            return Rejection("own_channel_dead", f"P2P channel {self.own}: {own}")
        if theirs:
            change = "set VLLM_P2P_SIDE_CHANNEL_HOST there, and --p2p-connector-port here"
            return Rejection("side_channel_dead", f"P2P channel {peer}: {theirs}; {change}")
        return None

    async def _ask_own(self) -> str:
        if self.own is None:
            return ""
        problem = await greeting(self.own, self._timeout_s)
        if problem and not self._own_problem:
            _log.error("the decode engine's P2P channel %s: %s; restart the engine", self.own, problem)
        self._own_problem = problem
        return problem
