"""The prefix index against a real engine's own count of cached tokens: with LoRA, salts, evictions and gaps."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from e2e.engines import HOST, Engine
from e2e.pair import BLOCK_TOKENS
from e2e.rig import Rig
from tests.integration.transport.peers import until
from tests.ports import free_ports
from transport.kv_events import KvEvents
from transport.prefix_index import PrefixIndex

T = TypeVar("T")
HIDDEN, RANK, LAYERS = 128, 8, 2  # of the tiny model
# Little more than the longest prompt needs, so that blocks are evicted all the time.
KV_CACHE_BYTES = 9 << 20
PUBLISHED_WITHIN_SECONDS = 0.15


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny model's value projections. Safetensors is a header and bytes: no library."""
    source = random.Random(seed)
    header: dict[str, Any] = {}
    body = b""
    for layer in range(LAYERS):
        for half, shape in (("A", [RANK, HIDDEN]), ("B", [64, RANK])):
            data = struct.pack(
                f"<{shape[0] * shape[1]}f", *(source.gauss(0, 0.05) for _ in range(shape[0] * shape[1]))
            )
            name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{half}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
    folder.mkdir()
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Ports:
    def __init__(self) -> None:
        self.events = free_ports()
        self.replay = free_ports()


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports()


@pytest.fixture(scope="module")
def engine(ports: Ports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("adapters")
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{ports.events}",
        "replay_endpoint": f"tcp://{HOST}:{ports.replay}",
        "topic": "kv",
    }
    flags = [
        "--kv-events-config",
        json.dumps(config),
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--max-loras",
        "2",
    ]
    flags += ["--lora-modules", *(f"{name}={write_adapter(folder / name, ord(name))}" for name in "ab")]
    with Rig(
        "tiny", prefill=0, decode=1, kv_connector=None, kv_cache_bytes=KV_CACHE_BYTES, decode_flags=flags
    ) as rig:
        yield rig.decode[0]


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def told(events: KvEvents, ids: list[int], lora: str | None, salt: str | None) -> None:
    """Until the blocks of a prompt that was just computed are known, and those that were evicted for it. Both are
    published after a step of the engine; of evictions alone nothing can be waited for but their time."""
    whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    await asyncio.sleep(PUBLISHED_WITHIN_SECONDS)
    await until(lambda: events.cached_tokens(ids, lora_name=lora, cache_salt=salt) == whole)


def cached_tokens(engine: Engine, ids: list[int], lora: str | None, salt: str | None) -> int:
    """Send the prompt; what the engine says it took from its cache."""
    body: dict[str, Any] = {"model": lora or "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0}
    if salt:
        body["cache_salt"] = salt
    response = engine.request("POST", "/v1/completions", body)
    assert response.status == 200, response.body
    found = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


class Prompts:
    """Prompts that begin like earlier ones, now and then."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.earlier: list[tuple[list[int], str | None, str | None]] = []

    def next(self, *, plain: bool = False) -> tuple[list[int], str | None, str | None]:
        source = self.source
        ids: list[int] = []
        lora = None if plain else source.choice((None, None, "a", "b"))
        salt = None if plain else source.choice((None, None, "s"))
        if self.earlier and source.random() < 0.8:
            before, before_lora, before_salt = source.choice(self.earlier[-15:])
            ids = before[: source.randrange(len(before))]
            if source.random() < 0.8:
                lora, salt = before_lora, before_salt
        ids = ids + [source.randrange(10, 2000) for _ in range(source.randrange(1, 500))]
        ids += [7] if len(ids) % 32 == 0 else []
        self.earlier.append((ids, lora, salt))
        return self.earlier[-1]


def test_index_and_engine_agree_on_two_hundred_prompts(engine: Engine, ports: Ports) -> None:
    async def main() -> None:
        events = KvEvents(PrefixIndex(), port=ports.events, replay=(HOST, ports.replay))
        try:
            await until(lambda: events.current, 10)
            prompts = Prompts(1)
            differing = []
            hits = 0
            for number in range(200):
                ids, lora, salt = prompts.next()
                predicted = events.cached_tokens(ids, lora_name=lora, cache_salt=salt)
                actual = await asyncio.to_thread(cached_tokens, engine, ids, lora, salt)
                await told(events, ids, lora, salt)
                hits += actual > 0
                if predicted != actual:
                    differing.append((number, lora, salt, len(ids), predicted, actual))
            print(dict(events.counts), dict(events.index.counts), f"{len(events.index)} blocks, {hits} hits")
            assert differing == []
            assert hits > 60
            assert events.index.counts["removed"] > 100  # there was not room for all
            assert events.index.counts["orphaned"] == events.index.counts["foreign"] == 0
        finally:
            await events.close()

    run(main())


def test_after_a_gap_and_after_a_late_start_they_agree_again(engine: Engine, ports: Ports) -> None:
    async def main() -> None:
        prompts = Prompts(2)
        for _ in range(5):
            await asyncio.to_thread(cached_tokens, engine, *prompts.next(plain=True))
        events = KvEvents(PrefixIndex(), port=ports.events, replay=(HOST, ports.replay))
        try:
            await until(lambda: events.current, 10)
            for number in range(30):
                ids, lora, salt = prompts.next(plain=True)
                if number % 5 == 2:
                    assert events._publisher is not None
                    events._publisher.abort()  # what is published until it has connected again is lost
                    lost = prompts.next(plain=True)
                    await asyncio.to_thread(cached_tokens, engine, *lost)
                    await until(lambda: events.current, 10)
                    await told(events, *lost)
                predicted = events.cached_tokens(ids)
                assert predicted == await asyncio.to_thread(cached_tokens, engine, ids, lora, salt)
                await told(events, ids, lora, salt)
            print(dict(events.counts))
            assert events.counts["replay"] >= 7
            assert "gap" not in events.counts
        finally:
            await events.close()

    run(main())


def test_a_restarted_engine_holds_nothing(engine: Engine, ports: Ports) -> None:
    async def main() -> None:
        events = KvEvents(PrefixIndex(), port=ports.events, replay=(HOST, ports.replay))
        try:
            await until(lambda: events.current, 10)
            ids = [random.randrange(10, 2000) for _ in range(300)]
            await asyncio.to_thread(cached_tokens, engine, ids, None, None)
            await until(lambda: events.cached_tokens(ids) == 288)
            await asyncio.to_thread(engine.restart)
            await until(lambda: events.current, 10)
            assert events.cached_tokens(ids) == 0
            assert events.counts["restart"] == 1
            assert await asyncio.to_thread(cached_tokens, engine, ids, None, None) == 0
            await until(lambda: events.cached_tokens(ids) == 288)
        finally:
            await events.close()

    run(main())
