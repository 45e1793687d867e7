"""What is known of endpoints as they come, go, restart, freeze and disagree."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.integration.transport.peers import (
    AT_ONCE_SECONDS,
    LOCALHOST,
    Listener,
    asked,
    descriptors,
    mute,
    run,
    speaking,
    until,
)
from tests.integration.transport.watched import Watched
from tests.ports import HAS_IPV6, free_ports
from tests.scarce import no_descriptors
from transport import prober, zmtp
from transport.compatibility import Incompatible
from transport.handshake import FIRST, Ranks
from transport.link import Unanswered
from transport.prober import NOT_ASKED, Away, Endpoint, Known, State
from transport.side_channels import UNASKED, Address


@asynccontextmanager
async def watching(*endpoints: Endpoint, **options: Any) -> AsyncIterator[Watched]:
    options.setdefault("refresh_seconds", 0.1)
    channels = Watched(**options)
    try:
        for endpoint in endpoints:
            assert channels.add(endpoint)
        for endpoint in endpoints:
            await channels.settled(endpoint, 2)
        yield channels
    finally:
        await channels.close()


def restarted(port: int, engine_id: str, **options: Any) -> Listener:
    return Listener(engine_id, port=port, **options)


def test_an_engine_is_known_as_soon_as_it_is_added() -> None:
    async def main() -> None:
        async with watching(prefill.endpoint) as channels:
            found = channels.state(prefill.endpoint)
            assert isinstance(found, Known)
            assert found.description.engine_id == "P"
            assert set(prefill.requests) == {(0, 0)}

    with Listener("P", ranks=4) as prefill:
        run(main())


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_an_engine_on_ipv6_is_known_too() -> None:
    async def main() -> None:
        endpoint = Endpoint("::1", prefill.port)
        assert str(endpoint) == f"[::1]:{prefill.port}"
        assert str(prefill.endpoint) == f"{LOCALHOST}:{prefill.port}"
        async with watching(endpoint) as channels:
            where = await channels.relay_address(endpoint, engine_id="P")
            assert isinstance(where, Address)
            assert (await asked(where))[0].decodable

    with Listener("P", host="::1") as prefill:
        run(main())


def test_the_local_engine_saying_the_same_again_judges_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 endpoints that would be a turn of the loop of 20 ms, every few seconds."""
    checked: list[object] = []
    check = prober.check

    def counting(*facts: Any, **options: Any) -> Any:
        checked.append(facts)
        return check(*facts, **options)

    async def main() -> None:
        monkeypatch.setattr(prober, "check", counting)
        async with watching(prefill.endpoint, local=decode.endpoint, refresh_seconds=10) as channels:
            await until(lambda: isinstance(channels.local_state, Known))
            local = channels.prober.local
            assert local is not None
            await channels.prober.refresh(local, 1)
            checked.clear()
            await channels.prober.refresh(local, 1)
            assert not checked
            decode.stop()
            with restarted(decode.port, "D2"):
                await until(lambda: "D2" in str(channels.local_state))
                assert checked, "another engine is another judgement"

    with Listener("P") as prefill, Listener("D") as decode:
        run(main())


def test_what_was_known_holds_while_we_may_open_nothing() -> None:
    """No endpoint is taken for dead by it, and decode's handshakes go on with what is known."""

    async def main() -> None:
        async with watching(prefill.endpoint, refresh_seconds=10) as channels:
            known = channels.state(prefill.endpoint)
            assert isinstance(known, Known)
            channel = channels.prober.channels[prefill.endpoint]
            front = channels._front(channel)
            with no_descriptors():
                where = await channels.relay_address(prefill.endpoint, engine_id="another")
                assert isinstance(where, Away)
                assert where.kind == UNASKED
                assert channels.state(prefill.endpoint) == known
                assert await channels.alive(prefill.endpoint)
                assert (await front.answer(FIRST))[1] == "remembered"
            assert isinstance(await channels.relay_address(prefill.endpoint, engine_id="another"), Incompatible)
            assert not await channels.alive(prefill.endpoint, "another")
            assert (await front.answer(FIRST))[1] == "live"

    with Listener("P") as prefill:
        run(main())


