"""What the admin port says at one moment, and what happened between two of them. No I/O."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "pd_sidecar_"

Labels = tuple[tuple[str, str], ...]


@dataclass
class Sample:
    """One reading. `values` has every sample of the exposition: name -> labels -> value."""

    at: float
    """Unix time."""
    values: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    mode: str = ""
    """off, on or auto."""
    problem: str = ""
    """Why it is not ready; "" if it is."""

    @classmethod
    def read(cls, at: float, metrics: str, mode: str, problem: str) -> "Sample":
        """Raises `ValueError` for what is no exposition."""
        sample = cls(at, mode=mode, problem=problem)
        for family in text_string_to_metric_families(metrics):
            for one in family.samples:
                labels = tuple(sorted(one.labels.items()))
                sample.values[one.name.removeprefix(PREFIX)][labels] = one.value
        return sample

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of what has these labels."""
        return sum(value for has, value in self.values.get(name, {}).items() if labels.items() <= dict(has).items())

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric summed up by some of its labels."""
        found: dict[tuple[str, ...], float] = {}
        for has, value in self.values.get(name, {}).items():
            key = tuple(dict(has).get(label, "") for label in labels)
            found[key] = found.get(key, 0.0) + value
        return found

    @property
    def started_at(self) -> float:
        return self.gauge("process_start_time_seconds") or self.at

    @property
    def zero(self) -> "Sample":
        """What it would have said at its start."""
        return Sample(self.started_at)


@dataclass
class Change:
    """From one sample to a later one. A counter that fell began anew: the sidecar was restarted."""

    earlier: Sample
    later: Sample

    @property
    def seconds(self) -> float:
        return max(self.later.at - self.earlier.at, 1e-6)

    def counts(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """How much a counter grew, by some of its labels."""
        before = self.earlier.by(name, *labels)
        now = self.later.by(name, *labels)
        return {
            key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value
            for key, value in now.items()
        }

    def quantiles(self, name: str, decision: str, wanted: Iterable[float]) -> list[float | None]:
        """Of a histogram, as Prometheus' `histogram_quantile` takes them: linear within a bucket, and the lower
        bound of the last one; None where nothing was observed."""
        grown = self.counts(f"{name}_bucket", "decision", "le")
        buckets = sorted((float(le), count) for (kind, le), count in grown.items() if kind == decision)
        return [_quantile(q, buckets) for q in wanted]


def _quantile(q: float, buckets: list[tuple[float, float]]) -> float | None:
    """`buckets`: upper bound and cumulative count, the last bound infinite."""
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
