"""Metrics whose hot path is an integer add; prometheus-client writes them out when they are scraped.

Why not prometheus-client's own counters: each add takes a lock and a label look-up, several times per request.
Label values come from fixed sets and from known endpoints, never from what a client sent.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

PREFIX = "pd_sidecar_"

Labels = TypeVar("Labels", bound=tuple[str, ...])


class Counter(Generic[Labels]):
    """A counter with labels. `values[labels] += 1` is all that a request pays."""

    def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
        self.name, self.description, self.labels = name, description, labels
        self.values: dict[Labels, float] = {}

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
        self.exemplars: dict[tuple[Labels, int], Exemplar] = {}
        """The last traced observation of each bucket, for who scrapes OpenMetrics."""

    def observe(self, labels: Labels, value: float, trace_id: str = "") -> None:
        """`trace_id`: of the trace that the observation belongs to."""
        counts = self.values.get(labels)
        if counts is None:
            counts = self.values[labels] = [0] * (len(self.buckets) + 2)
        bucket = bisect_left(self.buckets, value)
        counts[bucket] += 1
        counts[-1] += value
        if trace_id:
            self.exemplars[labels, bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def count(self, labels: Labels) -> int:
        return int(sum(self.values.get(labels, [0])[:-1]))

    def collect(self) -> Metric:
        family = HistogramMetricFamily(PREFIX + self.name, self.description, labels=self.labels)
        bounds = [str(bound) for bound in self.buckets] + ["+Inf"]
        for labels, counts in list(self.values.items()):
            running: float = 0.0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for bucket, (bound, count) in enumerate(zip(bounds, counts[:-1], strict=True)):
                running += count
                exemplar = self.exemplars.get((labels, bucket))
                buckets.append((bound, running) if exemplar is None else (bound, running, exemplar))
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
        self.name, self.description, self.labels, self.read = name, description, labels, read

    def collect(self) -> Metric:
        family = GaugeMetricFamily(PREFIX + self.name, self.description, labels=self.labels)
        for labels, value in self.read():
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
