"""The aiohttp sessions of one process, and the probes of engines that are made of them. Knows no request."""

import contextlib

import aiohttp

from sidecar.prefill.endpoints import Endpoint
from sidecar.prefill.probe import Access, Answer, EngineProbe
from sidecar.settings import Settings
from sidecar.tls import Tls

CONNECTIONS = 0
"""No limit, in place of aiohttp's 100: who waits for the connections of silent ones would be taken for silent."""


class Calls:
    """How this process calls engines beside the requests: health, metrics, warm-up."""

    def __init__(self, settings: Settings, tls: Tls) -> None:
        self._settings = settings
        self.to_prefill = Access(tls.prefill, lambda: tls.probe_key.key)
        self.to_engine = Access(tls.decode, lambda: tls.probe_key.key)
        self._session: aiohttp.ClientSession | None = None
        self._uds_session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """On the running loop, before anything else is asked of it."""
        self._session = _session(aiohttp.TCPConnector(limit=CONNECTIONS))
        if self._settings.model_server_uds:
            self._uds_session = _session(aiohttp.UnixConnector(self._settings.model_server_uds, limit=CONNECTIONS))

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    @property
    def engine_session(self) -> aiohttp.ClientSession:
        return self._uds_session or self.session

    def engine_url(self, rank: int) -> str:
        settings = self._settings
        if settings.model_server_uds:
            return "http://localhost"
        host = settings.model_server_host
        bracketed = f"[{host}]" if ":" in host else host
        return self.to_engine.url(f"{bracketed}:{settings.model_server_port + rank}")

    def engine_probe(self, rank: int) -> EngineProbe:
        return EngineProbe(self.engine_session, self.engine_url(rank), self.to_engine)

    def prefill_probe(self, endpoint: Endpoint) -> EngineProbe:
        return EngineProbe(self.session, self.to_prefill.url(endpoint.label), self.to_prefill)

    async def close(self) -> None:
        for session in (self._session, self._uds_session):
            if session is not None:
                with contextlib.suppress(Exception):
                    await session.close()


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), response_class=Answer)
