"""The end of a request: what it held is given back, whoever waits hears of it, whatever goes wrong on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.edge import runner as room
from sidecar.edge.request import Request
from sidecar.edge.runner import Runner
from sidecar.exchange.life import Exchange
from tests.unit.exchange.playbook import World


class Bench:
    """A request that decode computes within the budget, with all that an ending has to do with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        self.done: list[str] = []
        self.world = World()
        self._broken = broken

        def step(name: str) -> Any:
            return lambda *_args, **_more: self._step(name)

        for name in ("end_turn", "learn"):
            monkeypatch.setattr(room, name, step(name))
        observer = SimpleNamespace(leg_ended=step("leg_ended"), finished=step("observer"))
        service: Any = SimpleNamespace(
            observer=observer,
            tracer=SimpleNamespace(begin=lambda _request: SimpleNamespace(trace_id=""), finished=step("tracer")),
            rules=SimpleNamespace(ended_here=step("ended_here"), models=None),
        )
        self.aborted = 0
        client: Any = SimpleNamespace(answered=step("client"), abort=self._abort)
        headers = [(b"host", b"a"), (b"x-request-id", b"r-1")]
        request = Request(b"POST", b"/v1/chat/completions", headers, http_1_0=False, started_at=0.0)
        request.take_request_id()
        self.runner = runner = Runner(service, client, request)
        play = self.world.budgeted()
        play.exchange.start()
        assert self.world.budget.in_flight
        runner._exchange = play.exchange
        leg: Any = SimpleNamespace(name="decode", drop=step("leg"), tail=b"")
        runner._leg = leg
        runner._turn = SimpleNamespace()  # type: ignore[assignment]
        runner._timer = SimpleNamespace(cancel=step("timer"))  # type: ignore[assignment]
        runner._unwatch = step("watch")
        runner._computing_here = 40
        monkeypatch.setattr(Exchange, "take_release", step("release"))

    def _abort(self) -> None:
        self.aborted += 1

    def _step(self, name: str) -> None:
        self.done.append(name)
        if name == self._broken:
            raise RuntimeError(f"a bug in {name}")


HELD = ["ended_here", "leg", "release", "timer", "watch"]
TOLD = ["client", "end_turn", "learn", "observer", "tracer"]
ALL = sorted([*HELD, "leg_ended", *TOLD])


@pytest.mark.parametrize("broken", ["", *HELD, *TOLD])
def test_an_error_while_a_request_ends_costs_what_it_is_about_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    bench = Bench(monkeypatch, broken)
    bench.runner.finish()
    assert sorted(bench.done) == ALL, "each once"
    bench.world.assert_nothing_held()
    assert bench.runner._leg is None
    assert bench.aborted == (broken == "client"), "its next request may be lost: it must not wait for it"
    if broken:
        (record,) = caplog.records
        assert "r-1" in record.getMessage()
        assert record.exc_info is not None
        assert broken in str(record.exc_info[1])
    else:
        assert not caplog.records


def test_what_others_wait_for_is_given_back_before_anything_is_learnt_or_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, "")
    bench.runner.finish()
    assert sorted(bench.done[: len(HELD) + 1]) == sorted([*HELD, "leg_ended"])
    assert bench.done[-1] == "client", "the next request begins in this call"


def test_bug_while_nobody_else_is_on_the_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that took some turns to inflate: the client is not left waiting."""

    def bug(_runner: Runner) -> None:
        raise RuntimeError("a bug")

    bench = Bench(monkeypatch, "")
    monkeypatch.setattr(Runner, "_decide", bug)
    bench.runner._decoded(b"{}")
    assert bench.aborted == 1
    assert "a request ends by a bug of ours (r-1)" in caplog.text
