"""What `--discovery` says, taken apart and checked. No I/O."""

import re
from dataclasses import dataclass
from typing import Literal

from sidecar.prefill.address import BadAddress, parse

Kind = Literal["none", "file", "dns", "kubernetes"]

FORMS = "none, kubernetes, dns:NAME:PORT or file:PATH"

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_KEY = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_VALUE.pattern}"
_VALUE = rf"(?:{_LABEL_VALUE.pattern})?"
_REQUIREMENT = re.compile(
    rf"\s*(?:!\s*{_LABEL_KEY}|{_LABEL_KEY}(?:\s*(?:=|==|!=)\s*{_VALUE}|\s+(?:in|notin)\s*"
    rf"\(\s*{_VALUE}\s*(?:,\s*{_VALUE}\s*)*\))?)\s*"
)
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")


class BadSpec(ValueError):
    """Not a source of endpoints; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """`path` of a file; for DNS `host`, a name, and `port`, that of every endpoint behind it."""

    kind: Kind
    path: str = ""
    host: str = ""
    port: int = 0


def parse_spec(text: str) -> Spec:
    """`none`, `kubernetes`, `dns:NAME:PORT`, `file:PATH`. Raises `BadSpec`."""
    kind, _, rest = text.partition(":")
    if text == "none":
        return Spec("none")
    if text == "kubernetes":
        return Spec("kubernetes")
    if kind == "file":
        if not rest or "\0" in rest:
            raise BadSpec(f"{text!r} names no file: file:PATH")
        return Spec("file", path=rest)
    if kind == "dns":
        return _service(text, rest)
    raise BadSpec(f"{text!r} is not {FORMS}")


def _service(text: str, rest: str) -> Spec:
    if ":" not in rest:
        raise BadSpec(f"{text!r} has no port: dns:NAME:PORT, the port of every endpoint behind the name")
    try:
        address = parse(rest)
    except BadAddress as error:
        raise BadSpec(f"{text!r}: {error}") from None
    if address.host[-1].isdigit() or ":" in address.host:
        raise BadSpec(f"{text!r}: {address.host} is an address and no name; use --prefill {address}")
    # `parse` takes the final dot away, which says that no search domain is to be tried.
    is_absolute = rest.rpartition(":")[0].endswith(".")
    return Spec("dns", host=address.host + "." * is_absolute, port=address.port)


def check_selector(text: str) -> None:
    """A label selector as the Kubernetes API takes it (`a=b,c in (d,e),!f`). Raises `BadSpec`."""
    for requirement in _COMMA_OUTSIDE_BRACKETS.split(text):
        if not _REQUIREMENT.fullmatch(requirement):
            raise BadSpec(f"{requirement.strip()!r} is no label requirement (KEY=VALUE, KEY in (A,B), KEY, !KEY)")


def check_name(text: str) -> None:
    """The name of an object or a namespace. Raises `BadSpec`."""
    if text and not _NAME.fullmatch(text):
        raise BadSpec(f"{text!r} is no name of a Kubernetes object")


def check_label_value(text: str) -> None:
    """The value of a label. Raises `BadSpec`."""
    if text and not _LABEL_VALUE.fullmatch(text):
        raise BadSpec(f"{text!r} is no label value (up to 63 letters, digits, '-', '_' and '.')")
