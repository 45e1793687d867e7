"""Metrics: plain numbers while requests run, Prometheus' text format when they are scraped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.admin.metrics import PREFIX, Collection, Counter, Gauge, Histogram


def scraped(*metrics: Counter | Gauge | Histogram) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:  # type: ignore[type-arg]
    registry = CollectorRegistry()
    registry.register(Collection(metrics))
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counter() -> None:
    counter: Counter[tuple[str, str]] = Counter("things", "Things", ("kind", "size"))
    assert scraped(counter) == {}
    for labels in (("a", "1"), ("b", "2"), ("a", "1")):
        counter.add(labels)
    assert scraped(counter) == {
        (PREFIX + "things_total", (("kind", "a"), ("size", "1"))): 2,
        (PREFIX + "things_total", (("kind", "b"), ("size", "2"))): 1,
    }


def test_gauge_is_read_when_it_is_scraped() -> None:
    now = [1.0]
    gauge = Gauge("level", "Level", (), lambda: [((), now[0])])
    assert scraped(gauge) == {(PREFIX + "level", ()): 1}
    now[0] = 2.5
    assert scraped(gauge) == {(PREFIX + "level", ()): 2.5}


def test_gauge_with_labels() -> None:
    gauge = Gauge("state", "State", ("prefill",), lambda: [(("[fd00::1]:80",), 1), (('a"\\\n',), 2)])
    assert scraped(gauge) == {
        (PREFIX + "state", (("prefill", "[fd00::1]:80"),)): 1,
        (PREFIX + "state", (("prefill", 'a"\\\n'),)): 2,
    }


BUCKETS = (0.1, 1.0, 10.0)


def histogram(*values: float) -> Histogram[tuple[str]]:
    one: Histogram[tuple[str]] = Histogram("seconds", "Seconds", ("kind",), BUCKETS)
    for value in values:
        one.observe(("a",), value)
    return one


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        *[(value, [1, 1, 1, 1]) for value in (-1.0, 0.0, 0.1)],
        *[(value, [0, 1, 1, 1]) for value in (0.100001, 1.0)],
        *[(value, [0, 0, 1, 1]) for value in (1.1, 10.0)],
        *[(value, [0, 0, 0, 1]) for value in (10.1, 1e9)],
    ],
)
def test_bounds_belong_to_their_bucket(value: float, counts: list[int]) -> None:
    found = scraped(histogram(value))
    bounds = ("0.1", "1.0", "10.0", "+Inf")
    assert [found[PREFIX + "seconds_bucket", (("kind", "a"), ("le", bound))] for bound in bounds] == counts


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_sum_and_count(values: list[float]) -> None:
    one = histogram(*values)
    found = scraped(one)
    assert one.count(("a",)) == len(values)
    assert found[PREFIX + "seconds_count", (("kind", "a"),)] == len(values)
    assert found[PREFIX + "seconds_sum", (("kind", "a"),)] == pytest.approx(sum(values))
    assert found[PREFIX + "seconds_bucket", (("kind", "a"), ("le", "+Inf"))] == len(values)
    assert found[PREFIX + "seconds_bucket", (("kind", "a"), ("le", "1.0"))] == sum(value <= 1 for value in values)


def test_histogram_nobody_observed() -> None:
    assert scraped(histogram()) == {}
    assert histogram().count(("a",)) == 0
