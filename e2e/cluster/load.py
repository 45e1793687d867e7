"""Clients at the gateway, each with one streamed answer after the other, and what came of every one of them.

Each knows the text that it must get. Must not know what happens to the pods meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import uvloop

from e2e.cluster.gateway import POD, PORT
from tests.engine.tokens import encode
from tests.integration.apis import COMPLETIONS
from tests.integration.client import Answer, events, request
from tests.integration.storm import has_error, text_of

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace

HANG_S = 30.0
PROMPT_TOKENS = (300, 700)
WHOLE = "whole"

Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Outcome:
    """One request."""

    began: float
    """`time.monotonic()`, as `ended`."""
    ended: float = 0.0
    pod: str = ""
    """HOST:PORT, as the gateway says; "" if nothing was said."""
    status: int = 0
    what: str = ""
    """`whole`; or how it went wrong: `cut`, `error event`, `wrong text`, `hangs`, or `503 decode_refused`."""
    decision: str = ""
    silence_s: float = 0.0
    """The longest between two pieces of a stream that had begun."""


@dataclass
class Load:
    """`clients` streams at a time, of `tokens` each. `outcomes` grows; `open` are those under way."""

    address: str
    namespace: Namespace
    clients: int
    tokens: int
    outcomes: list[Outcome] = field(default_factory=list)
    open: dict[int, Outcome] = field(default_factory=dict)
    """By number. With a pod: the answer has begun."""
    _goes_on: bool = True
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        with self.namespace.entered():
            self._thread.start()

    def stop(self) -> None:
        """Every request that was begun is ended."""
        self._goes_on = False
        self._thread.join(2 * HANG_S)
        assert not self._thread.is_alive(), "a client does not end"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(number / self.clients) for number in range(self.clients)))

    async def _client(self, share: float) -> None:
        await asyncio.sleep(3 * share)  # not all at once
        connection: Connection | None = None
        while self._goes_on:
            number = next(self._numbers)
            outcome = self.open[number] = Outcome(time.monotonic())
            answer = Answer()
            try:
                if connection is None:
                    connection = await asyncio.open_connection(self.address, PORT, limit=1 << 20)
                async with asyncio.timeout(HANG_S):
                    outcome.what = await self._request(number, connection, answer, outcome)
            except TimeoutError:
                outcome.what = "hangs"
            except (ConnectionError, asyncio.IncompleteReadError):
                outcome.what = "cut"
            outcome.ended = time.monotonic()
            self.outcomes.append(self.open.pop(number))
            if connection is not None and (outcome.what in ("cut", "hangs") or answer.header("connection")):
                connection[1].transport.abort()
                connection = None
            if outcome.what != WHOLE:
                await asyncio.sleep(float(answer.header("retry-after") or 0.2))
        if connection is not None:
            connection[1].transport.abort()

    async def _request(self, number: int, connection: Connection, answer: Answer, outcome: Outcome) -> str:
        least, most = PROMPT_TOKENS
        prompt = f"{number} " + "how now brown cow " * most
        prompt = prompt[: 4 * (least + number * 37 % (most - least))]
        body = {"model": "sim", "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        connection[1].write(request("POST", COMPLETIONS, body))
        await read(connection[0], answer, outcome)
        return verdict(answer, text_of(encode(prompt), self.tokens))


async def read(reader: asyncio.StreamReader, answer: Answer, outcome: Outcome) -> None:
    """An answer with a length or in chunks; `answer` and `outcome` are filled as it comes."""
    line, *fields = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    answer.status = outcome.status = int(line.split(b" ")[1])
    answer.headers = [(name, value.strip()) for name, _, value in (one.partition(b":") for one in fields)]
    outcome.pod = answer.header(POD) or ""
    outcome.decision = answer.decision
    if (length := answer.header("content-length")) is not None:
        answer.body = await reader.readexactly(int(length))
        return
    assert answer.header("transfer-encoding") == "chunked", answer.headers
    last = time.monotonic()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        answer.body += (await reader.readexactly(size + 2))[:-2]
        outcome.silence_s = max(outcome.silence_s, time.monotonic() - last)
        last = time.monotonic()
    await reader.readexactly(2)


def verdict(answer: Answer, expected: str) -> str:
    """What a whole answer is."""
    if answer.status != 200:
        return f"{answer.status} {answer.reason_code}".strip()
    if has_error(answer):
        return "error event"
    if events(answer.body)[-1] != b"[DONE]" or answer.text != expected:
        return "wrong text"
    return WHOLE
