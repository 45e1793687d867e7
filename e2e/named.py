"""What must hold for every connector whose handoff is a name, by which decode asks the prefill engine for blocks.

Played on a pair of engines that were started with that connector. It must not know which one it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.asking import (
    COMPLETIONS,
    MESSAGES,
    Asking,
    Questions,
    ask,
    eventually,
    local_text,
    prompt,
    request_body,
    text_of,
)
from e2e.engines import HOST
from e2e.pair import Pair, idle
from e2e.tap import Hold
from tests.integration.client import Client

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar

AT_ONCE = 6
PLENTY = ("--recompute-max-concurrent", "64")


@dataclass(frozen=True)
class Named:
    """A pair of engines with such a connector."""

    pair: Pair
    connector: str
    """As `--kv-connector` has it."""
    fetched_tokens: Callable[[], int]
    """Tokens whose KV decode has got from prefill since its start."""
    at_rest: Callable[[], Any]
    """Until no engine holds blocks that nobody will fetch."""
    known_for_s: float = 0.0
    """How long the sidecar takes for granted what it has heard of the prefill engine."""

    def serve(self, *flags: str, **options: Any) -> Sidecar:
        return self.pair.serve("--kv-connector", self.connector, "--pull-timeout", "3", *flags, **options)

    # -- what must hold

    def is_fetched(self) -> None:
        """Every API, streamed and whole, alone and together: the right text, and its KV was fetched."""
        questions = Questions(self.pair.decode)
        sidecar = self.serve()
        before, count = self.fetched_tokens(), 8
        for _ in range(count):
            assert questions.next().ask(sidecar).decision.startswith("remote")
        body = request_body(MESSAGES, prompt(300))  # which knows no salt
        answer = ask(sidecar, MESSAGES, body)
        assert answer.decision.startswith("remote")
        assert text_of(answer) == local_text(self.pair.decode, MESSAGES, body)
        eventually(lambda: self.fetched_tokens() - before > (count + 1) * 200)
        together = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
        assert kinds(together.decisions()) == {"remote"}
        idle(sidecar)

    def is_recomputed_when_prefill_dies_between_the_legs(self) -> None:
        """Decode never hears of a peer that is gone; the engine that comes back at its address is used again."""
        questions = Questions(self.pair.decode)
        tap = self.pair.tap(self.pair.prefill)
        sidecar = self.serve(*PLENTY, prefill=tap.address)
        assert questions.next().ask(sidecar).decision.startswith("remote")
        time.sleep(self.known_for_s)
        hold = Hold(tap, AT_ONCE)
        asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
        hold.wait_for_all()
        self.pair.prefill.kill()
        hold.release()
        assert kinds(asking.decisions(within_s=15)) == {"recompute"}
        assert "handoff_side_channel_dead" in str(sidecar.decisions())
        tap.honest()
        self.pair.prefill.restart()
        before = self.fetched_tokens()

        def fetches_again() -> bool:
            questions.next().ask(sidecar)
            return self.fetched_tokens() > before

        eventually(fetches_again, 60)
        idle(sidecar)

    def is_recomputed_when_prefill_freezes_between_the_legs(self) -> None:
        questions = Questions(self.pair.decode)
        tap = self.pair.tap(self.pair.prefill)
        sidecar = self.serve(*PLENTY, prefill=tap.address)
        hold = Hold(tap, AT_ONCE)
        asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
        hold.wait_for_all()
        self.pair.prefill.stop()
        hold.release()
        assert kinds(asking.decisions(within_s=15)) == {"recompute"}
        self.pair.prefill.cont()
        idle(sidecar)

    def is_answered_when_prefill_dies_while_decode_waits(self) -> None:
        questions = Questions(self.pair.decode, tokens=2000)
        sidecar = self.serve(*PLENTY)
        questions.next().ask(sidecar)
        asking = Asking(sidecar, [questions.next() for _ in range(AT_ONCE)])
        eventually(lambda: sidecar.metrics()("inflight", leg="decode"))
        self.pair.prefill.kill()
        asking.decisions(within_s=25)
        assert self.pair.decode.healthy()
        idle(sidecar)

    def is_given_back_when_the_client_leaves_between_the_legs(self) -> None:
        """Before prefill's answer has come through: nobody but the prefill engine knows of its blocks."""
        tap = self.pair.tap(self.pair.prefill)
        sidecar = self.serve(prefill=tap.address)
        hold = Hold(tap, 1)
        with Client((HOST, sidecar.port)) as client:
            client.request("POST", COMPLETIONS.path, request_body(COMPLETIONS, prompt(300)))
            hold.wait_for_all()
        idle(sidecar)
        hold.release()
        self.at_rest()

    def is_given_back_when_the_client_leaves_while_it_is_fetched(self) -> None:
        questions = Questions(self.pair.decode)
        sidecar = self.serve()
        for delay_s in (0.0, 0.05, 0.1, 0.2):
            with Client((HOST, sidecar.port)) as client:
                client.request("POST", COMPLETIONS.path, request_body(COMPLETIONS, prompt(1500), 200))
                eventually(lambda: sidecar.metrics()("inflight", leg="decode"))
                time.sleep(delay_s)
        idle(sidecar)
        self.at_rest()
        assert questions.next().ask(sidecar).decision.startswith("remote")


def kinds(decisions: list[str]) -> set[str]:
    """`remote`, `recompute`, ..."""
    return {decision.partition(";")[0] for decision in decisions}
