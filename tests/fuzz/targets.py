"""What is fuzzed: each target takes bytes as a stranger would send them and holds the reader to its promises."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import yaml

from sidecar import config
from sidecar.connectors.connector import EngineFacts, Handoff, PrefillAnswer, Source
from sidecar.connectors.nixl import NIXLV2
from sidecar.edge import client
from sidecar.edge.request import Request
from sidecar.exchange.splice import NotAnObject, decode_body, fields, fields_if_object, without_forbidden
from sidecar.prefill.address import BadAddress, parse
from sidecar.settings import Settings
from tests.unit.exchange.bodies import holds_forbidden
from tests.unit.handoffs import BLOCK_SIZE, HOST, answer, params
from transport import handshake, zmtp

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_decode_answer = msgspec.json.Decoder(PrefillAnswer).decode


# ------------------------------------------------------------------- HTTP


class _Transport:
    """Takes what is written; says how the connection ended."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        self.written += b"".join(parts)

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, _name: str) -> None:
        return None

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def set_protocol(self, _protocol: object) -> None: ...


class _Runner:
    """Answers every request at once with nothing, and notes what it was."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012 (emptied for every input)

    def __init__(self, _service: object, connection: Any, request: Request) -> None:
        self.request = request
        self._client = connection
        self._pieces: list[bytes] = []

    def start(self) -> None:
        if self.request.is_streamed and self.request.has_body and not self.request.is_complete:
            return
        if not self.request.is_streamed:
            self._over(bytes(self.request.body))

    def body_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def body_end(self, _trailers: bytes) -> None:
        self._over(b"".join(self._pieces))

    def tunnel_data(self, _data: bytes) -> None: ...

    def client_left(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def _over(self, body: bytes) -> None:
        request = self.request
        self.seen.append((request.method, request.target, tuple(request.headers), body))
        if not request.upgrade:
            self._client.answered(request)


class _Bug(logging.Handler):
    """The edge survives a bug of ours and logs it: here that is a finding."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage()) from (record.exc_info or (None, None))[1]


_LOOP = SimpleNamespace(time=lambda: 0.0)


def _read(data: bytes, pieces: list[int]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """What a connection makes of `data` if it arrives in these pieces: requests, and why it stopped."""
    refused: list[str] = []
    service = SimpleNamespace(
        loop=_LOOP,
        settings=Settings(max_body_bytes=2000),
        live=SimpleNamespace(draining=False),
        observer=SimpleNamespace(refused=lambda row: refused.append(row.reason)),
    )
    _Runner.seen = []
    connection = client.ClientConnection(cast("Any", service), set())
    connection.connection_made(cast("Any", _Transport()))
    at = 0
    for size in [*pieces, len(data)]:
        if piece := data[at : at + size]:
            connection.data_received(piece)
        at += size
    return _Runner.seen, refused


def edge(data: bytes) -> None:
    """However the bytes are cut, the same requests are read; what an engine gets of them is one message."""
    runner, client.Runner = client.Runner, _Runner  # type: ignore[misc,assignment]
    log = logging.getLogger("sidecar")
    handlers, log.handlers, log.propagate = log.handlers, [_Bug()], False
    try:
        whole = _read(data, [])
        chance = random.Random(data)
        assert _read(data, [1] * len(data)) == whole, "byte by byte"
        assert _read(data, [chance.choice((1, 3, 17, 64)) for _ in range(len(data))]) == whole, "in pieces"
    finally:
        client.Runner = runner  # type: ignore[misc]
        log.handlers, log.propagate = handlers, True
    for method, target, headers, _ in whole[0]:
        _check_blocks(Request(method, target, list(headers), http_1_0=False, started_at=0.0))


def _check_blocks(request: Request) -> None:
    for block in (
        request.relay_block(inflated=False, with_id=True),
        request.relay_block(inflated=True, with_id=True),
        request.prefill_block(b"p:1"),
    ):
        *lines, last = block.split(b"\r\n")
        assert last == b""
        names = [line.partition(b":")[0].lower() for line in lines]
        assert b"" not in names, "an empty line ends the head: what follows would be another message"
        assert not any(b"\n" in line or b"\r" in line for line in lines), "two lines in one field"
        assert b"x-prefiller-host-port" not in names
        ids = [line.partition(b": ")[2] for line in lines if line.lower().startswith(b"x-request-id:")]
        assert len(ids) == 1
        assert REQUEST_ID.fullmatch(ids[0])
    for line in request.prefill_block(b"p:1").lower().split(b"\r\n"):
        assert not line.startswith((b"cookie:", b"proxy-authorization:", b"transfer-encoding:", b"content-length:"))


EDGE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    b"POST /v1/chat/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nConnection: X-A, close\r\nX-A: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/x HTTP/1.1\r\nHost: a\r\nX-Request-Id: a,b\r\nX-Prefiller-Host-Port: b:8000\r\nCookie: c\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\nProxy-Authorization: x\r\nTE: trailers\r\n\r\n",
)


# ------------------------------------------------------------------- JSON


def splice(data: bytes) -> None:
    """Refused, or cleaned of what a client may never set, or nothing of it is in it; the rest is what it was."""
    for read in (fields, fields_if_object):
        try:
            top = read(data)
            cleaned = without_forbidden(data, top) if top else None
        except NotAnObject:  # 400
            continue
        sent = data if cleaned is None else cleaned
        meaning = _meaning(sent)
        if meaning is _UNREADABLE:
            assert cleaned is None or _meaning(data) is _UNREADABLE, "the removal made it unreadable"
            continue
        assert not holds_forbidden(meaning)
        if top:
            whole = json.loads(b"".join(map(bytes, decode_body(sent, b'{"a":1}'))))
            assert whole.pop("kv_transfer_params") == {"a": 1}
            assert repr(whole) == repr(meaning), "decode's body means something else"


