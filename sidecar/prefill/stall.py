"""Whether KV is on its way to the local engine and none arrives: closed data ports, say, or a failed fabric.

The prefill peer answers every probe meanwhile, and vLLM 0.32 waits for such a transfer for ever. Decides, no I/O.
"""

import re
from dataclasses import dataclass

UNSEEN_S = 10.0
"""After so long without a look nothing is known of the time between. (A busy engine may miss a look or two.)"""

_IN_PROGRESS = re.compile(
    r'^vllm:num_requests_kv_fetch_by_stage\{[^}\n]*\bstage="in_progress"[^}\n]*\} (\S+)', re.MULTILINE
)
_ARRIVED = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}\n]*\bsource="external_kv_transfer"[^}\n]*\} (\S+)', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Fetching:
    """One look at an engine."""

    in_progress: float
    """Requests whose KV is on its way."""
    arrived: float
    """Prompt tokens whose KV has come from elsewhere since the engine's start."""


def parse_fetching(metrics: str) -> Fetching | None:
    """From a Prometheus text exposition of vLLM 0.32 (v1/metrics/loggers.py); None if it does not tell."""
    in_progress, arrived = _IN_PROGRESS.findall(metrics), _ARRIVED.findall(metrics)
    if not in_progress or not arrived:
        return None
    try:
        return Fetching(sum(map(float, in_progress)), sum(map(float, arrived)))
    except ValueError:
        return None


class Stall:
    """How long transfers have been under way without any having arrived. What arrives from one peer hides what does
    not from another: the engine tells sums."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._arrived = -1.0
        self._seen_at = float("-inf")

    def seen(self, fetching: Fetching | None, now: float) -> None:
        """A look at the engine; None: it did not tell, which says nothing."""
        if fetching is None:
            return
        known = now - self._seen_at <= UNSEEN_S
        if not fetching.in_progress:
            self._since = None
        elif self._since is None or not known or fetching.arrived != self._arrived:
            self._since = now
        self._arrived = fetching.arrived
        self._seen_at = now

    @property
    def seconds(self) -> float:
        """For how long nothing had arrived though something should have, at the last look."""
        return 0.0 if self._since is None else self._seen_at - self._since
