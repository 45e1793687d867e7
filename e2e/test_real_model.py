"""A real instruct model: what a user would see."""

from __future__ import annotations

from typing import Any

from e2e.asking import Api, ask, text_of
from e2e.engines import HOST
from e2e.pair import LEASE_S, paired
from e2e.rig import Rig

QUESTION = "What is the capital of France?"
CHAT = Api("chat", "/v1/chat/completions", lambda p, n: {"messages": p, "max_tokens": n})


def test_it_knows_the_capital_of_france_remotely_too() -> None:
    # Long enough for several blocks, so that a wrong one would show in more than the last words.
    system = (
        "You answer questions about the world in one short sentence, and you say nothing that you do not know. "
    )
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "system", "content": system * 6}, {"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with Rig("smollm2", lease_seconds=LEASE_S) as rig, paired(rig.prefill[0], rig.decode[0]) as pair:
        sidecar = pair.serve()
        remote = ask(sidecar, CHAT, body)
        assert remote.decision == f"remote; prefill={HOST}:{pair.prefill.port}"
        local = ask(pair.decode, CHAT, {**body, "cache_salt": "local"})
        assert text_of(remote) == text_of(local)
        assert "Paris" in text_of(remote)
        assert pair.pulled_tokens() == remote.json["usage"]["prompt_tokens"]