_UNREADABLE = object()


def _meaning(data: bytes) -> Any:
    """What the engine's parser makes of it; it is more lenient than ours."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _UNREADABLE


SPLICE = (
    b'{"model": "m", "prompt": "x", "max_tokens": 5}',
    b'{"kv_transfer_params": {"do_remote_prefill": true}, "prompt": "x"}',
    b'{"prompt":"x","vllm_xargs":{"kv_transfer_params":{},"a":1}}',
    b'{"token_ids":[1],"sampling_params":{"extra_args":{"ec_transfer_params":1}}}',
    b'{"\\u006bv_transfer_params":1,"kv_transfer_params":2,"a":[{"kv_transfer_params":3}]}',
    b' \n{ "a" : 1.50 , "b" : 9007199254740993 }\n ',
    b"\xef\xbb\xbf{}",
    '{"kv_transfer_params":1}'.encode("utf-16"),
)

SOURCE = Source(frozenset({HOST}), EngineFacts(block_size=BLOCK_SIZE, num_blocks=1000))


def handoff(data: bytes) -> None:
    """A prefill answer is refused, or its handoff is one that a decode engine can live with."""
    try:
        read = _decode_answer(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    found = NIXLV2.read(read, SOURCE)
    if not isinstance(found, Handoff):
        assert found.detail
        assert "\n" not in found.detail
        return
    meant = json.loads(found.params)
    assert meant["do_remote_prefill"] is True
    assert not meant.get("do_remote_decode")
    assert found.host == meant["remote_host"]
    assert 0 < meant["remote_port"] < 65536
    for name in ("remote_engine_id", "remote_request_id"):
        assert meant[name]
        assert isinstance(meant[name], str)
        assert "," not in meant[name]
    blocks = [block for group in meant["remote_block_ids"] for block in group]
    assert all(type(block) is int and 0 <= block < 1000 for block in blocks)
    if not found.empty:
        assert found.blocks * BLOCK_SIZE >= found.prompt_tokens > 0


HANDOFF = (answer(), answer(params(remote_block_ids=[[]]), prompt_tokens=5), answer(...), answer(params(tp_size=2)))


# ------------------------------------------------------------------- headers, files, side channel


def header(data: bytes) -> None:
    """An address that is taken has one spelling."""
    with contextlib.suppress(BadAddress, UnicodeDecodeError):
        address = parse(data.decode("ascii"))
        assert parse(str(address)) == address
        assert 0 < address.port < 65536
        assert not set(str(address)) & set(" ,/@\\\r\n\t%")


HEADER = (
    b"10.0.0.5:8000",
    b"[::1]:8000",
    b"prefill-0.prefill:8000",
    b"http://a:1",
    b"[fe80::1%eth0]:80",
    b"0x7f.1:80",
)

_FILE = Path(tempfile.gettempdir()) / f"pd-fuzz-{os.getpid()}.yaml"


def configuration(data: bytes) -> None:
    """A file is taken, or every mistake is said in one line; what is taken can be shown and is taken again."""
    _FILE.write_bytes(data)
    mistakes: list[str] | None = None
    try:
        settings, _ = config.load(["--config", str(_FILE)], {})
        config.doubts(settings)
        _FILE.write_text(yaml.safe_dump(config.shown(settings)))
        assert config.load(["--config", str(_FILE)], {})[0] == settings
    except config.BadSettings as error:
        mistakes = error.mistakes
    finally:
        _FILE.unlink(missing_ok=True)
    assert mistakes is None or mistakes, "refused without a word"
    assert not any("\n" in mistake for mistake in mistakes or ()), mistakes


CONFIGURATION = (
    b"port: 8001\nprefill: [a:1, b:2]\npull-timeout: 2.5\n",
    b"disagg: off\n",
    b"prefill-allow: [10.0.0.0/8, any]\nkv-connector: none\n",
    b"discovery: dns:prefill.svc:8000\ndiscovery-dns-server: [10.0.0.10:53]\n",
    b"secure-serving: true\n",
    b"{}",
)


def side_channel(data: bytes) -> None:
    """The first byte chooses: frames on the wire, a question, or a description of an engine."""
    if not data:
        return
    kind, rest = data[0] % 3, data[1:]
    if kind == 0:
        wire = zmtp.Wire(frozenset({zmtp.REQ, zmtp.DEALER}), frame_bytes_max=64, parts_max=3)
        with contextlib.suppress(zmtp.ProtocolError):
            for at in range(0, len(rest), 7):
                for message in wire.feed(rest[at : at + 7]):
                    assert 1 <= len(message) <= 3
                    assert all(len(part) <= 64 for part in message)
    elif kind == 1:
        with contextlib.suppress(handshake.HandshakeError):
            rank = handshake.decode_request(rest)
            assert handshake.decode_request(handshake.encode_request(rank)) == rank
    else:
        with contextlib.suppress(handshake.HandshakeError):
            found = handshake.describe(rest)
            assert found.geometry is None or found.geometry.logical_block_size > 0


SIDE_CHANNEL = (
    b"\0" + zmtp.GREETING + zmtp.encode_ready(zmtp.REQ) + zmtp.encode_message(b"", b"x"),
    b"\1" + handshake.encode_request(handshake.Rank(0, 0)),
    b"\2" + msgspec.msgpack.encode(handshake.Payload("h", b"\x81\xa9engine_id\xa1P")),
)

TARGETS = {
    "edge": (edge, EDGE),
    "splice": (splice, SPLICE),
    "handoff": (handoff, HANDOFF),
    "header": (header, HEADER),
    "configuration": (configuration, CONFIGURATION),
    "side-channel": (side_channel, SIDE_CHANNEL),
}
