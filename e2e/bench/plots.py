"""Which pictures the benchmark has. It must not know how anything was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.bench.report import series
from e2e.plots import dots

if TYPE_CHECKING:
    from e2e.bench.measure import Result


def all_plots(results: dict[str, Result], names: list[str]) -> dict[str, str]:
    """File name to SVG."""
    wanted = (
        ("cpu-per-request.svg", "Proxy CPU per request", "µs of CPU per request", "closed", "cpu_us"),
        ("cpu-per-chunk.svg", "Proxy CPU per streamed chunk", "µs of CPU per chunk", "stream", "cpu_us"),
        ("memory.svg", "Resident memory after the load", "MB", "memory", "rss_mb"),
    )
    found = {}
    for file, title, unit, kind, metric in wanted:
        rows = [
            (result.case.title, {name: one for name in names if (one := series(result, name, metric))})
            for result in results.values()
            if result.case.kind == kind
        ]
        if svg := dots(title, unit, rows, names):
            found[file] = svg
    return found
