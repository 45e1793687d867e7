"""Endpoints from a file: HOST:PORT a line, or a YAML list; read again when its content changes.

A ConfigMap is swapped by a symbolic link and a time stamp has a grain, so the content is what counts. It must be
the same in two looks: whoever writes it in place may be half-way through.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import yaml

from sidecar.prefill.address import Address, BadAddress, parse
from sidecar.prefill.discovery.discovery import Member, Report

LOOK_EVERY_S = 1.0
SETTLE_S = 0.1
MAX_BYTES = 1 << 20


class BadFile(ValueError):
    """The message names the line."""


class FileSource:
    """One file. While it is missing or wrong, what was read last stays."""

    def __init__(self, path: str) -> None:
        self.name = f"file:{path}"
        self._path = Path(path)

    async def run(self, report: Report) -> None:
        loop = asyncio.get_running_loop()
        taken: bytes | None = None
        while True:
            try:
                content = await loop.run_in_executor(None, self._read)
                while content != taken:
                    await asyncio.sleep(SETTLE_S)
                    before, content = content, await loop.run_in_executor(None, self._read)
                    if content == before:
                        break
                if content != taken:
                    report.found(endpoints_of(content))
                    taken = content
                report.heard()
            except BadFile as error:
                report.failed("bad_file", f"{self._path} {error}")
            except FileNotFoundError:
                report.failed("missing", f"{self._path} does not exist")
            except OSError as error:
                report.failed("unreadable", f"{self._path}: {error.strerror or type(error).__name__}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _read(self) -> bytes:
        return _content(self._path)


def _content(path: Path) -> bytes:
    """Raises `OSError`; `BadFile` for one that is too large."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadFile(f"is larger than {MAX_BYTES} bytes")
    return content


def first_look(path: str) -> str:
    """What `FileSource` would report of the file as it is now, or ""."""
    file = Path(path)
    try:
        if file.is_fifo() or file.is_char_device():  # opened, it may wait for ever
            return "is no file"
        endpoints_of(_content(file))
    except BadFile as error:
        return str(error)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def endpoints_of(content: bytes) -> Mapping[Address, Member]:
    """The endpoints that a file lists. Raises `BadFile`."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"line {content[: error.start].count(10) + 1}: not UTF-8") from None
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    entries = [(number, line) for number, line in lines if line]
    if entries and entries[0][1].startswith(("-", "[")):
        try:  # an IPv6 address opens with a bracket too
            parse(entries[0][1])
        except BadAddress:
            entries = _yaml_entries(text)
    members: dict[Address, Member] = {}
    for number, entry in entries:
        try:
            members[parse(entry)] = Member(detail=f"line {number}")
        except BadAddress as error:
            raise BadFile(f"line {number}: {error}") from None
    return members


def _yaml_entries(text: str) -> list[tuple[int, str]]:
    """Line and text of every item. Scalars are taken as they are written: YAML 1.1 reads 1:30 as the number 90."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise BadFile(f"line {mark.line + 1 if mark else 1}: not valid YAML: {problem}") from None
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return []
    if not isinstance(node, yaml.SequenceNode):
        raise BadFile(f"line {node.start_mark.line + 1}: not a list of HOST:PORT")
    entries = []
    for item in node.value:
        number = item.start_mark.line + 1
        if not isinstance(item, yaml.ScalarNode):
            raise BadFile(f"line {number}: not HOST:PORT")
        entries.append((number, item.value))
    return entries
