"""REQ on the event loop against libzmq and against everything that is not: how each ends, and how soon."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.integration.transport.peers import (
    AT_ONCE_SECONDS,
    LOCALHOST,
    Listener,
    black_hole,
    descriptors,
    mute,
    run,
    speaking,
    until,
)
from tests.ports import free_ports
from transport import handshake, zmtp
from transport.handshake import FIRST, Rank
from transport.link import Unanswered
from transport.prober import Endpoint
from transport.req import Req

READY = zmtp.GREETING + zmtp.encode_ready(zmtp.ROUTER)
QUESTION = handshake.encode_request(FIRST)


async def question(at: Endpoint, timeout_seconds: float = 0.1) -> tuple[bytes, ...]:
    req = await Req.connect(*at, frame_bytes_max=100_000, timeout_seconds=timeout_seconds)
    try:
        return await req.ask(QUESTION, timeout_seconds=timeout_seconds)
    finally:
        req.abort()


def test_a_real_router_answers_several_questions_on_one_connection() -> None:
    prefill = Listener("P", ranks=3, padding_bytes=50_000)

    async def main() -> None:
        req = await Req.connect(*prefill.endpoint, frame_bytes_max=100_000, timeout_seconds=1)
        replies = [await req.ask(handshake.encode_request(Rank(0, rank)), timeout_seconds=1) for rank in (2, 0, 1)]
        assert [len(reply) for reply in replies] == [2, 2, 2]
        assert len({reply[0] for reply in replies}) == 3
        req.abort()
        with pytest.raises(Unanswered) as raised:
            await req.ask(QUESTION, timeout_seconds=1)
        assert raised.value.kind == "closed"

    try:
        run(main())
    finally:
        prefill.stop()
    assert prefill.error is None


PEERS: list[tuple[str, Callable[[], AbstractContextManager[Endpoint]]]] = [
    ("refused", lambda: nullcontext(Endpoint(LOCALHOST, free_ports()))),
    ("silent", black_hole),
    ("silent", mute),
    ("silent", lambda: speaking(READY[:40])),
    ("silent", lambda: speaking(zmtp.GREETING)),
    ("silent", lambda: speaking(READY)),
    ("silent", lambda: speaking(READY, zmtp.encode_message(b"", b"half")[:-2])),
    ("garbage", lambda: speaking(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    ("garbage", lambda: speaking(zmtp.GREETING + zmtp.encode_ready(zmtp.PUB))),
    ("garbage", lambda: speaking(READY, b"\x02" + (100 * 2**20).to_bytes(8, "big"))),
    ("garbage", lambda: speaking(READY, zmtp.encode_message(b"no delimiter"))),
    ("garbage", lambda: speaking(READY, b"\xff" * 50)),
    ("name", lambda: nullcontext(Endpoint("no-such-host.invalid", 5600))),
    ("name", lambda: nullcontext(Endpoint("x" * 70, 5600))),
    ("name", lambda: nullcontext(Endpoint("a\0b", 5600))),
    ("name", lambda: nullcontext(Endpoint(LOCALHOST, 99999))),
    ("unreachable", lambda: nullcontext(Endpoint("255.255.255.255", 5600))),
]


@pytest.mark.parametrize(("kind", "peer"), PEERS)
def test_how_a_question_goes_unanswered(kind: str, peer: Callable[[], AbstractContextManager[Endpoint]]) -> None:
    async def main(at: Endpoint) -> None:
        began = time.perf_counter()
        with pytest.raises(Unanswered) as raised:
            await question(at, timeout_seconds=0.2 if kind == "silent" else 5.0)
        assert raised.value.kind == kind
        if kind in ("refused", "garbage"):
            assert time.perf_counter() - began < AT_ONCE_SECONDS

    with peer() as at:
        run(main(at))


def test_a_peer_that_goes_away_is_noticed_at_once_and_said_so_once() -> None:
    prefill = Listener("P")
    ends = []

    async def main() -> None:
        req = await Req.connect(*prefill.endpoint, frame_bytes_max=100_000, timeout_seconds=1)
        req.on_end = lambda: ends.append(req.end)
        await req.ask(QUESTION, timeout_seconds=1)
        assert req.end is None
        await asyncio.to_thread(prefill.stop)
        await until(lambda: req.end is not None)
        req.abort()

    run(main())
    assert len(ends) == 1
    assert ends[0] is not None
    assert ends[0].kind == "closed"


def test_a_late_reply_is_never_taken_for_the_next_one() -> None:
    prefill = Listener("P")

    async def main() -> None:
        req = await Req.connect(*prefill.endpoint, frame_bytes_max=100_000, timeout_seconds=1)
        prefill.running.clear()
        with pytest.raises(Unanswered, match="listener"):
            await req.ask(QUESTION, timeout_seconds=0.05)
        prefill.running.set()
        with pytest.raises(Unanswered):
            await req.ask(QUESTION, timeout_seconds=1)

    try:
        run(main())
    finally:
        prefill.stop()


def test_cancelled_questions_leave_nothing_open() -> None:
    async def main(at: Endpoint) -> None:
        await asyncio.sleep(0)
        before = descriptors()
        for delay_seconds in (0, 0, 0.0005, 0.001, 0.005, 0.02):
            task = asyncio.create_task(question(at, timeout_seconds=1))
            await asyncio.sleep(delay_seconds)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: descriptors() == before)

    with mute() as at:
        run(main(at))
