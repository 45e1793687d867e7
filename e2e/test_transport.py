"""The relay and the gate between real engines: who answers whose handshake, and how soon a pull fails.

The transport room alone, without the sidecar around it: handoffs are taken and given by hand.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import uvloop

from e2e.engines import HOST, Engine
from e2e.rig import Rig
from tests.integration.transport.peers import ask, until
from tests.integration.transport.watched import Watched
from transport import zmtp
from transport.compatibility import Incompatible
from transport.prober import Away, Endpoint, Known
from transport.side_channels import Address

T = TypeVar("T")
PROMPT_TOKENS = 600
EXTRA_SECONDS_MAX = 2.5
"""What an engine pays beyond the computation itself, on a machine that has something else to do. Without the relay
it waits for 5 s each time."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tiny", prefill=1, decode=1) as rig:
        yield rig


@pytest.fixture
def pair(rig: Rig) -> tuple[Engine, Engine]:
    """Both healthy, the decode engine cold: it has not met the prefill engine."""
    for engine in rig.engines:
        engine.cont()
    rig.decode[0].restart()
    if not rig.prefill[0].healthy() or not listens(rig.prefill[0]):
        rig.prefill[0].restart()
    return rig.prefill[0], rig.decode[0]


def listens(engine: Engine) -> bool:
    try:
        ask((HOST, engine.side_channel_port), timeout_seconds=2)
    except Exception:
        return False
    return True


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def side_channel(engine: Engine) -> Endpoint:
    return Endpoint(HOST, engine.side_channel_port)


@asynccontextmanager
async def between(prefill: Engine, decode: Engine) -> AsyncIterator[Watched]:
    channels = Watched(local=side_channel(decode), refresh_seconds=0.5)
    try:
        channels.add(side_channel(prefill))
        await until(lambda: isinstance(channels.local_state, Known), 5)
        await channels.settled(side_channel(prefill), 5)
        yield channels
    finally:
        await channels.close()


def fresh_prompt() -> list[int]:
    return [random.randrange(10, 2000) for _ in range(PROMPT_TOKENS)]


def completion(engine: Engine, prompt: list[int], handoff: dict[str, Any] | None, tokens: int) -> tuple[Any, float]:
    """The answer of `/v1/completions` and how long it took, seconds."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if handoff is not None:
        body["kv_transfer_params"] = handoff
    began = time.perf_counter()
    response = engine.request("POST", "/v1/completions", body)
    assert response.status == 200, response.body
    return response.json(), time.perf_counter() - began


def prefilled(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    answer, _ = completion(engine, prompt, {"do_remote_decode": True}, 1)
    handoff = answer["kv_transfer_params"]
    assert isinstance(handoff, dict)
    return handoff


def text(answer: Any) -> str:
    found = answer["choices"][0]["text"]
    assert isinstance(found, str)
    return found


def pulled(engine: Engine) -> int:
    return engine.prompt_tokens_by_source()["external_kv_transfer"]


async def relayed(channels: Watched, prefill: Engine, handoff: dict[str, Any]) -> dict[str, Any]:
    where = await channels.relay_address(
        side_channel(prefill),
        engine_id=handoff["remote_engine_id"],
        tp_size=handoff["tp_size"],
        pp_size=handoff.get("pp_size") or 1,
    )
    assert isinstance(where, Address), where
    return handoff | {"remote_host": where.host, "remote_port": where.port}


def via(channels: Watched, prefill: Engine, handoff: dict[str, Any]) -> dict[str, Any]:
    """The relay's address although the side channel is gone: it went after the handoff was sent on."""
    host, port = channels._relays[side_channel(prefill)].address
    return handoff | {"remote_host": host, "remote_port": port}


async def local_seconds(decode: Engine) -> float:
    """What a prompt of this length costs here without any handoff: the best of three."""
    times = [(await asyncio.to_thread(completion, decode, fresh_prompt(), None, 8))[1] for _ in range(3)]
    return min(times)


