"""Fixtures: rigs whose sidecar processes are shared by the tests that want the same flags.

Starting a process takes longer than most tests, so it is kept while it behaves: after each test every gauge must
read 0 and every connection must be gone, or the process is ended and the next test gets a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import ThreadedEngine
from tests.integration.crew import Crew
from tests.integration.sidecar import Descriptors, Rig, Sidecar
from tests.integration.tls import Rigs, tls_rigs
from tests.ports import free_ports

KEPT = 5
FLAGS = (
    *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100"),
    *("--warm-up", "off"),
)
"""Every request that can be split is; any engine of this machine may prefill; what fails is recomputed; engines are
asked nothing but what a test asks."""


@dataclass
class _Kept:
    sidecar: Sidecar
    decode_ports: tuple[int, int]
    """HTTP and side channel."""
    descriptors: Descriptors
    """Open when nothing is going on."""
    prefill: ThreadedEngine | None = None
    """A prefill engine that the process knows and has nothing against."""

    def take_prefill(self) -> ThreadedEngine:
        if self.prefill is None:
            self.prefill = ThreadedEngine()
            self.prefill.start()
        self.prefill.requests.clear()
        return self.prefill

    def drop_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.stop()
            self.prefill = None

    def end(self) -> None:
        """SIGTERM, and all that must hold then."""
        self.sidecar.stop()
        self.drop_prefill()


class Shelf:
    """The processes that are kept, by their flags; the least recently used one goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()

    def take(self, flags: tuple[str, ...], decode_options: dict[str, Any]) -> tuple[_Kept, ThreadedEngine]:
        """A process and a fresh decode engine on the port where that process expects it."""
        kept = self._kept.get(flags)
        if kept is not None:
            self._kept.move_to_end(flags)
            port, side_channel_port = kept.decode_ports
            decode = ThreadedEngine(port=port, side_channel_port=side_channel_port, **decode_options)
            decode.start()
            kept.sidecar.wait_until("/readyz")  # the engine may have been away for long
            return kept, decode
        while len(self._kept) >= KEPT:
            self._kept.popitem(last=False)[1].end()
        decode = ThreadedEngine(port=free_ports(8), side_channel_port=free_ports(8), **decode_options)
        decode.start()
        try:
            sidecar = Sidecar(
                *("--model-server-port", str(decode.port)),
                *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
                *flags,
            )
        except BaseException:
            decode.stop()
            raise
        kept = self._kept[flags] = _Kept(sidecar, (decode.port, decode.side_channel_port), sidecar.descriptors())
        return kept, decode

    def discard(self, kept: _Kept) -> None:
        self._kept = OrderedDict((flags, one) for flags, one in self._kept.items() if one is not kept)
        kept.sidecar.kill()
        kept.drop_prefill()

    def close(self) -> None:
        with ExitStack() as stack:
            for kept in self._kept.values():
                stack.callback(kept.end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what its sidecars said last."""
    report = yield
    if report.failed and call.when == "call":
        for rig in _rigs:
            report.sections.append(("sidecar log", rig.sidecar.log[-3000:]))
    return report


_rigs: list[Rig] = []
"""Of the test that runs."""


@pytest.fixture(scope="session")
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@pytest.fixture
def rigged(shelf: Shelf) -> Iterator[Callable[..., Rig]]:
    """`rigged(*flags, decode={...}, prefill={...})`: a rig, with flags besides the usual ones and with engine
    options."""
    with ExitStack() as stack:

        def make(*flags: str, decode: dict[str, Any] | None = None, prefill: dict[str, Any] | None = None) -> Rig:
            kept, decode_engine = shelf.take((*FLAGS, *flags), decode or {})
            stack.callback(decode_engine.stop)
            own = None
            if prefill:
                kept.drop_prefill()
                own = stack.enter_context(ThreadedEngine(**prefill))
            rig = Rig(kept.sidecar, own or kept.take_prefill(), decode_engine)
            stack.callback(check, kept, rig)
            _rigs.append(rig)
            return rig

        def check(kept: _Kept, rig: Rig) -> None:
            try:
                kept.descriptors = rig.check_idle(kept.descriptors)
                kept.sidecar.check_log()
                blamed = rig.has_blamed_prefill()
            except BaseException:
                shelf.discard(kept)
                raise
            if blamed or rig.prefill.faults.rules or rig.prefill.held_blocks:
                kept.drop_prefill()

        stack.callback(_rigs.clear)
        yield make


@pytest.fixture
def rig(rigged: Callable[..., Rig]) -> Rig:
    """The usual rig: disaggregation on, recompute on failure."""
    return rigged()


@pytest.fixture
def tls_rig(tmp_path: Path) -> Iterator[Rigs]:
    """`tls_rig(*flags, serving=, prefill=, decode=)`: a rig of its own whose parts speak TLS."""
    with tls_rigs(tmp_path) as make:
        yield make


@pytest.fixture
def crew() -> Iterator[Callable[..., Crew]]:
    """`crew(*flags)`: two workers between two engines; ended with SIGTERM and looked at, unless it has ended."""
    with ExitStack() as stack:

        def make(*flags: str, **options: Any) -> Crew:
            prefill = stack.enter_context(ThreadedEngine())
            decode = stack.enter_context(ThreadedEngine(port=free_ports(8), side_channel_port=free_ports(8)))
            sidecar = Sidecar(
                *("--workers", "2", "--model-server-port", str(decode.port)),
                *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
                *("--disagg", "on", "--prefill-allow", "127.0.0.0/8", "--recompute-max-concurrent", "100", *flags),
                **options,
            )
            stack.callback(sidecar.stop)
            return Crew(sidecar, prefill, decode)

        yield make
