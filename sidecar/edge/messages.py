"""The messages of one request, composed: read from the client, sent to either engine, headed back to the client.

Functions of their arguments alone; what is sent when is the runner's business.
"""

from collections.abc import Sequence

from sidecar.edge.engine import Buffer
from sidecar.edge.head import Head
from sidecar.edge.request import Request
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import (
    LARGE_BYTES,
    Fields,
    NotAnObject,
    decode_body,
    fields,
    fields_if_object,
    without_forbidden,
)

Parts = tuple[Buffer, ...]

_NOT_TO_CLIENT = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"transfer-encoding", b"content-length"}
)
_NOT_TO_CLIENT_OF_API = _NOT_TO_CLIENT | {b"x-request-id", b"x-pd-decision"}


def read_body(request: Request, api: Api | None) -> tuple[Buffer, Fields]:
    """The request's body without what no client may say, and its members if they are to be known; of a streamed
    body nothing. Takes the body out of the request. Raises `NotAnObject`."""
    if request.is_streamed or not request.has_body:
        if api is not None:
            raise NotAnObject("there is no body")
        return b"", {}
    body: Buffer = request.body
    request.body = b""
    members = fields(body) if request.is_always_read else fields_if_object(body)
    cleaned = without_forbidden(body, members)
    return (body, members) if cleaned is None else (cleaned, fields(cleaned))


def to_prefill(request: Request, label: str, body: Sequence[Buffer], lines: bytes) -> Parts:
    """The prefill leg's request; `label` is the endpoint's address, `lines` are header lines of our own."""
    head = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
        request.target,
        request.prefill_block(label.encode()),
        lines,
        sum(map(len, body)),
    )
    if len(body[0]) < LARGE_BYTES:
        return head + body[0], *body[1:]
    return head, *body


def to_decode(
    request: Request, body: Buffer, handoff_params: bytes | None, trace: bytes, *, with_id: bool
) -> Parts:
    """The decode leg's request: the client's own, with the handoff's parameters in its body if there are any."""
    parts: Parts = (body,) if body else ()
    if handoff_params is not None:
        parts = decode_body(body, handoff_params)
    block = request.relay_block(inflated=request.inflated, with_id=with_id)
    if request.is_streamed:
        framing = request.own_framing()
    elif request.has_body or parts:
        framing = b"content-length: %d\r\n" % sum(map(len, parts))
    else:
        framing = b""
    if request.upgrade:
        trace += b"connection: upgrade\r\nupgrade: %b\r\n" % request.read[b"upgrade"][0]
    head = b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (request.method, request.target, block, framing, trace)
    return head, *parts


def to_client(head: Head, *, framing: bytes, own: bytes, is_api: bool, close: bool) -> bytes:
    """The engine's head as the client gets it, with our own header lines."""
    drop = _NOT_TO_CLIENT_OF_API if is_api else _NOT_TO_CLIENT
    lines = [b"%b: %b\r\n" % header for header in head.headers if header[0].lower() not in drop]
    return b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n" % (
        head.status,
        head.reason,
        b"".join(lines),
        framing,
        own,
        b"connection: close\r\n" if close else b"",
    )
