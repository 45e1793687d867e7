"""What happened between two readings of the admin port."""

from __future__ import annotations

import pytest

from sidecar.top.sample import Change, Sample


def sample(at: float, *lines: str) -> Sample:
    return Sample.read(at, "".join(f"pd_sidecar_{line}\n" for line in lines), "auto", "")


def buckets(decision: str, *counts: float) -> list[str]:
    """Of three buckets: to 0.1 s, to 1 s, beyond."""
    return [
        f'ttft_seconds_bucket{{decision="{decision}",le="{le}"}} {count}'
        for le, count in zip(("0.1", "1.0", "+Inf"), counts, strict=True)
    ]


def test_counters_grow_by_label() -> None:
    change = Change(
        sample(10.0, 'x_total{a="1",b="1"} 5', 'x_total{a="1",b="2"} 1'),
        sample(12.0, 'x_total{a="1",b="1"} 8', 'x_total{a="1",b="2"} 1', 'x_total{a="2",b="1"} 4'),
    )
    assert change.seconds == 2.0
    assert change.counts("x_total", "a") == {("1",): 3.0, ("2",): 4.0}
    assert change.counts("x_total") == {(): 7.0}


def test_restart_begins_anew() -> None:
    change = Change(sample(10.0, 'x_total{a="1"} 50'), sample(12.0, 'x_total{a="1"} 3'))
    assert change.counts("x_total", "a") == {("1",): 3.0}


@pytest.mark.parametrize(
    ("before", "after", "p50", "p99"),
    [
        ((0, 0, 0), (100, 100, 100), 0.05, 0.099),
        ((0, 0, 0), (0, 100, 100), 0.55, 0.991),
        ((100, 100, 100), (100, 200, 200), 0.55, 0.991),
        ((0, 0, 0), (50, 50, 100), 0.1, 1.0),
        ((7, 7, 7), (7, 7, 7), None, None),
    ],
)
def test_quantiles_are_those_of_the_window(
    before: tuple[float, ...], after: tuple[float, ...], p50: float | None, p99: float | None
) -> None:
    change = Change(sample(1.0, *buckets("local", *before)), sample(2.0, *buckets("local", *after)))
    assert change.quantiles("ttft_seconds", "local", (0.5, 0.99)) == [pytest.approx(p50), pytest.approx(p99)]
    assert change.quantiles("ttft_seconds", "remote", (0.5,)) == [None]


def test_start_of_the_process() -> None:
    one = Sample.read(100.0, "process_start_time_seconds 40.0\npd_sidecar_x_total 3\n", "off", "draining")
    assert (one.started_at, one.zero.at) == (40.0, 40.0)
    assert Change(one.zero, one).counts("x_total") == {(): 3.0}


def test_what_is_no_exposition() -> None:
    with pytest.raises(ValueError):
        Sample.read(1.0, "<html>\nno { metrics", "", "")
