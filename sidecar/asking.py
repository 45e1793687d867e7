"""What the commands read from an admin port, or why not, in one line. Knows HTTP, not what the answers mean."""

import http
import re
from collections.abc import Mapping
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)


class _Stays(HTTPRedirectHandler):
    """An admin port sends nobody elsewhere, and its key is for nobody else."""

    def redirect_request(self, *_: object) -> None:
        return None


_open = build_opener(ProxyHandler({}), _Stays).open  # nor is it behind a proxy


class NoKey(Exception):
    """What was found in place of a key, and what is wanted. It holds nothing of the file's content."""


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


def shown(token_file: str) -> dict[str, str]:
    """The headers that show the key in this file, none for "". Raises `NoKey`."""
    if not token_file:
        return {}
    try:
        words = Path(token_file).read_text(encoding="ascii").split()
        found = "" if len(words) == 1 else f"it holds {'more than a' if words else 'no'} key"
    except OSError as error:
        found = error.strerror or type(error).__name__
    except UnicodeDecodeError:
        found = "no ASCII"
    if found:
        raise NoKey(f"--token-file {token_file}: {found}; the sidecar's --admin-token-file is wanted")
    return {"authorization": f"Bearer {words[0]}"}


def get(
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    statuses: frozenset[int] = frozenset({200}),
) -> Page:
    """`statuses`: those that count as answers. Raises `NoAnswer`."""
    try:
        try:
            response = _open(Request(url, headers=dict(headers or {})), timeout=timeout_s)  # noqa: S310 http(s) only
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
