"""Deadlines are kept for everyone, whatever happens to one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.edge import server
from sidecar.edge.server import Server


class Connection:
    deadline = 1.0

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def overdue(self) -> None:
        self.calls.append("overdue")
        if self.fails:
            raise ValueError("bug")

    def drain(self) -> None:
        self.overdue()

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.mark.parametrize("draining", [False, True])
def test_one_that_fails_takes_nobodys_deadline_along(draining: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)

    async def main() -> None:
        swept: list[float] = []
        engine = type("Engine", (), {"sweep": staticmethod(swept.append)})
        live = type("Live", (), {"draining": draining})
        service: Any = type(
            "Service", (), {"loop": asyncio.get_running_loop(), "engine": engine, "live": live, "settings": None}
        )
        one = Server(service, "127.0.0.1", 0)
        bad, good = Connection(fails=True), Connection(fails=False)
        one._connections = {bad, good}  # type: ignore[arg-type]
        one._sweep()
        await asyncio.sleep(0.2)
        assert "abort" in bad.calls
        assert good.calls.count("overdue") >= 2
        assert len(swept) >= 2
        assert one._timer is not None
        one._timer.cancel()

    asyncio.run(main())
