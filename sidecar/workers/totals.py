"""One process's metrics as data, and the sum of several as one exposition.

A counter never goes back: what a worker that died had told last is kept.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from sidecar.admin.metrics import Collection, Counter, Gauge, Histogram

Labels = tuple[str, ...]

SUMMED_GAUGES = ("inflight", "tasks")
"""Those of which every process has its part; the hub knows the others."""


class Totals(msgspec.Struct, array_like=True):
    """By metric and labels. Histograms: as `Histogram.values`; exemplars: bucket, trace id, value, Unix time."""

    counters: dict[str, list[tuple[Labels, float]]] = {}
    histograms: dict[str, list[tuple[Labels, list[float]]]] = {}
    exemplars: dict[str, list[tuple[Labels, int, str, float, float]]] = {}
    gauges: dict[str, list[tuple[Labels, float]]] = {}
    cpu_seconds: float = 0.0
    resident_bytes: int = 0


def totals_of(collection: Collection, cpu_seconds: float, resident_bytes: int) -> Totals:
    """Those of this process."""
    totals = Totals(cpu_seconds=cpu_seconds, resident_bytes=resident_bytes)
    for metric in collection.metrics:
        if isinstance(metric, Counter):
            totals.counters[metric.name] = list(metric.values.items())
        elif isinstance(metric, Histogram):
            totals.histograms[metric.name] = list(metric.values.items())
            if metric.exemplars:
                totals.exemplars[metric.name] = [
                    (labels, bucket, one.labels["trace_id"], one.value, float(one.timestamp or 0.0))
                    for (labels, bucket), one in metric.exemplars.items()
                ]
        elif isinstance(metric, Gauge) and metric.name in SUMMED_GAUGES:
            totals.gauges[metric.name] = list(metric.read())
    return totals


def combined(kept: Totals, more: Totals) -> Totals:
    """The counts of both; gauges of neither: for who is gone."""
    both = Totals(cpu_seconds=kept.cpu_seconds + more.cpu_seconds)
    for name in {**kept.counters, **more.counters}:
        both.counters[name] = list(_counted(_in(one.counters, name) for one in (kept, more)).items())
    for name in {**kept.histograms, **more.histograms}:
        both.histograms[name] = list(_heaped(_in(one.histograms, name) for one in (kept, more)).items())
    return both


def _in(entries: dict[str, list[Any]], name: str) -> list[Any]:
    return entries.get(name, [])


def _counted(parts: Iterable[Iterable[tuple[Labels, float]]]) -> dict[Labels, float]:
    sums: dict[Labels, float] = {}
    for part in parts:
        for labels, value in part:
            sums[labels] = sums.get(labels, 0) + value
    return sums


def _heaped(parts: Iterable[Iterable[tuple[Labels, list[float]]]]) -> dict[Labels, list[float]]:
    sums: dict[Labels, list[float]] = {}
    for part in parts:
        for labels, values in part:
            known = sums.get(labels)
            sums[labels] = list(values) if known is None else [a + b for a, b in zip(known, values, strict=True)]
    return sums


class Summed(Collector):
    """The metrics of `own` with those of others added. `others` is read at each scrape."""

    def __init__(
        self, own: Collection, others: Callable[[], list[Totals]], more: Iterable[Gauge | Counter[Any]]
    ) -> None:
        """`more`: metrics that only this process has, written out besides."""
        self._own = own
        self._others = others
        self._more = tuple(more)

    def collect(self) -> Iterator[Metric]:
        others = self._others()
        for metric in self._own.metrics:
            if isinstance(metric, Counter):
                counter: Counter[Any] = Counter(metric.name, metric.description, metric.labels)
                parts = [_in(one.counters, metric.name) for one in others]
                counter.values = _counted([metric.values.items(), *parts])
                yield counter.collect()
            elif isinstance(metric, Histogram):
                yield self._histogram(metric, others).collect()
            elif isinstance(metric, Gauge) and metric.name in SUMMED_GAUGES:
                parts = [_in(one.gauges, metric.name) for one in others]
                sums = _counted([metric.read(), *parts])
                yield Gauge(metric.name, metric.description, metric.labels, sums.items).collect()
            else:
                yield metric.collect()
        for metric in self._more:
            yield metric.collect()

    @staticmethod
    def _histogram(metric: Histogram[Any], others: list[Totals]) -> Histogram[Any]:
        summed: Histogram[Any] = Histogram(metric.name, metric.description, metric.labels, metric.buckets)
        parts = [_in(one.histograms, metric.name) for one in others]
        summed.values = _heaped([metric.values.items(), *parts])
        for one in others:
            for labels, bucket, trace_id, value, at in _in(one.exemplars, metric.name):
                summed.exemplars[labels, bucket] = Exemplar({"trace_id": trace_id}, value, at)
        return summed