def test_kv_comes_through_the_relay_and_the_text_is_the_same(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair

    async def main() -> None:
        async with between(prefill, decode) as channels:
            known = channels.state(side_channel(prefill))
            assert isinstance(known, Known)
            assert known.description.schema == "14"
            assert known.description.geometry is not None
            assert known.description.geometry.logical_block_size == 32
            prompt = fresh_prompt()
            handoff = await relayed(channels, prefill, await asyncio.to_thread(prefilled, prefill, prompt))
            assert handoff["remote_host"].startswith("127.77.")
            blocks = [block for group in handoff["remote_block_ids"] for block in group]
            assert max(blocks) < known.description.geometry.logical_blocks
            before = pulled(decode)
            remote, _ = await asyncio.to_thread(completion, decode, prompt, handoff, 16)
            assert pulled(decode) - before >= PROMPT_TOKENS - 32
            assert channels.handshakes == {"live": 1}
            local, _ = await asyncio.to_thread(completion, prefill, prompt, None, 16)
            assert text(remote) == text(local)

    run(main())


def test_a_dead_listener_does_not_matter_to_an_engine_that_is_otherwise_well(pair: tuple[Engine, Engine]) -> None:
    """And why everything is checked that passes the relay: this is what one bad message does."""
    prefill, decode = pair

    async def main() -> None:
        async with between(prefill, decode) as channels:
            prompt = fresh_prompt()
            taken = await asyncio.to_thread(prefilled, prefill, prompt)
            handoff = await relayed(channels, prefill, taken)
            for garbage in (zmtp.encode_message(b"", b"\xc1"), zmtp.encode_message(b"", b"\x93\xc4\x01x\x07\x07")):
                with socket.create_connection(channels._relays[side_channel(prefill)].address) as raw:
                    raw.sendall(zmtp.GREETING + zmtp.encode_ready(zmtp.REQ))
                    await asyncio.sleep(0.05)
                    raw.sendall(garbage)
                    await asyncio.sleep(0.05)
            assert await channels.alive(side_channel(prefill))
            with socket.create_connection(side_channel(prefill)) as raw:
                raw.sendall(zmtp.GREETING + zmtp.encode_ready(zmtp.REQ))
                await asyncio.sleep(0.1)
                raw.sendall(garbage)
                await until(lambda: isinstance(channels.state(side_channel(prefill)), Away), 5)
            assert prefill.healthy()
            assert not await channels.alive(side_channel(prefill))
            before = pulled(decode)
            remote, _ = await asyncio.to_thread(completion, decode, prompt, handoff, 8)
            assert channels.handshakes["remembered"] == 1
            assert pulled(decode) - before >= PROMPT_TOKENS - 32
            local, _ = await asyncio.to_thread(completion, prefill, prompt, None, 8)
            assert text(remote) == text(local)
            # Without that memory, in the time that computing takes.
            handoff = via(channels, prefill, await asyncio.to_thread(prefilled, prefill, other := fresh_prompt()))
            channels.prober._forget(channels.prober.channels[side_channel(prefill)])
            await asyncio.to_thread(decode.restart)
            usual = await local_seconds(decode)
            answer, seconds = await asyncio.to_thread(completion, decode, other, handoff, 8)
            print(f"listener dead, nothing remembered: {seconds:.3f} s, computing alone {usual:.3f} s")
            assert channels.handshakes["refused"] >= 1
            assert seconds < usual + EXTRA_SECONDS_MAX
            local, _ = await asyncio.to_thread(completion, prefill, other, None, 8)
            assert text(answer) == text(local)

    run(main())


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_an_engine_that_went_in_between_costs_no_time(pair: tuple[Engine, Engine], how: str) -> None:
    prefill, decode = pair

    async def main() -> None:
        async with between(prefill, decode) as channels:
            usual = await local_seconds(decode)
            prompt = fresh_prompt()
            handoff = await relayed(channels, prefill, await asyncio.to_thread(prefilled, prefill, prompt))
            await asyncio.to_thread(prefill.kill if how == "killed" else prefill.stop)
            # No handshake succeeds, so no block is ever read: the handoff can be tried with several prompts.
            tries = [(prompt, handoff), *((fresh_prompt(), handoff) for _ in range(2))]
            times = [(await asyncio.to_thread(completion, decode, *one, 8))[1] for one in tries]
            print(f"{how}: {times} s, computing alone {usual:.3f} s, {dict(channels.handshakes)}")
            assert sum(channels.handshakes.values()) == 3
            assert max(times) < usual + EXTRA_SECONDS_MAX
            prefill.cont()

    run(main())


def test_a_restarted_engine_is_used_again_with_its_first_handoff(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair

    async def main() -> None:
        async with between(prefill, decode) as channels:
            first = channels.state(side_channel(prefill))
            assert isinstance(first, Known)
            prompt = fresh_prompt()
            old = await asyncio.to_thread(prefilled, prefill, prompt)
            await asyncio.to_thread(completion, decode, prompt, await relayed(channels, prefill, old), 4)
            await asyncio.to_thread(prefill.restart)
            prompt = fresh_prompt()
            handoff = await relayed(channels, prefill, await asyncio.to_thread(prefilled, prefill, prompt))
            before = pulled(decode)
            remote, _ = await asyncio.to_thread(completion, decode, prompt, handoff, 16)
            assert pulled(decode) - before >= PROMPT_TOKENS - 32
            local, _ = await asyncio.to_thread(completion, prefill, prompt, None, 16)
            assert text(remote) == text(local)
            stale = await channels.relay_address(
                side_channel(prefill), engine_id=old["remote_engine_id"], tp_size=1
            )
            assert isinstance(stale, Incompatible)

    run(main())


def test_engines_of_different_dtypes_are_incompatible_before_any_prompt() -> None:
    async def main(prefill: Engine, decode: Engine) -> None:
        async with between(prefill, decode) as channels:
            await until(lambda: isinstance(channels.state(side_channel(prefill)), Incompatible), 5)
            found = channels.state(side_channel(prefill))
            assert isinstance(found, Incompatible)
            print(found)
            assert found.reason == "hash"
            assert "dtype" in found.cause

    with Rig("tiny", prefill=1, decode=1, decode_flags=["--dtype", "bfloat16"]) as rig:
        run(main(rig.prefill[0], rig.decode[0]))
