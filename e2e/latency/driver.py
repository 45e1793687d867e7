"""The load: clients that send streamed chat requests to one address and note when each token came.

One event loop, no threads. A request that fails is a record that says how, never an exception; what was sent and
when is decided elsewhere (scenarios.py). It must not know engines, sidecars or what a number is good for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import aiohttp

PATH = "/v1/chat/completions"
IDS_PATH = "/v1/completions"
"""Of prompts that are token ids: nobody has to tokenise them, and everybody knows exactly how long they are."""
REQUEST_TIMEOUT_S = 120.0
RUNNING_EVENTS = 5
"""A background stream runs once it has brought so many tokens: its own prefill is then well behind it."""
BACKGROUND_TIMEOUT_S = 60.0
PULSE_S = 0.02


class LoadError(RuntimeError):
    """The load could not be put on; the text names the address and what it answered."""


@dataclass(frozen=True)
class Turn:
    """One request: what the user says, and how many tokens are generated (always all of them)."""

    text: str
    answer_tokens: int
    ids: tuple[int, ...] = ()
    """Token ids in place of the text."""


@dataclass(frozen=True)
class Client:
    """One client, whose turns follow one another."""

    kind: str
    turns: tuple[Turn, ...]
    at_s: float = 0.0
    """After the start of the window."""
    pause_s: float = 0.0
    """Between the end of an answer and the next turn."""
    remembers: bool = False
    """Each turn carries the whole conversation before it."""
    background: bool = False
    """Runs before the window begins, and is broken off when all others have ended."""
    base_url: str = ""
    """Where it sends its requests; empty: where the others do."""
    later_kind: str = ""
    """What its turns after the first are called; empty: as the first."""


@dataclass(frozen=True)
class Leg:
    """Where a router sends one request."""

    base_url: str = ""
    """Empty: where the others go."""
    headers: tuple[tuple[str, str], ...] = ()
    decision: str = ""
    """What is recorded where no answer tells it."""


class Routing(Protocol):
    """A router's rule, asked before each request of token ids and told what becomes of it."""

    def begin(self, prompt: Sequence[int]) -> Leg: ...

    def first_token(self, prompt: Sequence[int], leg: Leg) -> None:
        """Also where none came."""

    def end(self, prompt: Sequence[int], answer: Sequence[int]) -> None: ...


@dataclass
class Record:
    """One request as its client saw it. Times are seconds from the start of the window."""

    kind: str
    request_id: str
    began_s: float
    status: int = 0
    """0: no answer came."""
    error: str = ""
    """Why the answer is not whole; empty if it is."""
    decision: str = ""
    """The x-pd-decision header."""
    prompt_tokens: int = 0
    ended_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """When each event with a generated token came."""
    broken_off: bool = False
    """By the client, on purpose."""

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.began_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.error or self.broken_off else self.ended_s - self.began_s

    def gaps_s(self, begin_s: float = float("-inf"), end_s: float = float("inf")) -> list[float]:
        """Between one token and the next, for the gaps that reach into these seconds."""
        return [b - a for a, b in pairwise(self.token_s) if b > begin_s and a < end_s]


@dataclass
class Run:
    """All requests of one run."""

    records: list[Record]
    window_s: float
    """From the first request (of those that do not run in the background) to the last answer's end."""
    lateness_s: list[float] = field(default_factory=list)
    """How much later than asked for the load itself was woken, many times in the window: what it shares its core
    with is in every time that it notes."""


Event = tuple[float, Callable[[], Awaitable[None]]]
"""Something that happens so many seconds after the window began."""


