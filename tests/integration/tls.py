"""Rigs whose parts speak TLS, with certificates of an authority of the tests' own."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.certificates import Authority
from tests.engine import ThreadedEngine
from tests.integration.client import Client
from tests.integration.sidecar import Rig, Sidecar
from tests.ports import free_ports

MIB = 1 << 20
HOST = "127.0.0.1"
CA = Authority()
PAIR = CA.issue("localhost", HOST)

Rigs = Callable[..., Rig]


@contextlib.contextmanager
def tls_rigs(folder: Path) -> Iterator[Rigs]:
    """What makes rigs whose parts speak TLS (`serving`, `prefill`, `decode` say which); they end with the block."""
    with contextlib.ExitStack() as stack:

        def make(
            *flags: str,
            serving: bool = True,
            prefill: ssl.SSLContext | None = None,
            decode: ssl.SSLContext | None = None,
            **decode_options: Any,
        ) -> Rig:
            to_engines = [
                flag
                for role, context in (("prefiller", prefill), ("decoder", decode))
                if context
                for flag in ("--enable-tls", role)
            ]
            if to_engines:
                to_engines += ["--tls-ca", str(CA.write(folder / "ca.crt"))]
            to_clients = ["--secure-serving", "on", "--cert-path", str(PAIR.mount(folder / "serving"))]
            engine = stack.enter_context(
                ThreadedEngine(tls=decode, port=free_ports(), side_channel_port=free_ports(), **decode_options)
            )
            other = stack.enter_context(ThreadedEngine(tls=prefill))
            sidecar = Sidecar(
                *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100"),
                *("--model-server-port", str(engine.port)),
                *("--local-side-channel", f"127.0.0.1:{engine.side_channel_port}"),
                *(to_clients if serving else ()),
                *to_engines,
                *flags,
            )
            stack.callback(sidecar.kill)
            stack.callback(sidecar.stop)
            if serving:
                sidecar.tls = CA.client_context()
            return Rig(sidecar, other, engine)

        yield make


def all_tls(tls_rig: Rigs, folder: Path, *flags: str, **options: Any) -> Rig:
    context = PAIR.server_context(folder / "engines")
    return tls_rig(*flags, prefill=context, decode=context, **options)


def ask_once(address: tuple[str, int], context: ssl.SSLContext) -> None:
    with Client(address, tls=context) as client:
        client.request("GET", "/v1/models", None)
        client.answer()  # a TLS 1.3 client hears that it was refused with its first read
