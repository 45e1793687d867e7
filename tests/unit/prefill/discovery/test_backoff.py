"""Pauses grow to a bound, and no two sidecars keep step."""

from sidecar.prefill.discovery.backoff import FIRST_S, LONGEST_S, Backoff


def test_backoff() -> None:
    backoff = Backoff()
    waits = [backoff.wait_s() for _ in range(10)]
    assert FIRST_S / 2 <= waits[0] <= FIRST_S
    assert all(LONGEST_S / 2 <= wait <= LONGEST_S for wait in waits[6:])
    assert len(set(waits[6:])) > 1
    backoff.reset()
    assert backoff.wait_s() <= FIRST_S