def test_one_that_could_never_be_asked_is_not_dead_either() -> None:
    """Nor is it to blame for a relay without an address; for decode it is silent until we have been there."""

    async def main() -> None:
        async with watching() as channels:
            with no_descriptors():
                assert channels.add(prefill.endpoint)
                channel = channels.prober.channels[prefill.endpoint]
                await until(lambda: channel.unasked)
                assert channels.state(prefill.endpoint) is NOT_ASKED
                with pytest.raises(Unanswered) as caught:
                    await channel.live(FIRST, 1)
                assert caught.value.kind == "silent"
                assert getattr(channels._where(channel), "kind", "") == UNASKED

    with Listener("P") as prefill:
        run(main())


def test_a_handoff_tells_the_sizes_and_all_ranks_are_fetched_once() -> None:
    async def main() -> None:
        async with watching(prefill.endpoint, refresh_seconds=10) as channels:
            assert isinstance(await channels.relay_address(prefill.endpoint, engine_id="P", tp_size=4), Address)
            await until(lambda: len(prefill.requests) >= 5)
            await asyncio.sleep(0.1)  # no more come
            assert sorted(prefill.requests) == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3)]
            engine = channels.prober.channels[prefill.endpoint].engine
            assert engine is not None
            assert engine.ranks == Ranks(pp=1, tp=4)

    with Listener("P", ranks=4) as prefill:
        run(main())
    assert prefill.error is None


def test_sizes_are_believed_once_and_only_if_possible() -> None:
    async def main() -> None:
        async with watching(prefill.endpoint) as channels:
            for tp_size, pp_size in ((0, 1), (-1, 1), (2_000_000_000, 1), (64, 64)):
                refusal = await channels.relay_address(
                    prefill.endpoint, engine_id="P", tp_size=tp_size, pp_size=pp_size
                )
                assert isinstance(refusal, Incompatible)
            assert isinstance(await channels.relay_address(prefill.endpoint, engine_id="P", tp_size=2), Address)
            larger = await channels.relay_address(prefill.endpoint, engine_id="P", tp_size=3)
            assert isinstance(larger, Incompatible)
            assert larger.reason == "tp_size"
            await asyncio.sleep(0.15)

    with Listener("P", ranks=2) as prefill:
        run(main())
    assert prefill.error is None


def test_a_restart_is_noticed_and_the_old_engine_is_forgotten() -> None:
    port = free_ports()

    async def main() -> None:
        first = restarted(port, "P1", ranks=2)
        states: list[State] = []
        options = {"refresh_seconds": 10, "on_state": lambda _, state: states.append(state)}
        async with watching(first.endpoint, **options) as channels:
            where = await channels.relay_address(first.endpoint, engine_id="P1", tp_size=2)
            began = time.perf_counter()
            await asyncio.to_thread(first.stop)
            await until(lambda: isinstance(states[-1], Away))
            assert time.perf_counter() - began < 4  # the connection ended: nothing was asked
            with restarted(port, "P2") as second:
                await until(lambda: isinstance(states[-1], Known))
                stale = await channels.relay_address(first.endpoint, engine_id="P1", tp_size=2)
                assert isinstance(stale, Incompatible)
                assert stale.reason == "engine_id"
                assert await channels.relay_address(first.endpoint, engine_id="P2") == where
                assert isinstance(where, Address)
                (reply,) = await asked(where)
                assert reply.frames[0] == second.payloads[0, 0]
                assert second.error is None

    run(main())


def test_the_first_handoff_after_a_restart_does_not_have_to_wait_for_the_back_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prober, "BACKOFF_FIRST_SECONDS", 60.0)
    port = free_ports()

    async def main() -> None:
        first = restarted(port, "P1")
        async with watching(first.endpoint, refresh_seconds=5) as channels:
            await asyncio.to_thread(first.stop)
            await until(lambda: isinstance(channels.state(first.endpoint), Away))
            with restarted(port, "P2"):
                async with asyncio.timeout(10):  # the next attempt is due much later
                    assert isinstance(await channels.relay_address(first.endpoint, engine_id="P2"), Address)

    run(main())


