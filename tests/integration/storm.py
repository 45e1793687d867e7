"""A storm of requests of all kinds on a sidecar between simulated engines, with faults of all kinds on both sides,
drawn from a seed: clients that check every answer, and what befalls whole engines meanwhile.

It must not know how long it lasts or what must hold at its end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from sidecar.exchange.failures import ROWS
from tests.engine import Engine, Fault
from tests.engine.apis.chat import render
from tests.engine.blocks import ROOT, chain, seed_of
from tests.engine.tokens import encode, words
from tests.integration.apis import APIS, CHAT, COMPLETIONS, GENERATE
from tests.integration.client import Answer, events, request
from tests.integration.sidecar import KEY

CLIENTS = 48
HANG_S = 20.0
BLOCK_SIZE = 16
OUTPUT_TOKENS = 4

Params = dict[str, Any]


def lie(change: Params) -> Callable[[Params], Params]:
    return lambda params: {**params, **change}


PREFILL_FAULTS: list[tuple[float, Fault]] = [
    (0.010, Fault(reset="before_head")),
    (0.005, Fault(reset="after_head")),
    (0.010, Fault(status=503)),
    (0.010, Fault(status=429)),
    (0.010, Fault(status=400)),
    (0.003, Fault(status=302, headers=[("Location", "http://169.254.169.254/")])),
    (0.005, Fault(raw=b"\x00\xff nonsense\r\n\r\n")),
    (0.005, Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")),
    (0.005, Fault(handoff_absent=True)),
    (0.003, Fault(handoff=lie({"remote_port": 0}))),
    (0.003, Fault(handoff=lie({"remote_block_ids": [[1]]}))),
    (0.003, Fault(handoff=lie({"remote_host": "10.0.0.1"}))),
    (0.003, Fault(handoff=lie({"remote_request_id": None}))),
    (0.005, Fault(cut_after_bytes=50)),
    (0.002, Fault(stall_after_bytes=50)),
    (0.002, Fault(silence=True)),
    (0.030, Fault(close_after=True)),
    (0.020, Fault(delay_head_seconds=0.05)),
    (0.010, Fault(pad_bytes=100_000)),
    (0.010, Fault(drip_bytes=100, drip_seconds=0.001)),
    (0.005, Fault(extra_after_end=b"HTTP/1.1 200 OK\r\n\r\n")),
    (0.005, Fault(close_delimited=True)),
    (0.005, Fault(interim=b"HTTP/1.1 103 Early Hints\r\n\r\n")),
]
DECODE_FAULTS: list[tuple[float, Fault]] = [
    (0.010, Fault(reset="before_head")),
    (0.005, Fault(reset="after_head")),
    (0.010, Fault(status=500)),
    (0.005, Fault(status=503, headers=[("Retry-After", "1")])),
    (0.010, Fault(status=422)),
    (0.010, Fault(error_event_first=True)),
    (0.005, Fault(error_event_after=2)),
    (0.010, Fault(cut_after_events=3)),
    (0.005, Fault(cut_after_bytes=40)),
    (0.005, Fault(cut_after_bytes=40, reset="at_cut")),
    (0.005, Fault(raw=b"HTTP/1.1 200\nno")),
    (0.005, Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")),
    (0.030, Fault(close_after=True)),
    (0.050, Fault(ragged=True)),
    (0.020, Fault(delay_head_seconds=0.05)),
    (0.010, Fault(drip_bytes=50, drip_seconds=0.001)),
    (0.010, Fault(close_delimited=True)),
    (0.010, Fault(http_1_0=True)),
    (0.010, Fault(trailers=[("X-T", "1")])),
    (0.010, Fault(interim=b"HTTP/1.1 102 Processing\r\n\r\n")),
    (0.005, Fault(extra_after_end=b"more")),
    (0.010, Fault(pad_bytes=100_000)),
]
OWN = {(row.reason, row.status) for row in ROWS if row.status}
RELAYED = {400, 422, 500, 503}
"""Statuses that the engines answer with in this storm."""


def text_of(tokens: Any, count: int = OUTPUT_TOKENS) -> str:
    """What the simulated engine makes of a prompt."""
    contents = chain(ROOT, tokens, BLOCK_SIZE)
    return "".join(itertools.islice(words(seed_of(contents)), count))


class Storm:
    """The clients: each has a connection that it keeps while it can."""

    def __init__(self, port: int, engines: list[Engine], seed: int) -> None:
        self.port = port
        self.engines = engines
        self.seed = seed
        self.sent = 0
        self.seen: Counter[str] = Counter()
        """Answers by what became of them."""
        self.wrong: list[str] = []
        """What no row of the failure table allows."""

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Until `goes_on` says no; every request that was begun is ended."""
        dice = random.Random(self.seed)
        clients = [random.Random(dice.random()) for _ in range(CLIENTS)]
        await asyncio.gather(*(self._client(client, goes_on) for client in clients))

    async def _client(self, dice: random.Random, goes_on: Callable[[], bool]) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while goes_on():
            self.sent += 1
            if self.sent % 500 == 0:
                for engine in self.engines:
                    engine.requests.clear()
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
            try:
                keeps = await asyncio.wait_for(self._request(dice, *connection), HANG_S)
            except TimeoutError:
                self.wrong.append("a request hangs")
                keeps = False
            except ConnectionError:
                self.seen["connection ended"] += 1
                keeps = False
            if not keeps:
                connection[1].transport.abort()
                connection = None
        if connection is not None:
            connection[1].transport.abort()

    async def _request(
        self, dice: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request; whether the connection can take another."""
        what = dice.random()
        if what < 0.02:
            writer.write(
                request("POST", COMPLETIONS, dice.choice([b"[]", b"{", b"\xff"]), [("Authorization", KEY)])
            )
            return self._check(await read(reader), 400, "")
        if what < 0.03:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n")
            return self._check(await read(reader), 400, "")
        if what < 0.06:
            writer.write(request("GET", dice.choice(["/v1/models", "/nowhere", "/version"])))
            return self._check(await read(reader), 0, "")
        path, body = self._body(dice)
        data = request("POST", path, body, [("Authorization", KEY)])
        if what < 0.08:  # leaves in mid-request
            writer.write(data[: dice.randrange(len(data))])
            return False
        writer.write(data)
        if what < 0.12:  # leaves before the answer
            await asyncio.sleep(dice.random() * 0.05)
            return False
        if what < 0.15:  # leaves in mid-answer
            await reader.read(1)
            return False
        answer = await read(reader)
        expected = ""
        if path == COMPLETIONS:
            expected = text_of(encode(body["prompt"]))
        elif path == CHAT:
            expected = text_of(encode(render(body)))
        return self._check(answer, 200, expected)

    @staticmethod
    def _body(dice: random.Random) -> tuple[str, Params]:
        path = dice.choices(list(APIS), weights=[8, 8, 2, 2, 2])[0]
        tokens = 20_000 if dice.random() < 0.002 else dice.randrange(20, 300)
        body = APIS[path](tokens)
        if dice.random() < 0.5:
            body["stream"] = True
            if path in (COMPLETIONS, CHAT) and dice.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        if path in (COMPLETIONS, CHAT):
            body["max_tokens"] = OUTPUT_TOKENS
        if path != GENERATE and dice.random() < 0.1:
            body["kv_transfer_params"] = {"do_remote_prefill": True, "remote_host": "169.254.169.254"}
        return path, body

    def _check(self, answer: Answer | None, status: int, expected: str) -> bool:
        """Whether the connection can take another request; notes what no row of the table allows."""
        if answer is None:
            self.seen["cut"] += 1
            return False
        keeps = answer.header("connection") != "close"
        if reason := answer.reason_code:
            self.seen[reason] += 1
            if (reason, answer.status) not in OWN:
                self.wrong.append(f"{answer.status} with {reason}")
            return keeps
        self.seen[f"{answer.status} {answer.decision.split('; prefill')[0]}"] += 1
        if answer.status != 200:
            if answer.status not in RELAYED | {404}:
                self.wrong.append(f"{answer.status}: {answer.body[:200]!r}")
            return keeps
        if not expected or status != 200:
            return keeps
        try:
            text = None if has_error(answer) else answer.text
        except (AssertionError, ValueError):
            text = ""
        if text is None:
            self.seen["error event"] += 1
        elif is_open_ended(answer) and expected.startswith(text):
            self.seen["open-ended"] += 1  # cut or not, nobody can know
        elif text != expected:
            self.wrong.append(f"wrong text: {answer.body!r} for {expected!r} ({answer.decision})")
        return keeps


def is_open_ended(answer: Answer) -> bool:
    """Its end is that of the connection."""
    return answer.header("content-length") is None and answer.header("transfer-encoding") is None


def has_error(answer: Answer) -> bool:
    if not (answer.header("content-type") or "").startswith("text/event-stream"):
        return answer.body == b"zz"
    return any(event.startswith(b'{"error"') for event in events(answer.body))


async def read(reader: asyncio.StreamReader) -> Answer | None:
    """The next answer, None if it was cut. An error event in a stream that is then cut is an answer."""
    answer = Answer(status=100)
    try:
        while answer.status < 200:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *fields = head[:-4].split(b"\r\n")
            answer.status = int(line.split(b" ")[1])
            answer.headers = [(name, value.strip()) for name, _, value in (one.partition(b":") for one in fields)]
        pieces: list[bytes] = []
        if answer.header("transfer-encoding"):
            while size := int(await reader.readuntil(b"\r\n"), 16):
                pieces.append((await reader.readexactly(size + 2))[:-2])
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif (length := answer.header("content-length")) is not None:
            pieces.append(await reader.readexactly(int(length)))
        else:
            pieces.append(await reader.read(-1))
        answer.body = b"".join(pieces)
    except asyncio.IncompleteReadError as error:
        if answer.status == 100 and not error.partial:
            raise ConnectionError from None  # the connection ended between two answers
        return None
    return answer


def add_faults(engine: Engine, faults: list[tuple[float, Fault]]) -> None:
    for probability, fault in faults:
        engine.faults.add(fault, probability=probability, when=lambda one: one.method == "POST")


async def chaos(decode: Engine, prefills: list[Engine], goes_on: Callable[[], bool]) -> None:
    """What befalls whole engines meanwhile, one after the other; at the end all are well."""
    for prefill in itertools.cycle(prefills[:3]):
        if not goes_on():
            return
        await asyncio.sleep(0.4)
        prefill.freeze()
        await asyncio.sleep(0.4)
        prefill.thaw()
        await asyncio.sleep(0.4)
        await prefill.restart()
        await asyncio.sleep(0.4)
        await prefill.refuse()
        await asyncio.sleep(0.2)
        await prefill.accept()
        prefill.break_side_channel()
        await asyncio.sleep(0.2)
        await prefill.restart()
        await asyncio.sleep(0.2)
        await decode.refuse()
        decode.server.abort_all()
        await asyncio.sleep(0.02)
        await decode.accept()


def flags(engines: list[Engine]) -> tuple[str, ...]:
    """Of a sidecar between these: the first decodes, the others prefill."""
    decode, *prefills = engines
    return (
        *("--model-server-port", str(decode.port), "--disagg", "on", "--prefill-timeout", "0.5"),
        *("--recompute-max-concurrent", "32", "--pull-timeout", "1"),
        *(flag for engine in prefills for flag in ("--prefill", engine.address)),
    )


async def start(engines: list[Engine]) -> None:
    """All of them, with their faults."""
    for engine in engines:
        await engine.start()
    decode, *prefills = engines
    for engine in prefills:
        add_faults(engine, PREFILL_FAULTS)
    add_faults(decode, DECODE_FAULTS)


async def calm(engines: list[Engine]) -> None:
    """No more faults; what clients left behind comes to its end: a handoff is let to its first byte, a stage to its
    deadline."""
    for engine in engines:
        engine.faults.clear()
    for _ in range(250):
        if any(engine.running for engine in engines):
            await asyncio.sleep(0.02)
