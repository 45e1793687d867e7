"""List and watch of one collection of the Kubernetes API, so that nothing is missed and nothing hangs.

Raw, because the client libraries that were tried missed a deletion that happened while they were away, hung on a
half-open connection, or asked in a loop after 410. Knows no kind of object: what is kept of one, the caller says.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Generic, TypeVar

import aiohttp
import msgspec

from sidecar.prefill.discovery.backoff import Backoff
from sidecar.prefill.discovery.cluster import Cluster
from sidecar.prefill.discovery.discovery import Report
from transport.descriptors import shortage

WATCH_S = (60, 120)
"""A watch ends by itself after a time between these, other for every sidecar."""
SILENCE_S = 10.0
"""So much later than its end a watch is given up: the connection is open on our side only."""
ANSWER_S = 30.0
"""For an answer's head, and for the whole of a list's page."""
CONNECT_S = 5.0
SHORT_S = 1.0
"""What ends sooner is not begun anew at once."""
PAGE = 250
MAX_PAGE_BYTES = 64 << 20
MAX_EVENT_BYTES = 4 << 20
"""An object is no larger than 1.5 MiB (etcd)."""
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for an answer of a foreign shape."""

T = TypeVar("T")


class ApiFailure(Exception):
    """`reason` is a label value; the text says what to change."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _bad(what: str, error: Exception) -> ApiFailure:
    return ApiFailure("bad_answer", f"{what}: {str(error).splitlines()[0][:200]}")


class Expired(Exception):
    """410: changes since that version are no longer kept."""


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    go_on: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _ObjectMeta(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Object(msgspec.Struct):
    metadata: _ObjectMeta = msgspec.field(default_factory=_ObjectMeta)
    code: int = 0
    message: str = ""


_list = msgspec.json.Decoder(_List).decode
_event = msgspec.json.Decoder(_Event).decode
_object = msgspec.json.Decoder(_Object).decode


class Api:
    """Requests to one API server, each on a connection of its own: a kept one may be dead on one side only.

    Token and certificate authority are read anew for each, because both are replaced while we run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        self._ca = b""
        self._tls: ssl.SSLContext | bool = True

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, params: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The head of the answer; to be closed. Raises `ApiFailure`, `Expired`."""
        headers, tls = self._credentials()
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await self._session.get(
                    self.cluster.url + path,
                    params=params,
                    headers=headers,
                    ssl=tls,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S),
                )
        except TimeoutError:
            raise ApiFailure("timeout", f"{self.cluster.url} does not answer") from None
        except aiohttp.ClientSSLError as error:
            raise ApiFailure("tls", f"{self.cluster.url}, with {self.cluster.ca}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            cause = shortage(error) or getattr(error, "strerror", None) or type(error).__name__
            raise ApiFailure("unreachable", f"{self.cluster.url}: {cause}") from None
        if response.status != 200:
            status = response.status
            response.close()
            if status == 410:
                raise Expired
            raise self._refusal(status)
        return response

    def _credentials(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        headers = {"accept": "application/json"}
        try:
            if self.cluster.token is not None:
                headers["authorization"] = f"Bearer {self.cluster.token.read_text(encoding='ascii').strip()}"
            if self.cluster.ca is not None:
                ca = self.cluster.ca.read_bytes()
                if ca != self._ca:
                    self._tls = ssl.create_default_context(cadata=ca.decode("ascii"))
                    self._ca = ca
        except (OSError, ValueError) as error:
            what = f"{self.cluster.token}, {self.cluster.ca}"
            raise ApiFailure("credentials", f"{what}: {getattr(error, 'strerror', None) or error}") from None
        return headers, self._tls

    def _refusal(self, status: int) -> ApiFailure:
        if status == 401:
            return ApiFailure("unauthorized", f"{self.cluster.url} does not accept the token {self.cluster.token}")
        if status == 403:
            return ApiFailure("forbidden", "")
        if status == 404:
            return ApiFailure("not_found", "")
        reason = "busy" if status == 429 else "server_error" if status >= 500 else "refused"
        return ApiFailure(reason, f"{self.cluster.url} says {status}")


class Collection(Generic[T]):
    """The objects of one resource in our namespace that selectors pick, kept up to date while `run` runs.

    `group` is "" for the core; `convert` makes of an object's JSON what is kept of it, and raises
    `msgspec.MsgspecError` for a foreign shape; `changed` is called after every change of `objects`, and after the
    first list.
    """

    def __init__(
        self,
        api: Api,
        report: Report,
        *,
        part: str,
        group: str,
        version: str,
        resource: str,
        params: Mapping[str, str],
        convert: Callable[[msgspec.Raw], T],
        changed: Callable[[], None],
    ) -> None:
        self.objects: dict[str, T] = {}
        """By name."""
        self._api = api
        self._report = report
        self._part = part
        self._group = group
        self._resource = resource
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        self._path = f"{root}/namespaces/{api.cluster.namespace}/{resource}"
        self._params = params
        self._convert = convert
        self._changed = changed
        self._version = ""
        """Of the last thing heard; "": list first."""
        self._random = random.Random()  # noqa: S311

    async def run(self) -> None:
        """Ends only by being cancelled."""
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            began = loop.time()
            try:
                if not self._version:
                    await self._list()
                began = loop.time()
                await self._watch()
            except Expired:
                self._version = ""
            except ApiFailure as error:
                self._failed(error)
            except NO_JSON as error:
                self._failed(_bad(self._path, error))
            if loop.time() - began >= SHORT_S:
                backoff.reset()
            await asyncio.sleep(backoff.wait_s())

    def _failed(self, error: ApiFailure) -> None:
        if error.reason not in ("timeout", "unreachable"):
            self._version = ""  # whoever may list and not watch is told by lists
        self._report.failed(error.reason, str(error), self._part)

    async def _list(self) -> None:
        objects: dict[str, T] = {}
        params = {**self._params, "limit": str(PAGE)}
        while True:
            page = _list(await self._page(params))
            for raw in page.items or ():
                name = _object(raw).metadata.name
                objects[name] = self._kept(name, raw)
            if not page.metadata.go_on:
                break
            params["continue"] = page.metadata.go_on
        # As a whole: what was deleted while we were away is simply no longer there.
        self.objects = objects
        self._version = page.metadata.resource_version
        self._changed()
        self._report.heard(self._part)

    def _kept(self, name: str, raw: msgspec.Raw) -> T:
        try:
            return self._convert(raw)
        except NO_JSON as error:
            raise _bad(f"{self._resource} {name}", error) from None

    async def _page(self, params: Mapping[str, str]) -> bytes:
        response = await self._get("list", params)
        try:
            async with asyncio.timeout(ANSWER_S):
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > MAX_PAGE_BYTES:
                        raise ApiFailure("too_large", f"{self._path}: a page is over {MAX_PAGE_BYTES} bytes")
                return bytes(data)
        except TimeoutError:
            raise ApiFailure("timeout", f"{self._path}: the list breaks off in silence") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailure("unreachable", f"{self._path}: the list: {type(error).__name__}") from None
        finally:
            response.close()

    async def _watch(self) -> None:
        """Until the server ends it."""
        seconds = self._random.randint(*WATCH_S)
        params = {
            **self._params,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        response = await self._get("watch", params)
        try:
            async with asyncio.timeout(seconds + SILENCE_S):
                self._report.heard(self._part)
                async for lines in _lines(response.content):
                    self._take(lines)
                    self._report.heard(self._part)
            self._report.heard(self._part)
        except TimeoutError:
            raise ApiFailure("timeout", f"{self._path}: the watch is silent beyond its end") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailure("unreachable", f"{self._path}: the watch: {type(error).__name__}") from None
        finally:
            response.close()

    def _take(self, lines: list[bytes]) -> None:
        before = dict(self.objects)
        try:
            for line in lines:
                self._event(_event(line))
        finally:
            if self.objects != before:
                self._changed()

    def _event(self, event: _Event) -> None:
        about = _object(event.object)
        if event.type == "ERROR":
            if about.code == 410:
                raise Expired
            cause = f"{about.code} {about.message[:200]}"
            raise ApiFailure("watch_error", f"{self._path}: the watch ends with {cause}")
        if event.type == "DELETED":
            self.objects.pop(about.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self.objects[about.metadata.name] = self._kept(about.metadata.name, event.object)
        self._version = about.metadata.resource_version

    async def _get(self, verb: str, params: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._api.get(self._path, params)
        except ApiFailure as error:
            if error.reason == "forbidden":
                raise ApiFailure("forbidden", self._missing_role(verb)) from None
            if error.reason == "not_found":
                name = f"{self._resource}.{self._group}" if self._group else self._resource
                raise ApiFailure("not_found", f"the API server knows no {name}: is its CRD installed?") from None
            raise

    def _missing_role(self, verb: str) -> str:
        return (
            f"may not {verb} {self._resource} in namespace {self._api.cluster.namespace}: bind this pod's service "
            f'account to a Role there with apiGroups: ["{self._group}"], resources: ["{self._resource}"], '
            'verbs: ["get", "list", "watch"]'
        )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """The whole lines of each piece that arrives."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise ApiFailure("too_large", f"an event of more than {MAX_EVENT_BYTES} bytes")
        if lines := [line for line in lines if line]:
            yield lines
