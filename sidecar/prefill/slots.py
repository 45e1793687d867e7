"""Which adapters an engine has at hand: those that its GPU slots hold, as far as its metrics tell. Pure.

An adapter without a slot pushes another one out, and waits while every slot is taken by running requests.
"""

import math
import re
from dataclasses import dataclass

FAMILY = "vllm:lora_requests_info"
MAX_SLOTS = 2**20
"""More than any engine has."""
_ROW = re.compile(rf"^{FAMILY}\{{([^}}\n\\]*)\}} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class Slots:
    """`count` adapters fit at once (`--max-loras`); `held` are those that were used last."""

    count: int
    held: frozenset[str]

    def has_place(self, adapter: str) -> bool:
        """Whether it runs there without pushing another one out."""
        return adapter in self.held or len(self.held) < self.count


def parse_slots(metrics: str) -> Slots | None:
    """The slots in a Prometheus text exposition of vLLM 0.32, None if it does not tell.

    Every combination of running and waiting adapters is a row of its own that stays, and its value is when it was
    seen last (v1/metrics/loggers.py), so the rows together say when each adapter ran last. Slots are given to those
    that ran last (lora/model_manager.py: an LRU cache).
    """
    count, last = 0, dict[str, float]()
    for labels, text in _ROW.findall(metrics):
        row = dict(_LABEL.findall(labels))
        try:
            when, count = float(text), max(count, int(row.get("max_lora", "0")))
        except ValueError:
            return None
        if not math.isfinite(when) or count > MAX_SLOTS:
            return None
        for names in (row.get("running_lora_adapters", ""), row.get("waiting_lora_adapters", "")):
            for name in filter(None, names.split(",")):
                last[name] = max(when, last.get(name, 0.0))
    if count < 1:
        return None
    latest = sorted(last.values(), reverse=True)
    oldest_held = latest[min(count, len(latest)) - 1] if latest else 0.0
    return Slots(count, frozenset(name for name, when in last.items() if when >= oldest_held))