def test_a_handoff_of_a_new_engine_makes_the_old_one_be_asked_again() -> None:
    """The restart was so quick that nothing was noticed yet."""
    port = free_ports()

    async def main() -> None:
        first = restarted(port, "P1")
        async with watching(first.endpoint, refresh_seconds=60) as channels:
            channel = channels.prober.channels[first.endpoint]
            assert channel.task is not None
            channel.task.cancel()  # nobody is watching
            first.stop()
            with restarted(port, "P2"):
                assert isinstance(await channels.relay_address(first.endpoint, engine_id="P2"), Address)
                assert isinstance(await channels.relay_address(first.endpoint, engine_id="P1"), Incompatible)

    run(main())


def test_a_constant_engine_id_does_not_hide_a_restart() -> None:
    port = free_ports()

    async def main() -> None:
        first = restarted(port, "constant", ranks=2)
        async with watching(first.endpoint) as channels:
            await channels.relay_address(first.endpoint, engine_id="constant", tp_size=2)
            await asyncio.to_thread(first.stop)
            with restarted(port, "constant") as second:
                where = await channels.relay_address(first.endpoint, engine_id="constant")
                assert isinstance(where, Address)
                replies = await asked(where, 0, 1)
                assert replies[0].frames[0] == second.payloads[0, 0]
                assert not replies[1].decodable
                assert second.error is None

    run(main())


def test_a_frozen_engine_is_away_after_the_next_question_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "FETCH_TIMEOUT_SECONDS", 0.2)

    async def main() -> None:
        async with watching(prefill.endpoint) as channels:
            prefill.running.clear()
            await until(lambda: isinstance(channels.state(prefill.endpoint), Away))
            state = channels.state(prefill.endpoint)
            assert isinstance(state, Away)
            assert state.kind == "silent"
            prefill.running.set()
            await until(lambda: isinstance(channels.state(prefill.endpoint), Known))

    with Listener("P") as prefill:
        run(main())


@pytest.mark.parametrize("engine_id", [None, "P"])
def test_alive_is_quick_both_ways(engine_id: str | None) -> None:
    async def main() -> None:
        async with watching(prefill.endpoint, refresh_seconds=60) as channels:
            for _ in range(3):
                assert await channels.alive(prefill.endpoint, engine_id)
            began = time.perf_counter()
            assert await channels.alive(prefill.endpoint, engine_id)
            assert time.perf_counter() - began < AT_ONCE_SECONDS
            assert not await channels.alive(prefill.endpoint, "another")
            prefill.running.clear()
            began = time.perf_counter()
            assert not await channels.alive(prefill.endpoint, engine_id, timeout_seconds=0.1)
            assert 0.09 < time.perf_counter() - began < AT_ONCE_SECONDS
            # One slow answer is no verdict: that is for the watch with its longer patience.
            assert isinstance(channels.state(prefill.endpoint), Known)
            await asyncio.to_thread(prefill.stop)
            began = time.perf_counter()
            assert not await channels.alive(prefill.endpoint, engine_id)
            assert time.perf_counter() - began < AT_ONCE_SECONDS
            assert isinstance(channels.state(prefill.endpoint), Away)
            assert not await channels.alive(Endpoint("10.9.9.9", 1))

    with Listener("P") as prefill:
        run(main())


def test_an_endpoint_removed_while_it_is_probed_is_not_alive() -> None:
    async def main() -> None:
        async with watching(prefill.endpoint, refresh_seconds=60) as channels:
            prefill.running.clear()
            probe = asyncio.create_task(channels.alive(prefill.endpoint))
            await asyncio.sleep(0.02)
            channels.remove(prefill.endpoint)
            assert not await probe
            prefill.running.set()

    with Listener("P") as prefill:
        run(main())


def test_probes_of_one_endpoint_at_the_same_time_are_one() -> None:
    async def main() -> None:
        async with watching(prefill.endpoint, refresh_seconds=60) as channels:
            before = len(prefill.requests)
            assert all(await asyncio.gather(*(channels.alive(prefill.endpoint) for _ in range(100))))
            assert len(prefill.requests) == before + 1

    with Listener("P") as prefill:
        run(main())


# The gate


def test_another_hash_than_the_local_engines_is_incompatible_before_any_prompt() -> None:
    async def main() -> None:
        async with watching(good.endpoint, bad.endpoint, local=local.endpoint) as channels:
            await until(lambda: isinstance(channels.local_state, Known))
            known = channels.state(good.endpoint)
            assert isinstance(known, Known)
            refusal = await channels.relay_address(bad.endpoint, engine_id="P2")
            assert isinstance(refusal, Incompatible)
            assert refusal.reason == "hash"

    with Listener("D") as local, Listener("P1") as good, Listener("P2", compatibility_hash="g") as bad:
        run(main())


