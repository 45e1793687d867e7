"""10,000 requests of all kinds, with faults of all kinds on both sides, drawn from one seed: nothing hangs, nothing
is left, every answer is one of those that the failure table allows, and a whole one has the right text."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import uvloop

from tests.engine import Engine
from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import Sidecar, completion, eventually
from tests.integration.storm import Storm, calm, chaos, flags, start

SEED = 20
REQUESTS = 10_000
WARM_AFTER = 2_000


async def storm(engines: list[Engine], result: dict[str, Any]) -> None:
    decode, *prefills = engines
    await start(engines)
    loop = asyncio.get_running_loop()
    sidecar = result["sidecar"] = await loop.run_in_executor(None, lambda: Sidecar(*flags(engines)))
    storm = Storm(sidecar.port, engines, SEED)
    trouble = asyncio.create_task(chaos(decode, prefills, lambda: storm.sent < REQUESTS))
    await storm.run(lambda: storm.sent < WARM_AFTER)
    result["warm"] = sidecar.rss_mib
    await storm.run(lambda: storm.sent < REQUESTS)
    result["storm"] = storm
    await trouble
    await calm(engines)
    result["running"] = [engine.running for engine in engines]
    result["deaths"] = [engine.cause_of_death for engine in engines if not engine.alive]
    result["remote"] = decode.counter("prompt_tokens_external_kv_transfer")
    for engine in engines:
        await engine.stop()


def test_storm() -> None:
    engines = [Engine(num_blocks=16384) for _ in range(5)]
    result: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(storm(engines, result))
        sidecar, seen = result["sidecar"], result["storm"].seen
        print(f"{time.monotonic() - began:.0f} s; RSS {result['warm']:.1f} MiB, then {sidecar.rss_mib:.1f}")
        print(json.dumps(dict(seen.most_common()), indent=1))
        assert result["storm"].wrong == []
        assert result["deaths"] == []
        assert result["running"] == [0] * 5
        assert result["remote"] > 100_000, "most of it should have been what the sidecar is for"

        eventually(lambda: not sidecar.in_flight())
        own = {sidecar.admin_port, *(engine.side_channel_port for engine in engines)}
        eventually(
            lambda: all({one.local_port, one.remote_port} & own for one in sidecar.descriptors().connections), 10
        )
        assert sidecar.rss_mib - result["warm"] < 8
        assert sidecar.rss_mib < 60
        assert sidecar.threads < 12
        assert sidecar.ask("POST", COMPLETIONS, completion(10)).status == 503  # the engines are gone, it is not
    finally:
        if "sidecar" in result:
            result["sidecar"].stop()
