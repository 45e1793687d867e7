"""Prompts whose prefix decode holds stay local, exactly: held against the engine's own count of cached tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from e2e.asking import COMPLETIONS, ask, eventually, token_ids
from e2e.engines import HOST
from e2e.pair import BLOCK_TOKENS, LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from tests.ports import free_ports

MINIMUM = 128
PROMPTS = 200
KV_CACHE_BYTES = 128 << 20
"""Room for all of them: what the engine has evicted would rightly go remote."""


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_ports(), free_ports()


@pytest.fixture(scope="module")
def told_rig(ports: tuple[int, int]) -> Iterator[Rig]:
    """A decode engine that publishes its KV events."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{ports[0]}",
        "replay_endpoint": f"tcp://{HOST}:{ports[1]}",
    }
    flags = ["--kv-events-config", json.dumps(config)]
    with Rig(
        "tiny", prefill=1, decode=1, lease_seconds=LEASE_S, decode_flags=flags, kv_cache_bytes=KV_CACHE_BYTES
    ) as rig:
        yield rig


@pytest.fixture
def pair(told_rig: Rig) -> Iterator[Pair]:
    with paired(told_rig.prefill[0], told_rig.decode[0]) as pair:
        yield pair


def test_two_hundred_prompts_around_the_threshold(pair: Pair, ports: tuple[int, int]) -> None:
    sidecar = pair.serve(
        *("--kv-events", "on", "--kv-events-port", str(ports[0]), "--kv-events-replay-port", str(ports[1])),
        *("--min-remote-tokens", str(MINIMUM), "--decision-rule", "static"),
        disagg="auto",
    )
    draw = random.Random(7)

    def send(prompt: list[int]) -> tuple[str, int]:
        """The decision, and what the engine says that it took from its cache."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = ask(sidecar, COMPLETIONS, body)
        assert answer.status == 200
        cached: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.decision.partition("; prefill")[0], cached

    beginnings = [token_ids(20 * BLOCK_TOKENS) for _ in range(5)]
    for beginning in beginnings:
        assert send([*beginning, 7])[0] == "remote"
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") >= 5 * 20)
    kept = 0
    for _ in range(PROMPTS):
        beginning = draw.choice(beginnings)
        held = draw.randrange(0, 20) * BLOCK_TOKENS
        new = draw.randrange(MINIMUM - 20, MINIMUM + 20)
        decision, cached = send([*beginning[:held], *token_ids(new)])
        if new >= MINIMUM:
            assert decision == "remote", (held, new)
            continue
        assert decision == ("local; reason=cached" if held else "local; reason=short"), (held, new)
        assert cached == held
        kept += 1
    assert kept > PROMPTS // 4
    idle(sidecar)
