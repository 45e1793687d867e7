"""Turns of conversations before two prefill engines: prompts begin with what the turn before left in one cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.asking import CHAT, ask, prompt
from e2e.pair import LEASE_S, idle, paired
from e2e.rig import Rig

CONVERSATIONS, TURNS = 4, 4


@pytest.fixture
def three() -> Iterator[Rig]:
    with Rig("tiny", prefill=2, decode=1, lease_seconds=LEASE_S) as rig:
        yield rig


def test_later_turns_are_not_computed_anew(three: Rig) -> None:
    first, second = three.prefill
    with paired(first, three.decode[0]) as pair:
        sidecar = pair.serve("--prefill", second.address)
        before = computed(three)
        asked = 0
        for _ in range(CONVERSATIONS):
            messages = [{"role": "user", "content": prompt(500)}]
            decisions = set()
            for _ in range(TURNS):
                body = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0}
                answer = ask(sidecar, CHAT, body)
                assert answer.status == 200
                decisions.add(answer.decision)
                asked += answer.json["usage"]["prompt_tokens"]
                messages += [
                    {"role": "assistant", "content": answer.text},
                    {"role": "user", "content": prompt(40)},
                ]
            assert len(decisions) == 1, decisions
        idle(sidecar)
        # A first turn is computed whole; of a later one what is new, and the block in which it begins.
        assert computed(three) - before < asked * 0.5


def computed(rig: Rig) -> int:
    """Prompt tokens that the prefill engines have computed themselves."""
    return sum(engine.prompt_tokens_by_source()["local_compute"] for engine in rig.prefill)
