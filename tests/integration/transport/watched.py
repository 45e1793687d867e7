"""`SideChannels` as tests use them: with a port of their own, a count of handshakes, and ways to wait."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.integration.transport.peers import until
from tests.ports import free_ports
from transport.prober import NOT_ASKED
from transport.side_channels import Address, SideChannels

if TYPE_CHECKING:
    from transport.prober import Endpoint, State
    from transport.relay import Outcome


class Watched(SideChannels):
    """With what a test wants to know of them besides."""

    def __init__(self, **options: Any) -> None:
        self.handshakes: Counter[Outcome] = Counter()
        options.setdefault("port", free_ports())
        super().__init__(on_handshake=lambda outcome, _: self.handshakes.update([outcome]), **options)

    @property
    def local_state(self) -> State:
        assert self.prober.local is not None
        return self.prober.local.state

    async def settled(self, endpoint: Endpoint, timeout_seconds: float) -> State:
        """Its state once the first attempt is over, or after the time."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.state(endpoint) is not NOT_ASKED, timeout_seconds)
        return self.state(endpoint)

    async def fetched(self, endpoint: Endpoint, engine_id: str, tp_size: int) -> Address:
        """Its relay's address once a handoff has named its size and all ranks have been asked."""
        where = await self.relay_address(endpoint, engine_id=engine_id, tp_size=tp_size)
        assert isinstance(where, Address)
        engine = self.prober.channels[endpoint].engine
        assert engine is not None
        await until(lambda: len(engine.fetched) == tp_size)
        return where
