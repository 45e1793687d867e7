"""Writes metrics out in pieces: the loop that writes them relays requests too, and 1,500 endpoints in one go would
hold these up for 10 ms. It must not know which metrics there are, nor who asks.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

SAMPLES_AT_ONCE = 100
"""A sample takes 3 to 6 µs."""

Encode = Callable[[Collector], bytes]


class _Some(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def pieces(source: Collector, encode: Encode) -> Iterator[bytes]:
    """What `encode(source)` gives, a part at a time. Each family is of one moment; between two parts there may be
    turns of the loop."""
    end = encode(_Some([]))  # OpenMetrics says where it ends
    together: list[Metric] = []
    count = 0
    for metric in source.collect():
        if len(metric.samples) > SAMPLES_AT_ONCE:
            if together:
                yield encode(_Some(together)).removesuffix(end)
            together, count = [], 0
            yield from _parts(metric, encode, end)
            continue
        together.append(metric)
        count += len(metric.samples)
        if count >= SAMPLES_AT_ONCE:
            yield encode(_Some(together)).removesuffix(end)
            together, count = [], 0
    yield encode(_Some(together))


def _parts(metric: Metric, encode: Encode, end: bytes) -> Iterator[bytes]:
    """A large family; what it is called and means stands before its first samples alone."""
    head = encode(_Some([_with(metric, slice(0))])).removesuffix(end)
    for at in range(0, len(metric.samples), SAMPLES_AT_ONCE):
        part = encode(_Some([_with(metric, slice(at, at + SAMPLES_AT_ONCE))])).removesuffix(end)
        yield part[len(head) :] if at else part


def _with(metric: Metric, some: slice) -> Metric:
    part = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    part.samples = metric.samples[some]
    return part
