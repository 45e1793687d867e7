"""`pd-sidecar replay`: reads recorded decisions and prints what other rules would have made of them."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidecar.asking import NoAnswer, NoKey, get, shown
from sidecar.decision.replay import RULES, BadRule, judge, priced, table

TIMEOUT_S = 10.0
WANTED = "what /decisions gave is wanted: a JSON array of records, or one a line"
WANTED_URL = "/decisions of the admin port (--metrics-port) is wanted"
WANTED_KEY = "its key is wanted (--token-file)"
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
    parser.add_argument(
        "--token-file", default="", help="file with the key (--admin-token-file) of another pod's admin port"
    )
    options = parser.parse_args(list(argv))
    try:
        records = _records(_text(options.log, options.token_file))
        judged = _judged(records)
        outcomes = [judge(name, judged) for name in options.rule or USUAL]
    except (BadLog, BadRule) as error:
        print(f"pd-sidecar: replay: {options.log}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    sys.stdout.write(table(outcomes, len(judged), len(records) - len(judged)))
    return 0


class BadLog(Exception):
    """What was found in place of recorded decisions, and what is wanted. Holds nothing of the content."""


class _Inputs(msgspec.Struct):
    tokens: float
    cached: float
    streams: float
    prefill_ahead: float


class _Predicted(msgspec.Struct):
    local_seconds: float
    remote_seconds: float
    stall_seconds: float


class _Judged(msgspec.Struct):
    """What a rule looks at in a decision of the cost rule."""

    decided: str
    inputs: _Inputs
    predicted: _Predicted


class _Record(msgspec.Struct):
    """Any decision."""

    predicted: dict[str, Any] = {}


def _text(where: str, token_file: str) -> bytes:
    """Raises `BadLog`."""
    if where == "-":
        return sys.stdin.buffer.read()
    if where.startswith(("http://", "https://")):
        try:
            return get(where, timeout_s=TIMEOUT_S, headers=shown(token_file)).body
        except NoKey as error:
            raise BadLog(str(error)) from None
        except NoAnswer as error:
            raise BadLog(f"{error}; {WANTED_KEY if error.status == 403 else WANTED_URL}") from None
    try:
        return Path(where).read_bytes()
    except OSError as error:
        raise BadLog(f"{error.strerror}; {WANTED}") from None


def _records(text: bytes) -> list[dict[str, Any]]:
    """One JSON value, or one on each line: records, or arrays of them. Raises `BadLog`."""
    try:
        values = [msgspec.json.decode(text)]
    except (ValueError, RecursionError):
        values = [_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = [one for value in values for one in (value if isinstance(value, list) else [value])]
    for number, one in enumerate(found, 1):
        if not isinstance(one, dict):
            raise BadLog(f"record {number} is {_kind(one)}, not an object; {WANTED}")
    return found


def _line(number: int, line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except RecursionError:
        found = "it is nested too deeply"
    except ValueError as error:
        found = str(error)
    raise BadLog(f"line {number} is no JSON ({found}); {WANTED}")


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _judged(records: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that can be judged. Raises `BadLog` for one that has not what it should have."""
    found: list[Mapping[str, Any]] = []
    for number, record in enumerate(records, 1):
        try:
            msgspec.convert(record, _Record)
            for one in priced([record]):
                msgspec.convert(one, _Judged)
                found.append(one)
        except msgspec.ValidationError as error:
            raise BadLog(f"record {number}: {error}; {WANTED}, of this version") from None
    return found
