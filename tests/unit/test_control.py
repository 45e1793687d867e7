"""The end of the process, whatever happens on the way to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.control import Control
from sidecar.workers.worker import Worker


async def _fails() -> None:
    raise ValueError("bug")


def test_a_drain_that_fails_ends_all_the_same() -> None:
    """Not by the kubelet's SIGKILL, half a minute or ten of them later."""

    async def main() -> None:
        stop = asyncio.get_running_loop().create_future()
        control: Any = type("Held", (), {"_drain": staticmethod(_fails), "_stop": stop})
        with pytest.raises(ValueError, match="bug"):
            await Control._drain_and_stop(control)
        assert stop.done()
        over = asyncio.get_running_loop().create_future()
        serving = type("Serving", (), {"drain": staticmethod(_fails)})
        worker: Any = type("Held", (), {"_serving": serving, "over": over})
        with pytest.raises(ValueError, match="bug"):
            await Worker._drain(worker)
        assert over.done()

    asyncio.run(main())
