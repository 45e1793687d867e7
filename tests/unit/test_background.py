"""Tasks beside the requests: none fails in silence, none takes another one along (case 35)."""

import asyncio

import pytest

from sidecar.background import Background
from tests.unit import clock


def test_exception_is_logged_and_ends_that_task_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        background = Background()
        done: list[str] = []

        async def fail() -> None:
            raise ValueError("bug")

        async def work() -> None:
            await asyncio.sleep(5)
            done.append("work")

        background.start("the failing one", fail())
        background.start("the working one", work())
        await asyncio.sleep(10)
        assert done == ["work"]
        assert len(background) == 0

    clock.run(main())
    [line] = caplog.records
    assert line.levelname == "ERROR"
    assert line.getMessage() == "background task the failing one ended: ValueError"
    assert line.exc_info


def test_close_ends_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        background = Background()
        ended: list[int] = []

        async def for_ever(number: int) -> None:
            try:
                await asyncio.sleep(1e9)
            finally:
                ended.append(number)

        tasks = [background.start(f"task {number}", for_ever(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert len(background) == 3
        await background.close()
        assert sorted(ended) == [0, 1, 2]
        assert all(task.cancelled() for task in tasks)
        await background.close()
        assert len(background) == 0

    clock.run(main())
    assert caplog.records == []


def test_tasks_bear_their_names() -> None:
    async def main() -> None:
        background = Background()
        assert background.start("sweep", asyncio.sleep(0)).get_name() == "sweep"
        await asyncio.sleep(1)

    clock.run(main())
