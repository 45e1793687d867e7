"""A rolling restart under 200 streams cuts none and fails none; a pod that gets SIGKILL takes its own streams with
it, and no other. (docs/kubernetes.md, "Ending pods")"""

from __future__ import annotations

import pytest

from e2e.cluster import network, rollout


def test_no_stream_is_cut() -> None:
    if why_not := network.why_not():
        pytest.skip(why_not)
    try:
        result = rollout.run(200)
    except rollout.NoEnvoy as reason:
        pytest.skip(f"needs Envoy: {reason}")
    text = rollout.report(result)
    print(text)
    assert not result.all_problems, text
    assert len(result.steps) == 5