def test_when_the_local_engine_comes_late_or_comes_back_different_all_are_judged_again() -> None:
    port = free_ports()

    async def main() -> None:
        local = Endpoint(LOCALHOST, port)
        # Nobody asks the prefill engine again in this time: it is judged by what is known of it.
        async with watching(prefill.endpoint, local=local, refresh_seconds=60) as channels:
            assert isinstance(channels.state(prefill.endpoint), Known)
            assert isinstance(channels.local_state, Away)
            with Listener("D1", port=port, compatibility_hash="g"):
                await until(lambda: isinstance(channels.state(prefill.endpoint), Incompatible))
            with Listener("D2", port=port):
                await until(lambda: isinstance(channels.state(prefill.endpoint), Known))

    with Listener("P") as prefill:
        run(main())


def test_an_endpoint_that_leads_back_to_the_local_engine_is_found_out() -> None:
    async def main() -> None:
        async with watching(local.endpoint, local=local.endpoint) as channels:
            await until(lambda: isinstance(channels.state(local.endpoint), Incompatible))
            state = channels.state(local.endpoint)
            assert isinstance(state, Incompatible)
            assert state.reason == "same_engine"

    with Listener("D") as local:
        run(main())


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({"block_lens": [2048, 2048], "block_strides": [2048, 2048]}, "tensor-parallel size 1, 2 here"),
        (
            {
                "kv_caches_base_addr": [1],
                "block_lens": [4096],
                "block_strides": [4096],
                "region_names": ["layer.0"],
            },
            "pipeline-parallel size 1, 2 here",
        ),
    ],
    ids=["tp", "pp"],
)
def test_a_local_engine_that_is_split_otherwise_is_not_taken_for_one_that_is_not(
    options: dict[str, Any], there: str
) -> None:
    """Nobody tells its sizes: what its first rank holds is not held against an engine with other sizes."""

    async def main() -> None:
        async with watching(prefill.endpoint, local=local.endpoint) as channels:
            await until(lambda: isinstance(channels.local_state, Known))
            assert isinstance(await channels.relay_address(prefill.endpoint, engine_id="P"), Address), there
            state = channels.state(prefill.endpoint)
            assert isinstance(state, Known)

    with Listener("D", ranks=2, **options) as local, Listener("P") as prefill:
        run(main())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
        ("payload", [zmtp.GREETING + zmtp.encode_ready(zmtp.ROUTER), None]),
    ],
)
def test_something_else_behind_the_port_is_away_with_a_reason(kind: str, words: list[bytes | None]) -> None:
    async def main(endpoint: Endpoint) -> None:
        async with watching(endpoint) as channels:
            state = channels.state(endpoint)
            assert isinstance(state, Away)
            assert state.kind == kind
            assert state.change

    if None in words:
        with Listener("P") as prefill:
            prefill.payloads[0, 0] = b"\x80"
            run(main(prefill.endpoint))
    else:
        with speaking(*[word for word in words if word]) as endpoint:
            run(main(endpoint))


def test_an_unexpected_error_takes_one_endpoint_out_of_use_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with watching(prefill.endpoint) as channels:
            monkeypatch.setattr(prober, "check", lambda *_, **__: 1 / 0)
            await until(lambda: isinstance(channels.state(prefill.endpoint), Away))
            monkeypatch.undo()
            await until(lambda: isinstance(channels.state(prefill.endpoint), Known))

    with Listener("P") as prefill:
        run(main())
    assert "unexpected error" in caplog.text


# Bounds


def test_endpoints_are_bounded_and_removal_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "ENDPOINTS_MAX", 2)

    async def main() -> None:
        async with watching(prefill.endpoint) as channels:
            where = await channels.relay_address(prefill.endpoint, engine_id="P")
            assert isinstance(where, Address)
            assert channels.add(prefill.endpoint)
            assert channels.add(Endpoint(LOCALHOST, free_ports()))
            assert not channels.add(Endpoint(LOCALHOST, free_ports()))
            channels.remove(prefill.endpoint)
            channels.remove(prefill.endpoint)
            assert isinstance(channels.state(prefill.endpoint), Away)
            assert channels.prober.remembered_bytes == 0
            await asyncio.sleep(0.01)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*where)
            assert channels.add(prefill.endpoint)
            await channels.settled(prefill.endpoint, 1)
            assert await channels.relay_address(prefill.endpoint, engine_id="P") == where

    with Listener("P") as prefill:
        run(main())