async def run(
    base_url: str,
    model: str,
    clients: Sequence[Client],
    *,
    salt: str = "",
    routing: Routing | None = None,
    min_window_s: float = 0.0,
    begin: Callable[[], Awaitable[None]] | None = None,
    events: Sequence[Event] = (),
) -> Run:
    """Puts the load on; `begin` is awaited between the moment when all background streams run and the window.
    Engines share what they have computed only between requests of one `salt`.

    LoadError if a background stream does not get to run; anything that happens later is in the records.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    ) as session:
        load = _Load(session, base_url, {"model": model} | ({"cache_salt": salt} if salt else {}), routing)
        # A pause of the collector would be taken for one of the engine.
        gc.collect()
        gc.disable()
        try:
            return await load.run(clients, min_window_s, begin, events)
        finally:
            gc.enable()


class _Load:
    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, fields: dict[str, str], routing: Routing | None
    ) -> None:
        self._session = session
        self._routing = routing
        self._base_url = base_url
        self._fields = fields  # of every request
        self._zero = time.perf_counter()
        self._over = asyncio.Event()
        self._records: list[Record] = []
        self._lateness_s: list[float] = []

    async def run(
        self,
        clients: Sequence[Client],
        min_window_s: float,
        begin: Callable[[], Awaitable[None]] | None,
        events: Sequence[Event],
    ) -> Run:
        background = [asyncio.create_task(self._client(client)) for client in clients if client.background]
        happening: list[asyncio.Task[None]] = []
        try:
            await self._wait_until_running(len(background))
            if begin:
                await begin()
            self._start_window()
            pulse = asyncio.create_task(self._pulse())
            happening = [asyncio.create_task(_later(at_s, event)) for at_s, event in events]
            await asyncio.gather(
                *(self._client(client) for client in clients if not client.background),
                asyncio.sleep(min_window_s),
            )
            window_s = self._now()
            self._over.set()
            await asyncio.gather(*background, *happening)
            await pulse
        finally:
            for task in (*background, *happening):
                task.cancel()
        return Run(self._records, window_s, self._lateness_s)

    async def _pulse(self) -> None:
        while not self._over.is_set():
            asked_s = self._now() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self._lateness_s.append(self._now() - asked_s)

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _start_window(self) -> None:
        shift = self._now()
        self._zero += shift
        for record in self._records:
            record.began_s -= shift
            record.token_s = [at - shift for at in record.token_s]

    async def _wait_until_running(self, count: int) -> None:
        deadline = self._now() + BACKGROUND_TIMEOUT_S
        while sum(len(record.token_s) >= RUNNING_EVENTS for record in self._records) < count:
            failed = next((record for record in self._records if record.error), None)
            if failed or self._now() > deadline:
                raise LoadError(
                    f"load: a background stream does not run: {failed.error if failed else 'no tokens in time'}"
                )
            await asyncio.sleep(0.01)

    async def _client(self, client: Client) -> None:
        if not client.background:
            await asyncio.sleep(client.at_s - self._now())
        messages: list[dict[str, str]] = []
        said: list[int] = []
        for number, turn in enumerate(client.turns):
            if number:
                await asyncio.sleep(client.pause_s)
            if not client.remembers:
                messages, said = [], []
            if number and client.later_kind:
                client = dataclasses.replace(client, kind=client.later_kind)
            if turn.ids:
                said += turn.ids
                said += await self._ask_ids(client, said, turn.answer_tokens)
                continue
            messages.append({"role": "user", "content": turn.text})
            answer = await self._ask(client, PATH, {"messages": messages}, turn.answer_tokens, Leg())
            messages.append({"role": "assistant", "content": answer.text})

    async def _ask_ids(self, client: Client, prompt: list[int], answer_tokens: int) -> list[int]:
        """One request by the way that the router chooses; the ids that were generated."""
        routing = self._routing
        prompt = list(prompt)
        leg = routing.begin(prompt) if routing else Leg()
        fields = {"prompt": prompt, "return_token_ids": True}
        answer = await self._ask(
            client,
            IDS_PATH,
            fields,
            answer_tokens,
            leg,
            lambda: routing.first_token(prompt, leg) if routing else None,
        )
        if routing:
            routing.end(prompt, answer.ids)
        return answer.ids

    async def _ask(
        self,
        client: Client,
        path: str,
        prompt: dict[str, Any],
        answer_tokens: int,
        leg: Leg,
        first: Callable[[], None] = lambda: None,
    ) -> _Answer:
        """One request; what it generated. The rest is in its record. `first` is called once, at the first token or
        when none can come any more."""
        body = {
            **self._fields,
            **prompt,
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        record = Record(client.kind, uuid.uuid4().hex, self._now())
        self._records.append(record)
        answer = _Answer(record)
        url = leg.base_url or client.base_url or self._base_url
        is_told = False
        try:
            async with self._session.post(
                url + path, data=json.dumps(body), headers=_headers(record.request_id) | dict(leg.headers)
            ) as response:
                record.status = response.status
                record.decision = response.headers.get("x-pd-decision", leg.decision)
                if response.status != 200:
                    record.error = f"status {response.status}: {(await response.text())[:300]}"
                    return answer
                async for data in response.content.iter_any():
                    answer.take(data, self._now())
                    if record.token_s and not is_told:
                        is_told = True
                        first()
                    if client.background and self._over.is_set():
                        record.broken_off = True
                        response.close()
                        return answer
            if not answer.done and not record.error:
                record.error = "the stream ended without [DONE]"
        except TimeoutError:
            record.error = f"not answered within {REQUEST_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"connection to {url}: {error!r}"
        finally:
            record.ended_s = self._now()
            if not is_told:
                first()
        return answer


def _headers(request_id: str) -> dict[str, str]:
    return {"content-type": "application/json", "x-request-id": request_id}


class _Answer:
    """A stream of server-sent events, however it is cut into pieces."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._texts: list[str] = []
        self.ids: list[int] = []
        """Generated ones, of a prompt of token ids."""
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, data: bytes, now_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in self._events(lines):
            if "error" in event:
                self._record.error = f"error event: {json.dumps(event['error'])[:300]}"
                continue
            if self._tokens(event.get("choices", ())):
                self._record.token_s.append(now_s)
            if event.get("usage"):
                self._record.prompt_tokens = event["usage"]["prompt_tokens"]

    def _tokens(self, choices: Sequence[dict[str, Any]]) -> bool:
        """Keeps what was generated, of either API; whether there was anything."""
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        # A token may have no text of its own (half a character); the event with the role is no token.
        deltas = [choice["delta"] for choice in choices if "delta" in choice]
        texts = [delta["content"] for delta in deltas if "role" not in delta and delta.get("content") is not None]
        self.ids += ids
        self._texts += texts
        return bool(ids or texts)

    def _events(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                self._record.error = f"an event is not JSON: {data[:100]!r}"
                continue
            yield event


async def _later(at_s: float, event: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(at_s)
    await event()
