"""A prefill and a decode engine, what is put between them, and how all of it comes to rest.

What a test puts there ends with the test, whatever became of it. It must not know what is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.asking import eventually
from e2e.engines import HOST
from e2e.tap import Tap
from tests.integration.sidecar import Sidecar

if TYPE_CHECKING:
    from e2e.engines import Engine

LEASE_S = 10
"""Short enough to be waited for, long enough not to end by itself under a test."""
SOONER_THAN_A_LEASE_S = LEASE_S - 3.0
BLOCK_TOKENS = 32
TOKEN_BYTES = 1024
"""KV of one token of the tiny model."""


@dataclass
class Pair:
    """A prefill and a decode engine, and whatever is put between them."""

    prefill: Engine
    decode: Engine
    _open: contextlib.ExitStack

    def flags(self, prefill: str = "", decode_port: int = 0) -> list[str]:
        """What a sidecar of this pair is told; `prefill` and `decode_port` may be taps'."""
        return [
            *("--model-server-port", str(decode_port or self.decode.port)),
            *("--local-side-channel", f"{HOST}:{self.decode.side_channel_port}"),
            *("--prefill-side-channel-port", str(self.prefill.side_channel_port)),
            *("--p2p-connector-port", str(self.prefill.p2p_port)),
            *("--mooncake-bootstrap-port", str(self.prefill.bootstrap_port)),
            *("--local-p2p", f"{HOST}:{self.decode.p2p_port}"),
            *("--prefill", prefill or self.prefill.address),
            *("--kv-lease", str(LEASE_S)),
        ]

    def serve(
        self, *flags: str, prefill: str = "", decode_port: int = 0, disagg: str = "on", ranks: int = 1
    ) -> Sidecar:
        """A ready sidecar that lasts until the end of the test."""
        sidecar = Sidecar(*self.flags(prefill, decode_port), "--disagg", disagg, *flags, ranks=ranks)
        self.closing(sidecar.stop)
        return sidecar

    def tap(self, engine: Engine) -> Tap:
        tap = Tap(engine)
        self.closing(tap.close)
        return tap

    def closing(self, close: Callable[[], Any]) -> None:
        """`close` is called at the end of the test."""
        self._open.callback(close)

    def pulled_tokens(self) -> int:
        """Prompt tokens that the decode engine has pulled since its start."""
        return self.decode.prompt_tokens_by_source()["external_kv_transfer"]

    def fetched_tokens(self) -> int:
        """Tokens whose KV the decode engine has got over the P2P tier since its start."""
        read_bytes = self.decode.metrics().total("vllm:kv_offload_tiering_read_bytes_total", tier="1:p2p")
        return int(read_bytes) // TOKEN_BYTES

    def waiting_for_kv(self) -> int:
        """Requests whose KV is on its way to the decode engine."""
        return int(self.decode.metrics().total("vllm:num_requests_kv_fetch_by_stage", stage="in_progress"))


@contextlib.contextmanager
def paired(prefill: Engine, decode: Engine) -> Iterator[Pair]:
    """Both run and are healthy, now and when the block ends; with it ends all that was put between them."""
    with contextlib.ExitStack() as stack:
        mend(prefill, decode)
        stack.callback(mend, prefill, decode)
        yield Pair(prefill, decode, stack)


def mend(*engines: Engine) -> None:
    """None of them is stopped, dead or dying."""
    for engine in engines:
        engine.cont()
    dead = [engine for engine in engines if not engine.healthy() and not (engine.alive() and _comes_back(engine))]
    for engine in dead:
        engine.kill()
        engine.start()
    for engine in dead:
        engine.wait_healthy()


def _comes_back(engine: Engine) -> bool:
    with contextlib.suppress(AssertionError):
        eventually(engine.healthy, 5.0)
        return True
    return False


def idle(sidecar: Sidecar) -> None:
    """Until every gauge of the sidecar reads 0."""

    def gauges() -> list[float]:
        metrics = sidecar.metrics()
        return [metrics("inflight"), metrics("recompute_inflight")]

    try:
        eventually(lambda: not any(gauges()))
    except AssertionError:
        raise AssertionError(f"gauges do not return to 0: {gauges()}\n{sidecar.log}") from None


def free(*engines: Engine, within_s: float) -> None:
    """Until no engine runs anything or holds a block."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for engine in engines:

        def held(engine: Engine = engine) -> list[float]:
            metrics = engine.metrics()
            return [metrics.total(f"vllm:{name}") for name in names]

        try:
            eventually(lambda: not any(held()), within_s)
        except AssertionError:
            now = dict(zip(names, held(), strict=True))
            raise AssertionError(f"{engine.name} after {within_s:g} s: {now}") from None