def test_remembered_bytes_are_bounded_and_the_relay_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "REMEMBERED_BYTES_MAX", 150_000)

    async def main() -> None:
        async with watching() as channels:
            channels.add(one.endpoint)
            channels.add(two.endpoint)
            await channels.fetched(one.endpoint, "P1", 2)
            await channels.fetched(two.endpoint, "P2", 2)
            assert 100_000 < channels.prober.remembered_bytes <= 150_000
            for listener, engine_id in ((one, "P1"), (two, "P2")):
                where = await channels.relay_address(listener.endpoint, engine_id=engine_id, tp_size=2)
                assert isinstance(where, Address)
                assert all(reply.decodable for reply in await asked(where, 0, 1))
            channels.remove(one.endpoint)
            channels.remove(two.endpoint)
            assert channels.prober.remembered_bytes == 0

    with (
        Listener("P1", ranks=2, padding_bytes=60_000) as one,
        Listener("P2", ranks=2, padding_bytes=60_000) as two,
    ):
        run(main())


def test_the_back_off_grows_is_jittered_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "BACKOFF_FIRST_SECONDS", 0.02)
    attempts: list[float] = []

    async def main(port: int) -> None:
        server = await asyncio.start_server(
            lambda _, writer: (attempts.append(time.perf_counter()), writer.close()), LOCALHOST, port
        )
        async with watching(Endpoint(LOCALHOST, port)) as channels:
            await asyncio.sleep(0.7)
            assert len(attempts) <= 10
            await until(lambda: len(attempts) >= 4)
            server.close()
            await server.wait_closed()
            with Listener("P", port=port):
                await until(lambda: isinstance(channels.state(Endpoint(LOCALHOST, port)), Known))

    run(main(free_ports()))


def test_fifty_endpoints_of_eight_ranks_come_and_go_without_a_trace() -> None:
    listeners = [Listener(f"P{n}", ranks=8, padding_bytes=10_000) for n in range(50)]

    async def main() -> None:
        async with watching(refresh_seconds=60) as channels:
            await asyncio.sleep(0.01)
            gc.collect()
            before = (descriptors(), threading.active_count(), len(asyncio.all_tasks()))
            began = time.perf_counter()
            for one in listeners:
                channels.add(one.endpoint)
            await asyncio.gather(*(channels.settled(one.endpoint, 5) for one in listeners))
            for n, one in enumerate(listeners):
                where = await channels.relay_address(one.endpoint, engine_id=f"P{n}", tp_size=8)
                assert isinstance(where, Address)
            await until(
                lambda: all(
                    c.engine is not None and len(c.engine.fetched) == 8 for c in channels.prober.channels.values()
                ),
                10,
            )
            assert time.perf_counter() - began < 20
            addresses = {front.address for front in channels._relays.values()}
            assert len(addresses) == 50
            assert 4_000_000 < channels.prober.remembered_bytes < 6_000_000
            # A held connection and a listening socket for each, and here the other end of the connection too.
            await until(lambda: descriptors() == before[0] + 150)
            for one in listeners:
                channels.remove(one.endpoint)
            assert channels.prober.remembered_bytes == 0
            await until(lambda: (descriptors(), threading.active_count(), len(asyncio.all_tasks())) == before)

    try:
        run(main())
    finally:
        for one in listeners:
            one.stop()
    assert all(one.error is None for one in listeners)


def test_many_silent_endpoints_do_not_delay_a_good_one() -> None:
    async def main(dead: list[Endpoint]) -> None:
        async with watching() as channels:
            for endpoint in dead:
                channels.add(endpoint)
            began = time.perf_counter()
            channels.add(prefill.endpoint)
            assert isinstance(await channels.settled(prefill.endpoint, 20), Known)
            assert time.perf_counter() - began < AT_ONCE_SECONDS

    with Listener("P") as prefill, ExitStack() as stack:
        run(main([stack.enter_context(mute()) for _ in range(40)]))
