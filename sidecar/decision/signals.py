"""What the local engine says of its load, and for how long that counts. No I/O.

The sidecar's own counts are exact and never stale, but it may not be the engine's only client; the engine's metrics
see everything and are up to a second old.
"""

import re
from dataclasses import dataclass

from sidecar.decision.allowance import Allowance

STALE_AFTER_S = 2.0
SMOOTHING = 0.1
"""Share of the newest scrape, one a second, in what counts as lately."""
COUNT_MAX = 2**53
"""What is not less is no count: a metric is a double (Prometheus text format)."""

_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|generation_tokens_total)"
    r"(?:\{([^}\n]*)\})? (\S+)",
    re.MULTILINE,
)
_MODEL_NAME = re.compile(r'\bmodel_name="([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class Load:
    """One scrape of an engine; sums over its data-parallel ranks."""

    running: int
    waiting: int
    model_names: frozenset[str] = frozenset()
    """What requests for the base model say in `model`, as far as the metrics tell: the first served name."""
    generated: int = 0
    """Tokens that it has generated since its start; 0 if it does not tell."""


def parse_load(metrics: str) -> Load | None:
    """The load in a Prometheus text exposition of vLLM 0.32, None if it does not tell."""
    running = waiting = generated = 0.0
    names = set()
    found = False
    for name, labels, text in _SAMPLE.findall(metrics):
        try:
            value = float(text)
        except ValueError:
            return None
        if not 0 <= value < COUNT_MAX:  # NaN, too
            return None
        if name == "num_requests_running":
            running, found = running + value, True
            names.update(_MODEL_NAME.findall(labels))
        elif name == "num_requests_waiting":
            waiting += value
        else:
            generated += value
    return Load(int(running), int(waiting), frozenset(names), int(generated)) if found else None


class Signals:
    """The load of one rank of the local engine."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._at = -STALE_AFTER_S
        self._lately = 0.0
        self.allowance = Allowance()

    def tell(self, load: Load | None, now: float) -> None:
        """A scrape, or that it failed."""
        if load is None:
            return
        self._load, self._at = load, now
        self._lately += SMOOTHING * (load.running - self._lately)
        self.allowance.generated(load.generated, now)

    def fresh(self, now: float) -> Load | None:
        """The newest scrape unless it is stale."""
        return self._load if now - self._at < STALE_AFTER_S else None

    @property
    def model_names(self) -> frozenset[str]:
        return self._load.model_names if self._load is not None else frozenset()

    def streams(self, running_now: int) -> float:
        """Requests that the engine generates for, by whoever sees most: `running_now` is our own count. An engine
        that is usually busy does not count as idle in a short pause."""
        scraped = self._load.running if self._load is not None else 0
        return max(float(max(running_now, scraped)), self._lately)
