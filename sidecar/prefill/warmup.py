"""Makes the engines of a new pair connect before a user's request has to.

The first pull between two engines pays for the NIXL handshake and the connection (vLLM 0.32: on one thread for all
peers); the engines remember it for an hour of idleness. One request of a few tokens through the pair does it.

The same request finds the way back to an endpoint whose side channel is dead: no request of a user is sent there,
and only a handoff can tell that the channel is now at another port.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import aiohttp
import msgspec

from sidecar.connectors import Connector
from sidecar.connectors.connector import Handoff, PrefillAnswer, Rejection, Source
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.probe import PLAIN, Access, body_of

_log = logging.getLogger("sidecar")

LOOK_EVERY_S = 0.2
PAUSE_S = 10.0
TRIAL_EVERY_S = 30.0
"""How often an endpoint whose side channel is dead is asked for a handoff; the first time at once."""
MAX_ATTEMPTS = 3
MAX_REMEMBERED = 4096
MAX_ANSWER_BYTES = 1 << 20
"""Of one token."""
PROMPT_TOKENS = 8
"""Token ids that every vocabulary has. Less than a block is enough: the engine pulls the block all the same."""

_decode = msgspec.json.Decoder(PrefillAnswer).decode


class Gate(Protocol):
    """See `sidecar.prefill.gate.Gate`."""

    def admit(
        self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]
    ) -> None: ...


class WarmUp:
    """Warms pairs up one after the other; a pair is one prefill engine (by its engine id) and the local engine, of
    which every rank connects by itself."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        connector: Connector,
        gate: Gate,
        *,
        engine_urls: Sequence[str],
        engine_session: aiohttp.ClientSession,
        engine_block_size: Callable[[], int],
        timeout_s: float,
        counted: Callable[[str], None],
        new_pairs: bool = True,
        prefill_access: Access = PLAIN,
        engine_access: Access = PLAIN,
    ) -> None:
        """`engine_urls`: one for each local rank. `counted` hears each outcome: `warm`, `no_handoff`,
        `not_admitted`, `prefill_failed`, `decode_failed`. Without `new_pairs` only dead side channels are looked
        for."""
        self._session = session
        self._connector = connector
        self._gate = gate
        self._engine_urls = engine_urls
        self._engine_session = engine_session
        self._engine_block_size = engine_block_size
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._counted = counted
        self._new_pairs = new_pairs
        self._prefill_access = prefill_access
        self._engine_access = engine_access
        self._attempts: dict[str, tuple[int, float]] = {}
        """Engine id -> attempts made (a success counts as all of them) and when the last one was."""
        self._trials: dict[Endpoint, float] = {}
        """Endpoints whose side channel is dead -> when they were last asked for a handoff."""

    async def run(self, endpoints: Endpoints, wanted: Callable[[], bool]) -> None:
        """Warms up every engine that becomes known, for as long as `wanted` says so."""
        while True:
            for endpoint in list(endpoints):
                if wanted() and self._is_due(endpoint):
                    await self._warm(endpoint)
            for endpoint in [one for one in self._trials if one.forgotten or one.blocked != "side_channel_dead"]:
                del self._trials[endpoint]
            await asyncio.sleep(LOOK_EVERY_S)

    def _is_due(self, endpoint: Endpoint) -> bool:
        now = time.monotonic()
        if endpoint.blocked == "side_channel_dead":
            if now - self._trials.get(endpoint, -TRIAL_EVERY_S) < TRIAL_EVERY_S:
                return False
            self._trials[endpoint] = now
            return True
        engine_id = endpoint.facts.engine_id
        if not engine_id or endpoint.blocked or not self._new_pairs:
            return False
        attempts, last = self._attempts.get(engine_id, (0, -PAUSE_S))
        return attempts < MAX_ATTEMPTS and now - last >= PAUSE_S

    async def _warm(self, endpoint: Endpoint) -> None:
        """One tiny request through the pair. A failure says nothing about the endpoint: requests will tell."""
        try:
            outcome = await self._pair(endpoint)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            outcome = "prefill_failed"
            _log.debug("warm-up of %s: %s", endpoint.label, type(error).__name__)
        except Exception:  # the others are still to be warmed up
            outcome = "prefill_failed"
            _log.exception("warm-up of %s", endpoint.label)
        self._counted(outcome)
        if endpoint.blocked:  # as before: the log has it already
            return
        engine_id = endpoint.facts.engine_id  # another one than before, maybe
        attempts, _ = self._attempts.pop(engine_id, (0, 0.0))
        self._attempts[engine_id] = (MAX_ATTEMPTS if outcome == "warm" else attempts + 1, time.monotonic())
        while len(self._attempts) > MAX_REMEMBERED:
            del self._attempts[next(iter(self._attempts))]
        _log.info("prefill endpoint %s: warm-up: %s", endpoint.label, outcome.replace("_", " "))

    def is_cold(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint's engine is known and its first warm-up is still to come."""
        engine_id = endpoint.facts.engine_id
        return self._new_pairs and bool(engine_id) and not endpoint.blocked and engine_id not in self._attempts

    async def _pair(self, endpoint: Endpoint) -> str:
        for engine_url in self._engine_urls:
            outcome = await self._connect(endpoint, engine_url)
            if outcome != "warm":
                return outcome
        return "warm"

    async def _connect(self, endpoint: Endpoint, engine_url: str) -> str:
        body = b'{"prompt":[%b],"max_tokens":1,"ignore_eos":true' % b",".join([b"1"] * PROMPT_TOKENS)
        params = self._connector.prefill_params("")
        url = self._prefill_access.url(endpoint.label) + "/v1/completions"
        async with self._post(self._session, self._prefill_access, url, body, params) as response:
            if response.status != 200:
                return "prefill_failed"
            answer = await body_of(response, MAX_ANSWER_BYTES)
            peer_host = getattr(response, "peer_host", "")
        if answer is None:
            return "prefill_failed"
        try:
            parsed = _decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return "no_handoff"
        hosts = endpoint.hosts | ({peer_host} - {""})
        handoff = self._connector.read(parsed, Source(hosts, endpoint.facts, self._engine_block_size()))
        if isinstance(handoff, Rejection) or handoff.empty:
            return "no_handoff"
        admitted: asyncio.Future[Handoff | Rejection] = asyncio.get_running_loop().create_future()
        self._gate.admit(endpoint, handoff, admitted.set_result)
        result = await admitted
        if isinstance(result, Rejection):
            return "not_admitted"
        try:
            url = engine_url + "/v1/completions"
            decode = self._post(self._engine_session, self._engine_access, url, body, result.params)
            async with decode as response:
                answer = await body_of(response, MAX_ANSWER_BYTES)
                return "warm" if response.status == 200 and answer is not None else "decode_failed"
        except (TimeoutError, aiohttp.ClientError, OSError):
            return "decode_failed"

    def _post(
        self, session: aiohttp.ClientSession, access: Access, url: str, body: bytes, params: bytes
    ) -> "aiohttp.client._RequestContextManager":
        return session.post(
            url,
            data=body + b',"kv_transfer_params":%b}' % params,
            timeout=self._timeout,
            allow_redirects=False,
            **access.options(**{"content-type": "application/json"}),
        )
