"""A small coverage-guided fuzzer: inputs are bent, spliced and repeated; what reaches a new line of ours is kept.

A target takes bytes, raises `AssertionError` where a promise is broken, and nothing else ever. It must not know
what the targets test.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

Target = Callable[[bytes], None]
CORPUS = Path(__file__).with_name("corpus")
OURS = tuple(str(Path(__file__).parents[2] / room) for room in ("sidecar", "transport"))
LONGEST = 4096
"""Bytes of an input: what goes wrong goes wrong in a small one."""
INTERESTING = (
    *(b"\0", b"\xff", b"\r\n", b"\n", b" ", b":", b",", b"\\", b'"', b"{", b"}", b"[", b"]", b"\\u0000", b"%00"),
    *(b"-1", b"0", b"1e999", b"18446744073709551616", b"null", b"true", b"NaN", b"\xc1", b"\xed\xa0\x80"),
    *(
        b"kv_transfer_params",
        b"\\u006bv_transfer_params",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
)


@dataclass
class Finding:
    """An input that broke a promise."""

    data: bytes
    error: BaseException

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}; input {self.data[:300]!r}"


@dataclass
class Fuzzer:
    """One target, its corpus in memory, and the lines of ours that it has reached."""

    name: str
    target: Target
    seeds: Iterable[bytes]
    chance: random.Random
    corpus: list[bytes] = field(default_factory=list)
    reached: set[tuple[str, int]] = field(default_factory=set)
    tried: int = 0

    def replay(self) -> Finding | None:
        """Seeds and kept inputs; the first that breaks a promise."""
        for data in [*self.seeds, *kept(self.name)]:
            if finding := self._try(data, always=True):
                return finding
        return None

    def run(self, seconds: float) -> Finding | None:
        """New inputs for so long, or until one breaks a promise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if finding := self._try(self._made()):
                return finding
        return None

    def _try(self, data: bytes, *, always: bool = False) -> Finding | None:
        self.tried += 1
        lines: set[tuple[str, int]] = set()

        def line(frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "line":
                lines.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: FrameType, _event: str, _arg: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(OURS) else None

        before = sys.gettrace()
        sys.settrace(call)
        try:
            self.target(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return Finding(data, error)
        finally:
            sys.settrace(before)
        if always or not lines <= self.reached:
            self.corpus.append(data)
        self.reached |= lines
        return None

    def _made(self) -> bytes:
        data = bytearray(self.chance.choice(self.corpus))
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 8))):
            self._bend(data)
        return bytes(data[:LONGEST])

    def _bend(self, data: bytearray) -> None:
        at = self.chance.randrange(len(data) + 1)
        size = self.chance.choice((1, 1, 2, 4, 16, 64))
        match self.chance.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << self.chance.randrange(8)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = self.chance.choice(INTERESTING)
            case 3:
                data[at:at] = data[at : at + size] * self.chance.choice((1, 2, 50))
            case 4:  # a piece of another input
                other = self.chance.choice(self.corpus)
                start = self.chance.randrange(len(other) + 1)
                data[at : at + size] = other[start : start + self.chance.choice((4, 16, 64))]
            case 5:
                data[at : at + 1] = self.chance.randbytes(1)
            case _:
                data[at : at + size] = self.chance.choice(INTERESTING)


def kept(name: str) -> list[bytes]:
    """The corpus of a target in the repository."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def keep(name: str, data: bytes) -> Path:
    """Puts an input into the repository's corpus, under the name that its content gives."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    return path
