"""Prompts whose prefix decode holds stay local: held against the engine's own count of cached tokens."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from e2e.asking import CHAT, COMPLETIONS, ask, eventually, prompt, token_ids
from e2e.engines import HOST
from e2e.pair import BLOCK_TOKENS, LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar

MINIMUM = 128
SETTLE_S = 0.15
"""The engine tells what a step did to its cache after that step, at the latest after 0.1 s."""
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


def serve(pair: Pair, ports: tuple[int, int]) -> Sidecar:
    return pair.serve(
        *("--kv-events", "on", "--kv-events-port", str(ports[0]), "--kv-events-replay-port", str(ports[1])),
        *("--min-remote-tokens", str(MINIMUM), "--decision-rule", "static"),
        disagg="auto",
    )


def test_two_hundred_prompts_around_the_threshold(pair: Pair, ports: tuple[int, int]) -> None:
    sidecar = serve(pair, ports)
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


Turn = tuple[str, int, int, int]
"""The decision, the prompt's tokens, how many of them the sidecar knew to be cached, and how many were."""


def say(sidecar: Sidecar, messages: list[dict[str, str]], *, stream: bool) -> Turn:
    """One turn of a chat; the answer is put behind its messages."""
    time.sleep(SETTLE_S)
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "stream": stream}
    answer = ask(sidecar, CHAT, {**body, **({"stream_options": {"include_usage": True}} if stream else {})})
    assert answer.status == 200, answer.body
    usage = json.loads(answer.body.split(b"data: ")[-2]) if stream else answer.json
    messages.append({"role": "assistant", "content": answer.text})
    record = sidecar.decisions()[0]
    held: int = usage["usage"]["prompt_tokens_details"]["cached_tokens"]
    known = record.get("inputs", {}).get("cached", 0)
    return answer.decision.partition("; prefill")[0], usage["usage"]["prompt_tokens"], known, held


@pytest.mark.parametrize("stream", [True, False])
def test_turns_of_a_chat(pair: Pair, ports: tuple[int, int], stream: bool) -> None:
    """Each has few tokens behind what the engine holds, all together have many: only the first goes remote."""
    sidecar = serve(pair, ports)
    ask(sidecar, COMPLETIONS, {"model": "tiny", "prompt": token_ids(100), "max_tokens": 1})
    eventually(lambda: sidecar.metrics()("prefix_index_blocks") > 0)  # it has told how long its blocks are
    for _ in range(3):
        messages = [{"role": "user", "content": prompt(900)}]
        decision, first, _, _ = say(sidecar, messages, stream=stream)
        assert decision == "remote"
        for turn in range(12):
            messages.append({"role": "user", "content": prompt(20)})
            decision, tokens, known, held = say(sidecar, messages, stream=stream)
            assert decision == "local; reason=cached", turn
            assert known <= held, turn
            assert tokens - held < MINIMUM, turn
        assert tokens - first > 2 * MINIMUM
    idle(sidecar)


def test_chats_that_decode_has_evicted(pair: Pair, ports: tuple[int, int]) -> None:
    """More of them than its cache holds: whatever stays here as cached is here."""
    sidecar = serve(pair, ports)
    draw = random.Random(11)
    chats = [[{"role": "user", "content": prompt(draw.randrange(4000, 6000))}] for _ in range(40)]
    stayed = evicted = 0
    for _ in range(90):
        messages = draw.choice(chats)
        is_later = len(messages) > 1
        decision, tokens, known, held = say(sidecar, messages, stream=True)
        if decision == "local; reason=cached":
            assert known <= held
            assert tokens - held < MINIMUM
            stayed += 1
        else:
            assert decision == "remote"
            evicted += is_later
        messages.append({"role": "user", "content": prompt(30)})
    assert stayed > 10
    assert evicted > 3, "and found so"
    idle(sidecar)
