"""Control-plane calls to engines: health, and what their metrics tell of their KV cache. Decides nothing.

These are rare and none of them is on a request's path, so they use aiohttp.
"""

import re

import aiohttp

from sidecar.connectors.connector import EngineFacts
from sidecar.decision.signals import Load, parse_load

MAX_METRICS_BYTES = 8 << 20
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class EngineProbe:
    """Calls to one engine. `base_url` without a path."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url

    async def healthy(self, timeout_s: float) -> str:
        """ "" if `/health` says 200 in time, else what is wrong."""
        try:
            async with self._session.get(
                self._base_url + "/health", timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
            ) as response:
                return "" if response.status == 200 else f"/health says {response.status}"
        except TimeoutError:
            return f"/health does not answer within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"/health: {getattr(error, 'strerror', None) or type(error).__name__}"

    async def facts(self, timeout_s: float) -> EngineFacts:
        """Block size and number of blocks from `/metrics` (vllm:cache_config_info); zeros if it does not tell."""
        return parse_facts(await self._metrics(timeout_s))

    async def load(self, timeout_s: float) -> Load | None:
        """What runs and waits there, from `/metrics`; None if it does not tell."""
        return parse_load(await self._metrics(timeout_s))

    async def _metrics(self, timeout_s: float) -> str:
        """The exposition, "" if there is none."""
        try:
            async with self._session.get(
                self._base_url + "/metrics", timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
            ) as response:
                if response.status != 200:
                    return ""
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MAX_METRICS_BYTES:
                        return ""
                return body.decode("utf-8", "replace")
        except (TimeoutError, aiohttp.ClientError, OSError):
            return ""


def parse_facts(metrics: str) -> EngineFacts:
    """The facts in a Prometheus text exposition of vLLM."""
    found = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(found.group(1))) if found else {}
    return EngineFacts(block_size=_int(labels.get("block_size")), num_blocks=_int(labels.get("num_gpu_blocks")))


def _int(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
