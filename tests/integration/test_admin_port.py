"""The admin port, taken up by connections that say nothing."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from sidecar.admin.server import Limits
from tests.engine import ThreadedEngine
from tests.integration.sidecar import Sidecar


def test_connections_that_say_nothing_keep_no_probe_out() -> None:
    """Nor do they take the descriptors that the serving port needs."""
    with ThreadedEngine() as decode, ExitStack() as stack:
        sidecar = Sidecar("--model-server-port", str(decode.port))
        before = sidecar.open_descriptors
        for number in range(3 * Limits().connections):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.admin_port)))
            silent.sendall(b"GET /met"[: number % 9])
        assert sidecar.admin("GET", "/livez") == (200, "ok\n")
        assert sidecar.open_descriptors <= before + Limits().connections
        sidecar.stop()
