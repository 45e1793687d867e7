"""The metrics that there are besides with `--workers`. Decides nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.core import Metric

from sidecar import process
from sidecar.admin.metrics import Counter, Gauge
from sidecar.workers.crew import Seat, Standing


class _Read(Counter[tuple[str]]):
    """A counter by worker that is read when it is written out."""

    def __init__(self, name: str, description: str, read: Callable[[], dict[tuple[str], float]]) -> None:
        super().__init__(name, description, ("worker",))
        self._read = read

    def collect(self) -> Metric:
        self.values = self._read()
        return super().collect()


def worker_metrics(seats: Sequence[Seat]) -> tuple[Gauge | Counter[Any], ...]:
    """Read when they are written out."""
    return (
        Gauge(
            "workers",
            "With --workers: processes that serve, do not answer (silent), or are being started again (down)",
            ("state",),
            lambda: [
                ((standing.value,), float(sum(seat.standing is standing for seat in seats)))
                for standing in Standing
            ],
        ),
        _Read(
            "worker_deaths",
            "With --workers: ends of a worker that nobody had asked for",
            lambda: {(str(seat.number),): seat.deaths for seat in seats},
        ),
        _Read(
            "worker_silences",
            "With --workers: times that a worker did not tell its numbers in time; its last ones stood for them",
            lambda: {(str(seat.number),): seat.silences for seat in seats},
        ),
        _Read(
            "worker_cpu_seconds",
            "With --workers: CPU time of a worker and those before it; process_cpu_seconds_total is the hub's",
            lambda: {(str(seat.number),): seat.kept.cpu_seconds + seat.totals.cpu_seconds for seat in seats},
        ),
        Gauge(
            "worker_resident_bytes",
            "With --workers: memory of a worker; process_resident_memory_bytes is the hub's",
            ("worker",),
            lambda: [
                ((str(seat.number),), float(process.resident_bytes(seat.process.pid)))
                for seat in seats
                if seat.process is not None and seat.standing is not Standing.DOWN
            ],
        ),
    )
