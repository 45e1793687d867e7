"""A rolling restart under 200 streams cuts none and fails none; a pod that gets SIGKILL takes its own streams with
it, and no other; packets that are late or lost and a prefill node that vanishes cost none. (docs/kubernetes.md)"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import pytest

from e2e.cluster import faults, network, rollout
from e2e.cluster.scene import NoEnvoy, Result, report


def played(play: Callable[[int], Result], why_not: str) -> Result:
    if why_not:
        pytest.skip(why_not)
    try:
        result = play(200)
    except NoEnvoy as reason:
        if (sys.platform, platform.machine()) == ("linux", "x86_64"):  # there is a wheel for it
            raise
        pytest.skip(f"needs Envoy: {reason}")
    print(report(result))
    assert not result.all_problems, report(result)
    return result


def test_no_stream_is_cut() -> None:
    assert len(played(rollout.run, network.why_not()).steps) == 5


def test_faults_of_the_network() -> None:
    assert len(played(faults.run, network.why_not() or faults.why_not()).steps) == 3
