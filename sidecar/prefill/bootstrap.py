"""Asks Mooncake's bootstrap servers which engine is behind a prefill endpoint, rank by rank.

The answer (vLLM 0.32, mooncake_utils.py: GET /query) is one engine id for each data-parallel rank, and it says that
the engine is there. It is reused for as long as a burst of requests lasts, not longer than an engine takes to come
back as another, and never after a failure of the endpoint. Decides nothing beyond that.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from sidecar.background import Background
from sidecar.connectors.connector import Handoff, Rejection
from sidecar.connectors.mooncake import from_engine
from sidecar.prefill.address import Address
from sidecar.prefill.endpoints import MAX_DISCOVERED, MAX_ENDPOINTS, Endpoint
from sidecar.prefill.probe import body_of
from transport.descriptors import shortage

_log = logging.getLogger("sidecar")

FRESH_S = 0.5
MAX_ANSWER_BYTES = 1 << 20
_RANK = re.compile(r"[0-9]{1,9}")


class _Entry(msgspec.Struct):
    engine_id: str


_decode = msgspec.json.Decoder(dict[str, _Entry]).decode


@dataclass(slots=True)
class _Known:
    ranks: dict[int, str]
    asked_at: float
    failures: int
    """Of the endpoint, when it was asked."""


class BootstrapGate:
    """The gate of handoffs that name an engine only its bootstrap server knows. `now` is a monotonic clock."""

    def __init__(
        self, background: Background, session: aiohttp.ClientSession, timeout_s: float, now: Callable[[], float]
    ) -> None:
        self._background = background
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._now = now
        self._known: dict[Address, _Known] = {}
        self._asking: dict[Address, asyncio.Task[_Known | Rejection | str]] = {}

    def admit(self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]) -> None:
        """Calls `admitted` with the handoff and its engine, or with why there is none."""
        address = Address(handoff.host, handoff.port)
        known = self._known.get(address)
        if known is not None and self._is_fresh(known, endpoint):
            admitted(_named(handoff, known, address))
            return

        async def ask() -> None:
            try:
                result = _named(handoff, await self._ask(endpoint, address), address)
            except Exception as error:  # whatever it was, a request waits for the answer
                _log.exception("asking bootstrap server %s", address)
                result = Rejection("side_channel_dead", f"asking it failed: {type(error).__name__}")
            admitted(result)

        self._background.start(f"bootstrap server of {endpoint.label}", ask())

    def _is_fresh(self, known: _Known, endpoint: Endpoint) -> bool:
        return known.failures == endpoint.failures and self._now() - known.asked_at < FRESH_S

    async def _ask(self, endpoint: Endpoint, address: Address) -> _Known | Rejection | str:
        """What it says, or what is wrong; one question for all who wait for the same."""
        task = self._asking.get(address)
        if task is None:
            task = self._background.start(f"query of {address}", self._query(endpoint, address))
            self._asking[address] = task
            task.add_done_callback(lambda _done: self._asking.pop(address, None))
        return await asyncio.shield(task)

    async def _query(self, endpoint: Endpoint, address: Address) -> _Known | Rejection | str:
        asked_at, failures = self._now(), endpoint.failures
        try:
            async with self._session.get(
                f"http://{address}/query", timeout=self._timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    return f"/query says {response.status}"
                body = await body_of(response, MAX_ANSWER_BYTES)
                if body is None:
                    return "/query answers with more than a megabyte"
            entries = _decode(body)
        except TimeoutError:
            return f"/query does not answer within {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            if own := shortage(error):
                return Rejection("unverifiable", own)
            return f"/query: {type(error).__name__}"
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return "/query answers with something else"
        known = _Known(
            {int(rank): one.engine_id for rank, one in entries.items() if _RANK.fullmatch(rank)}, asked_at, failures
        )
        self._known.pop(address, None)
        while len(self._known) >= MAX_ENDPOINTS + MAX_DISCOVERED:
            del self._known[next(iter(self._known))]
        self._known[address] = known
        return known


def _named(handoff: Handoff, answer: _Known | Rejection | str, address: Address) -> Handoff | Rejection:
    if isinstance(answer, Rejection):
        return answer
    change = "set VLLM_MOONCAKE_BOOTSTRAP_PORT there, and --mooncake-bootstrap-port here"
    if isinstance(answer, str):
        return Rejection("side_channel_dead", f"bootstrap server {address}: {answer}; {change}")
    engine_id = answer.ranks.get(handoff.rank)
    if not engine_id:
        return Rejection("side_channel_dead", f"bootstrap server {address} knows no rank {handoff.rank}")
    return from_engine(handoff, engine_id)
