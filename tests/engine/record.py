"""What an engine answered, in a form that can be compared: status, headers and the *shape* of the answer (keys in
order, types, the values of a few fields that are the same for every model, event kinds in order), never text or
numbers.

Blocking; it must not know what was asked.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Fields whose value says something about the protocol, whatever the model.
TELLING = {
    *("object", "type", "role", "status", "finish_reason", "stop_reason", "code", "param", "output_mode"),
    *("do_remote_prefill", "do_remote_decode", "transfer_mode", "tp_size", "pp_size", "dcp_size", "version"),
    *("tool_choice", "truncation", "service_tier", "sequence_number", "remote_blocks_expiry_time"),
}
HEADERS = ("content-type", "transfer-encoding", "allow", "connection", "server", "vary", "www-authenticate")
TIMEOUT_SECONDS = 60.0
# What real engines answered, to hold simulated ones against; made by `python -m e2e.test_contract`.
RECORDED = Path(__file__).with_name("recorded.json")


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    broken: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(
    url: str,
    path: str,
    body: Any = None,
    method: str = "POST",
    headers: tuple[tuple[str, str], ...] = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Reply:
    """One request on a connection of its own; `broken` says that the body had no proper end."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_seconds)
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = dict(headers)
        if raw is not None:
            sent.setdefault("content-type", "application/json")
        connection.request(method, path, raw, sent)
        answer = connection.getresponse()
        try:
            data = answer.read()
        except http.client.IncompleteRead as error:
            return Reply(answer.status, answer.getheaders(), error.partial, broken=True)
        return Reply(answer.status, answer.getheaders(), data)
    finally:
        connection.close()


def shape(value: Any, key: str = "") -> Any:
    if key in TELLING and not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        # `prompt_logprobs` is a map by token id.
        return {"#" if name.isdigit() else name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for each in value:
            if (made := shape(each)) not in shapes:
                shapes.append(made)
        return shapes
    return type(value).__name__


def events(body: bytes) -> list[Any]:
    """The events of a stream; a run of events of one shape (tokens) counts once."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if not block:
            continue
        lines = dict(line.partition(": ")[::2] for line in block.split("\n"))
        data = lines.pop("data", None)
        event: list[Any] = [lines]
        if data in ("[DONE]", None):
            event.append(data)
        else:
            assert data is not None
            parsed = json.loads(data)
            parsed.pop("sequence_number", None)
            event += [shape(parsed), "spaced" if data.startswith('{"error": ') else "compact"]
        if event not in found[-1:]:
            found.append(event)
    return found


def record(reply: Reply) -> dict[str, Any]:
    kept: dict[str, Any] = {"status": reply.status, "broken": reply.broken}
    kept["headers"] = [(name.lower(), value if name.lower() in HEADERS else "...") for name, value in reply.headers]
    kind = reply.header("content-type") or ""
    if kind.startswith("application/json"):
        kept["body"] = shape(reply.json) if reply.body else None
    elif kind.startswith("text/event-stream"):
        kept["events"] = events(reply.body)
    elif kind.startswith("text/plain") and reply.body.startswith(b"# HELP"):
        kept["families"] = "metrics"
    else:
        kept["body"] = reply.body.decode("latin-1")
    return kept


def difference(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two records differ, one line for each place."""
    if isinstance(one, dict) and isinstance(other, dict):
        lines = [f"{where}/{key}: only in the first" for key in one if key not in other]
        lines += [f"{where}/{key}: only in the second" for key in other if key not in one]
        if not lines and list(one) != list(other):
            lines.append(f"{where}: order {list(one)} against {list(other)}")
        for key in one:
            if key in other:
                lines += difference(one[key], other[key], f"{where}/{key}")
        return lines
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [
            line
            for index, (left, right) in enumerate(zip(one, other, strict=True))
            for line in difference(left, right, f"{where}[{index}]")
        ]
    return [] if one == other else [f"{where}: {one!r} against {other!r}"]


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """As it is when it was written and read again."""
    again: dict[str, Any] = json.loads(json.dumps(found))
    return again


def save(sections: dict[str, dict[str, Any]], path: Path = RECORDED) -> None:
    """Records by section and case; equal ones are written once, each on a line of its own."""
    shapes: list[str] = []
    places: dict[str, dict[str, int]] = {}
    for section, found in sections.items():
        places[section] = {}
        for name, kept in found.items():
            text = json.dumps(kept, separators=(",", ":"))
            if text not in shapes:
                shapes.append(text)
            places[section][name] = shapes.index(text)
    lines = ",\n".join(shapes)
    cases = json.dumps(places, indent=0)
    path.write_text(f'{{"shapes": [\n{lines}\n],\n"cases": {cases}}}\n')


def load(path: Path = RECORDED) -> dict[str, dict[str, Any]]:
    stored = json.loads(path.read_text())
    return {
        section: {name: stored["shapes"][place] for name, place in found.items()}
        for section, found in stored["cases"].items()
    }
