"""Tasks beside the requests: none fails in silence, none takes another one along (case 35)."""

import asyncio

import pytest

from sidecar.background import AGAIN_AFTER_S, Background
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


def test_what_goes_on_for_ever_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """A probe that met something that nobody had thought of must not be the last one."""

    async def main() -> None:
        background = Background()
        looks: list[float] = []

        async def look() -> None:
            while True:
                looks.append(asyncio.get_running_loop().time())
                if len(looks) == 2:
                    raise ValueError("bug")
                await asyncio.sleep(5)

        background.keep("the probe", look)
        await asyncio.sleep(12)
        assert [round(at - looks[0]) for at in looks] == [0, 5, 5 + AGAIN_AFTER_S, 10 + AGAIN_AFTER_S]
        assert len(background) == 1
        await background.close()
        assert len(background) == 0

    clock.run(main())
    [line] = caplog.records
    assert line.getMessage() == "background task the probe: begins anew after an error: ValueError"
    assert line.exc_info


def test_what_is_through_does_not_begin_anew() -> None:
    async def main() -> None:
        background, done = Background(), []

        async def work() -> None:
            done.append(1)

        background.keep("once", work)
        await asyncio.sleep(60)
        assert done == [1]
        assert len(background) == 0

    clock.run(main())


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
