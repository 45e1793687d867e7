"""SIGTERM while real answers are under way: they are all completed, and the sidecar ends with 0."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

from e2e.asking import UnderWay, eventually
from e2e.engines import HOST
from e2e.tap import Hold

if TYPE_CHECKING:
    from e2e.pair import Pair


def test_open_answers_are_completed(pair: Pair) -> None:
    tap = pair.tap(pair.prefill)
    sidecar = pair.serve(prefill=tap.address)
    under_way = UnderWay(sidecar)
    hold = Hold(tap, under_way.count)  # decode gets all of them at once, however slowly they are prefilled
    hold.wait_for_all()
    hold.release()
    under_way.wait(pair.decode)
    sidecar.signal(signal.SIGTERM)
    eventually(lambda: not listens(sidecar.port))
    under_way.check(pair.decode)
    assert sidecar.exit_code() == 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
