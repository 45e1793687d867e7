"""Begins traces, keeps the finished ones in a bounded queue and sends them to a collector as OTLP over HTTP.

A request only ever appends to the queue. What a collector does not take, or takes too slowly, is dropped and
counted: no request waits for it, and no memory grows.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import unquote

import aiohttp
import msgspec

from sidecar import __version__
from sidecar.edge.request import Request
from sidecar.edge.service import Times
from sidecar.exchange.apis import Api
from sidecar.exchange.failures import Row
from sidecar.exchange.life import Exchange
from sidecar.log import Limited
from sidecar.tracing.context import Sampler, Trace, parsed
from sidecar.tracing.spans import Finished, spans, value_of

DEFAULT_ENDPOINT = "http://localhost:4318"
QUEUED_REQUESTS = 2048
BATCH_REQUESTS = 64
"""Encoded in one turn of the loop: 1 ms, measured with split requests."""
SEND_EVERY_S = 1.0
TIMEOUT_S = 5.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failure, doubled with each further one: meanwhile the queue fills and overflows."""
LAST_WORDS_S = 2.0
MAX_ANSWER_BYTES = 65536

_log = logging.getLogger("sidecar")


class Tracer:
    """The tracer of one process. `counted(outcome, requests)` hears what became of traced requests: `exported`,
    `failed`, `overflow`."""

    def __init__(
        self,
        ratio: float,
        endpoint: str,
        environ: Mapping[str, str],
        counted: Callable[[str, int], None],
    ) -> None:
        """`endpoint` is the base of the collector's URL, "" for what OpenTelemetry's environment variables say."""
        self._sampler = Sampler(ratio)
        self._counted = counted
        self._queue: deque[Finished] = deque()
        self._url = _url(endpoint, environ)
        self._headers = _pairs(environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")) | {"content-type": "application/json"}
        self._resource = _resource(environ)
        self._limited = Limited(_log)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._url

    def begin(self, request: Request) -> Trace | None:
        """Decides whether a request is traced. If so its headers lose the client's context, of which each leg gets
        its own continuation; if not they stay what they are."""
        given = request.values(b"traceparent")
        context = parsed(given) if given else None
        trace = self._sampler.begin(context)
        if trace is not None:
            # A tracestate belongs to the traceparent that it came with.
            request.remove({b"traceparent"} if context is not None else {b"traceparent", b"tracestate"})
        return trace

    def finished(
        self,
        trace: Trace,
        request: Request,
        api: Api | None,
        exchange: Exchange | None,
        refusal: Row | None,
        status: int,
        times: Times,
        client_left: bool,
    ) -> None:
        """A traced request is over."""
        if len(self._queue) >= QUEUED_REQUESTS:
            self._counted("overflow", 1)
            return
        path = api.path.decode("ascii") if api is not None else ""
        offset_s = time.time() - time.monotonic()
        self._queue.append(
            Finished(
                trace,
                request.method.decode("ascii"),
                path,
                exchange,
                refusal,
                status,
                times,
                request.request_id.decode("ascii", "replace"),
                client_left,
                offset_s,
            )
        )

    # -- sending -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends what is queued, until it is cancelled."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            )
        pause_s = PAUSE_S
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            while self._queue:
                if await self._send():
                    pause_s = PAUSE_S
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Sends what is left, if that goes quickly. `run` has been cancelled."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while self._queue and self._session is not None and await self._send():
                    pass
        except TimeoutError:
            pass
        if self._session is not None:
            await self._session.close()

    async def _send(self) -> bool:
        """One batch; whether the collector took it."""
        assert self._session is not None
        batch = [self._queue.popleft() for _ in range(min(BATCH_REQUESTS, len(self._queue)))]
        found = [span for done in batch for span in spans(done)]
        scope = {"name": "pd-sidecar", "version": __version__}
        body = msgspec.json.encode(
            {
                "resourceSpans": [
                    {"resource": self._resource, "scopeSpans": [{"scope": scope, "spans": found}]},
                ]
            }
        )
        problem = await self._post(body)
        self._counted("failed" if problem else "exported", len(batch))
        if problem:
            self._limited.warning("traces", "traces: %s: %s: %d requests dropped", self._url, problem, len(batch))
        return not problem

    async def _post(self, body: bytes) -> str:
        """ "" if it was taken, else what is wrong."""
        assert self._session is not None
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    return f"the collector says {response.status}"
                rejected = _rejected(await response.content.read(MAX_ANSWER_BYTES))
                if rejected:
                    self._limited.warning("rejected spans", "traces: %s: %s spans rejected", self._url, rejected)
                return ""
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return getattr(error, "strerror", None) or type(error).__name__


def _rejected(answer: bytes) -> int:
    """How many spans of those that it took a collector threw away (`ExportTracePartialSuccess`)."""
    try:
        return int(msgspec.json.decode(answer)["partialSuccess"]["rejectedSpans"])
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, ValueError):
        return 0


# -- OpenTelemetry's environment variables -------------------------------------------------------------------


def _url(endpoint: str, environ: Mapping[str, str]) -> str:
    """Where traces go (OTLP exporter specification: the variable for traces alone is taken as it is)."""
    whole = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if whole and not endpoint:
        return whole
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or DEFAULT_ENDPOINT
    return base.rstrip("/") + "/v1/traces"


def _pairs(text: str) -> dict[str, str]:
    """`key=value,key=value`, percent-encoded."""
    parts = [part.partition("=") for part in text.split(",")]
    return {unquote(key.strip()): unquote(value.strip()) for key, equals, value in parts if equals and key.strip()}


def _resource(environ: Mapping[str, str]) -> dict[str, object]:
    attributes = {"service.name": "pd-sidecar", "service.version": __version__}
    if environ.get("HOSTNAME"):
        attributes["service.instance.id"] = environ["HOSTNAME"]
    attributes |= _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = environ["OTEL_SERVICE_NAME"]
    return {"attributes": [{"key": key, "value": value_of(value)} for key, value in attributes.items()]}
