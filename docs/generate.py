"""Writes the generated parts of the documentation: `make docs`. A test compares them with what is committed."""

import json
import re
import sys
from pathlib import Path

from docs import dashboard, states, values_schema
from sidecar import compat, config
from sidecar.admin.metrics import Counter, Gauge, Histogram
from sidecar.admin.observer import Observer
from sidecar.exchange import failures
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import AllowList
from sidecar.prefill.endpoints import Endpoints
from sidecar.workers.metrics import worker_metrics

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "pd-sidecar"


def metrics_table() -> str:
    """Name, type, labels and meaning of every metric."""
    observer = Observer(Endpoints([], AllowList([]), lambda: 0.0), Budget(1, 0))
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in (*observer.collection.metrics, *worker_metrics([])):
        assert isinstance(metric, Counter | Gauge | Histogram)
        kind = next(kind for what, kind in kinds.items() if isinstance(metric, what))
        name = f"pd_sidecar_{metric.name}" + ("_total" if kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {kind} | {labels} | {metric.description} |")
    return "\n".join(lines) + "\n"


def with_parts(document: Path, **parts: str) -> str:
    """A document with its generated parts renewed, each between marks of its name."""
    text = document.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, part=part: found.group(1) + part + found.group(2), text)
        assert count == 1, f"{document.name}: no place for {name}"
    return text


def outputs() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    readme, architecture = ROOT / "README.md", ROOT / "docs" / "architecture.md"
    tables = {"flags": config.markdown(), "llm-d": compat.markdown(), "metrics": metrics_table()}
    return {
        ROOT / "docs" / "failures.md": failures.markdown(),
        readme: with_parts(readme, **tables),
        architecture: with_parts(architecture, states=states.diagram()),
        CHART / "files" / "dashboard.json": json.dumps(dashboard.dashboard(), indent=1) + "\n",
        CHART / "values.schema.json": json.dumps(values_schema.schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
