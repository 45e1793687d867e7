"""The short form of `make soak`: after a storm all is where it was before. How fast anything went is not asked."""

from __future__ import annotations

import asyncio

import uvloop

from e2e.soak import problems, soak


def test_a_storm_leaves_nothing_behind() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        soaked = runner.run(soak(seconds=12, warm_s=5, interval_s=2, seed=7))
    assert problems(soaked) == []
    assert soaked.seen["200 remote"], "most of it should have been what the sidecar is for"
    assert len(soaked.samples) >= 2
    assert soaked.before is not None
    assert soaked.after is not None
    assert soaked.after.rss_mib - soaked.before.rss_mib < 8
