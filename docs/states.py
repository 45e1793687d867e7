"""The states of a request and every fault's way out of them, drawn from the failure table: a Mermaid diagram."""

from sidecar.exchange.failures import ROWS, Stage, Then

ENDS = {
    Then.ANSWER: ("own", "our own error answer"),
    Then.RELAY: ("relayed", "the engine's answer, unchanged"),
    Then.NEXT: ("next", "another prefill endpoint?"),
    Then.POLICY: ("policy", "the policy"),
    Then.NEXT_OR_HERE: ("next_or_here", "another prefill endpoint with it?"),
    Then.BREAK_OFF: ("broken", "error event, or a cut body"),
    Then.RELEASE: ("given_back", "the handoff is given back"),
    Then.TO_FIRST_BYTE: ("let", "let to the first byte, then closed"),
    Then.CLOSE: ("closed", "closed at once"),
}
"""Where a fault leads: the name of the state and what it says."""
WELL = (
    ("[*]", Stage.READING, ""),
    (Stage.READING, Stage.PREFILL, "remote"),
    (Stage.READING, Stage.DECODE, "local"),
    (Stage.PREFILL, Stage.HANDOFF, "200 with a handoff"),
    (Stage.HANDOFF, Stage.PULL, "checked and sent"),
    (Stage.PULL, Stage.STREAMING, "first byte"),
    (Stage.DECODE, Stage.STREAMING, "first byte"),
    (Stage.STREAMING, "[*]", "whole"),
)
"""The way of a request that nothing happens to (life.py)."""
DECIDED = (
    ("next", "prefill", "yes, and an attempt is left"),
    ("next", "policy", "no"),
    ("next_or_here", "prefill", "yes, and an attempt is left"),
    ("next_or_here", "decode", "no"),
    ("policy", "decode", "recompute, within the budget"),
    ("policy", "own", "fail"),
)
PER_LINE = 3


def diagram() -> str:
    """Every row of the table is on one of the edges."""
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {name}: {text}" for name, text in ENDS.values()]
    lines += [_edge(*one) for one in (*WELL, *DECIDED)]
    for stage in Stage:
        for then, (end, _) in ENDS.items():
            faults = [row.fault for row in ROWS if row.stage is stage and row.then is then]
            if faults:
                parts = [faults[at : at + PER_LINE] for at in range(0, len(faults), PER_LINE)]
                lines.append(_edge(stage, end, ",<br/>".join(", ".join(part) for part in parts)))
    return "\n".join([*lines, "```"]) + "\n"


def _edge(source: str, target: str, label: str) -> str:
    return f"    {source} --> {target}" + (f": {label}" if label else "")
