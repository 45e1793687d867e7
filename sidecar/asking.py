"""What the commands read from an admin port, or why not, in one line. Knows HTTP, not what the answers mean."""

import http
import re
from collections.abc import Callable, Mapping
from http.client import HTTPException, InvalidURL
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request

_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)


class NoAnswer(Exception):
    """What was found in place of an answer. It holds nothing that came over the network but a status."""

    def __init__(self, found: str, status: int = 0) -> None:
        super().__init__(found)
        self.status = status
        """Of HTTP, 0 without one."""


class Page(NamedTuple):
    """An answer: its status, what it calls itself, its body."""

    status: int
    media_type: str
    body: bytes


def get(
    url: str,
    *,
    timeout_s: float,
    opener: Callable[..., Any],
    headers: Mapping[str, str] | None = None,
    statuses: frozenset[int] = frozenset({200}),
) -> Page:
    """`opener` is that of urllib, `statuses` those that count as answers. Raises `NoAnswer`."""
    try:
        try:
            response = opener(Request(url, headers=dict(headers or {})), timeout=timeout_s)  # noqa: S310 http(s) only
        except HTTPError as error:
            response = error
        with response:
            if response.status not in statuses:
                raise NoAnswer(_named(response.status), response.status)
            found = _MEDIA_TYPE.match(response.headers.get("content-type", ""))
            return Page(response.status, found[0] if found else "no media type", response.read())
    except InvalidURL as error:
        raise NoAnswer(str(error)) from None
    except HTTPException:
        raise NoAnswer("no HTTP") from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise NoAnswer(f"no answer within {timeout_s:g} s") from None
        raise NoAnswer(str(getattr(reason, "strerror", None) or reason)) from None


def _named(status: int) -> str:
    """With its name, which is not taken from the answer."""
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
