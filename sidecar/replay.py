"""`pd-sidecar replay`: reads recorded decisions and prints what other rules would have made of them."""

import argparse
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidecar.decision.replay import RULES, BadRule, judge, priced, table

TIMEOUT_S = 10.0
USUAL = ("recorded", "local", "remote", *RULES)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 for what cannot be read and rules that there are not."""
    parser = argparse.ArgumentParser(
        prog="pd-sidecar replay",
        description="What other decision rules would have made of recorded decisions. A rule is recorded, local, "
        f"remote, or {', '.join(RULES)}, with or without :NUMBER (cost:0.5 is --stall-weight 0.5).",
    )
    parser.add_argument("log", help="what /decisions gave: a file (an array or record a line), its URL, or -")
    parser.add_argument("--rule", action="append", help=f"a rule to compare (default: {' '.join(USUAL)})")
    options = parser.parse_args(list(argv))
    try:
        records = _records(_text(options.log))
        judged = priced(records)
        outcomes = [judge(name, judged) for name in options.rule or USUAL]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"pd-sidecar: replay: {options.log}: {_first_line(error)}", file=sys.stderr)  # noqa: T201
        return 2
    sys.stdout.write(table(outcomes, len(judged), len(records) - len(judged)))
    return 0


def _text(where: str) -> bytes:
    if where == "-":
        return sys.stdin.buffer.read()
    if where.startswith(("http://", "https://")):
        with urllib.request.urlopen(where, timeout=TIMEOUT_S) as response:  # noqa: S310 the operator's own address
            content: bytes = response.read()
            return content
    return Path(where).read_bytes()


def _records(text: bytes) -> list[dict[str, Any]]:
    """One JSON value, or one on each line: records, or arrays of them."""
    try:
        values = [msgspec.json.decode(text)]
    except msgspec.DecodeError:
        values = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
    found: list[dict[str, Any]] = []
    for value in values:
        found += msgspec.convert(value if isinstance(value, list) else [value], list[dict[str, Any]])
    return found


def _first_line(error: Exception) -> str:
    if isinstance(error, BadRule):
        return str(error)
    return str(getattr(error, "strerror", None) or error).splitlines()[0]
