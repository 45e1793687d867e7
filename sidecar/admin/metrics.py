"""Metrics whose hot path is an integer add; prometheus-client writes them out when they are scraped.

Why not prometheus-client's own counters: each add takes a lock and a label look-up, several times per request.
Label values come from fixed sets and from known endpoints, never from what a client sent.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "pd_sidecar_"

Labels = TypeVar("Labels", bound=tuple[str, ...])


class Counter(Generic[Labels]):
    """A counter with labels. `values[labels] += 1` is all that a request pays."""

    def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
        self.name, self.description, self.labels = name, description, labels
        self.values: dict[Labels, int] = {}

    def add(self, labels: Labels, count: int = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + count

    def collect(self) -> Metric:
        family = CounterMetricFamily(PREFIX + self.name, self.description, labels=self.labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        return family


class Histogram(Generic[Labels]):
    """A histogram with labels and fixed buckets (upper bounds in the metric's unit)."""

    def __init__(self, name: str, description: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> None:
        self.name, self.description, self.labels, self.buckets = name, description, labels, buckets
        self.values: dict[Labels, list[float]] = {}
        """Counts for each bucket and one beyond, then the sum."""

    def observe(self, labels: Labels, value: float) -> None:
        counts = self.values.get(labels)
        if counts is None:
            counts = self.values[labels] = [0] * (len(self.buckets) + 2)
        counts[bisect_left(self.buckets, value)] += 1
        counts[-1] += value

    def count(self, labels: Labels) -> int:
        return int(sum(self.values.get(labels, [0])[:-1]))

    def collect(self) -> Metric:
        family = HistogramMetricFamily(PREFIX + self.name, self.description, labels=self.labels)
        bounds = [str(bound) for bound in self.buckets] + ["+Inf"]
        for labels, counts in list(self.values.items()):
            running, buckets = 0.0, []
            for bound, count in zip(bounds, counts[:-1], strict=True):
                running += count
                buckets.append((bound, running))
            family.add_metric(labels, buckets, counts[-1])
        return family


class Gauge:
    """A gauge that is read when it is scraped."""

    def __init__(
        self,
        name: str,
        description: str,
        labels: tuple[str, ...],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        self.name, self.description, self.labels, self._read = name, description, labels, read

    def collect(self) -> Metric:
        family = GaugeMetricFamily(PREFIX + self.name, self.description, labels=self.labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        return family


class Collectable(Protocol):
    """What can be written out."""

    def collect(self) -> Metric: ...


class Collection(Collector):
    """All metrics of one sidecar, for a prometheus-client registry."""

    def __init__(self, metrics: Iterable[Collectable]) -> None:
        self.metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        for metric in self.metrics:
            yield metric.collect()
