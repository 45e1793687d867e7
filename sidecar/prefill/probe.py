"""Control-plane calls to engines: health, and what their metrics tell of their KV cache. Decides nothing.

These are rare and none of them is on a request's path, so they use aiohttp.
"""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from sidecar.connectors.connector import EngineFacts
from sidecar.decision.signals import Load, parse_load
from sidecar.prefill.served import Served, parse_served
from sidecar.prefill.slots import FAMILY, Slots, parse_slots
from sidecar.prefill.stall import Fetching, parse_fetching
from sidecar.tls import describe
from transport.descriptors import OutOfDescriptors, shortage

MAX_METRICS_BYTES = 8 << 20
MAX_MODELS_BYTES = 4 << 20
"""Some 8,000 adapters: half a KB for each."""
MAX_SLOTS_BYTES = 1 << 20
MAX_DIGITS = 15
"""Of what is a number of tokens or of blocks."""
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ONCE = {"connection": "close"}
"""For what is asked so seldom that the engine would have closed a kept connection before."""


def _no_key() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Access:
    """How the engines of one role are called: over TLS or not, and with which bearer key ("": none)."""

    tls: ssl.SSLContext | None = None
    key: Callable[[], str] = _no_key

    def url(self, host_port: str) -> str:
        return f"{'http' if self.tls is None else 'https'}://{host_port}"

    def options(self, **headers: str) -> dict[str, Any]:
        """For aiohttp's requests; the key is read anew for each."""
        key = self.key()
        if key:
            headers["authorization"] = f"Bearer {key}"
        options: dict[str, Any] = {"headers": headers} if headers else {}
        return options if self.tls is None else {**options, "ssl": self.tls}


PLAIN = Access()


class Answer(aiohttp.ClientResponse):
    """Tells who gave it even when it has been read, and its connection is another's."""

    peer_host = ""
    """IP address."""

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        peer = connection.transport.get_extra_info("peername") if connection.transport is not None else None
        if isinstance(peer, tuple):
            self.peer_host = str(peer[0]).partition("%")[0]
        return await super().start(connection)


async def body_of(response: aiohttp.ClientResponse, most_bytes: int) -> bytearray | None:
    """The whole body, None if it is larger: it is left unread then. Raises what aiohttp raises."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            return None
    return body


class EngineProbe:
    """Calls to one engine. `base_url` without a path."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, access: Access = PLAIN) -> None:
        self._session = session
        self._base_url = base_url
        self._access = access

    async def healthy(self, timeout_s: float) -> str:
        """ "" if `/health` says 200 in time, else what is wrong. Raises `OutOfDescriptors`: nothing is known."""
        try:
            async with self._session.get(
                self._base_url + "/health",
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                **self._access.options(),
            ) as response:
                return "" if response.status == 200 else f"/health says {response.status}"
        except TimeoutError:
            return f"/health does not answer within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            if own := shortage(error):
                raise OutOfDescriptors(own) from None
            return f"/health: {_problem(error)}"

    async def facts(self, timeout_s: float) -> EngineFacts:
        """Block size and number of blocks from `/metrics` (vllm:cache_config_info); zeros if it does not tell."""
        return parse_facts(await self._metrics(timeout_s))

    async def load(self, timeout_s: float) -> Load | None:
        """What runs and waits there, from `/metrics`; None if it does not tell."""
        return parse_load(await self._metrics(timeout_s))

    async def fetching(self, timeout_s: float) -> Fetching | None:
        """What KV is on its way there, from `/metrics`; None if it does not tell."""
        return parse_fetching(await self._metrics(timeout_s))

    async def _metrics(self, timeout_s: float) -> str:
        """The exposition, "" if there is none."""
        body = await self._body("/metrics", MAX_METRICS_BYTES, timeout_s)
        return "" if body is None else body.decode("utf-8", "replace")

    async def served(self, timeout_s: float) -> Served | None:
        """What `/v1/models` lists; None if it does not tell."""
        body = await self._body("/v1/models", MAX_MODELS_BYTES, timeout_s, **_ONCE)
        return None if body is None else parse_served(bytes(body))

    async def loads_adapters(self, timeout_s: float) -> bool:
        """Whether it may load an adapter that a request names. vLLM 0.32 does that, with a resolver plugin, only
        where adapters may be loaded at run time, and only there the path for it exists (404 elsewhere, 405 to GET).
        """
        try:
            async with self._session.get(
                self._base_url + "/v1/load_lora_adapter",
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                **self._access.options(**_ONCE),
            ) as response:
                return response.status != 404
        except (TimeoutError, aiohttp.ClientError, OSError):
            return True

    async def slots(self, timeout_s: float) -> Slots | None:
        """Which adapters it has at hand; None if it does not tell. With the slash vLLM gives the one family that is
        asked for (prometheus_client's application), without it all of them (the instrumentator's)."""
        body = await self._body(f"/metrics/?name[]={FAMILY}", MAX_SLOTS_BYTES, timeout_s, **_ONCE)
        return None if body is None else parse_slots(body.decode("utf-8", "replace"))

    async def _body(self, target: str, most_bytes: int, timeout_s: float, **headers: str) -> bytearray | None:
        """The body of a 200 answer, None if there is none or it is larger."""
        try:
            async with self._session.get(
                self._base_url + target,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                **self._access.options(**headers),
            ) as response:
                return await body_of(response, most_bytes) if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


def _problem(error: Exception) -> str:
    cause = getattr(error, "os_error", error)
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {describe(cause)}"
    return getattr(error, "strerror", None) or type(error).__name__


def parse_facts(metrics: str) -> EngineFacts:
    """The facts in a Prometheus text exposition of vLLM."""
    ranks = [dict(_LABEL.findall(labels)) for labels in _CACHE_CONFIG.findall(metrics)]
    labels = ranks[0] if ranks else {}
    return EngineFacts(
        block_size=_int(labels.get("block_size")),
        num_blocks=_int(labels.get("num_gpu_blocks")),
        ranks=len({one["engine"] for one in ranks if "engine" in one}),
    )


def _int(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else 0
