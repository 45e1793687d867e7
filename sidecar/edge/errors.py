"""Our own answers: a row of the failure table as bytes on the wire. The only place where they are worded."""

from http import HTTPStatus

import msgspec

from sidecar.exchange.apis import MESSAGES, RESPONSES, Api
from sidecar.exchange.failures import Row

_TYPES = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailable",
    504: "GatewayTimeoutError",
}


def _error(row: Row, detail: str, status: int) -> dict[str, object]:
    message = f"{row.message} ({detail})" if detail else row.message
    kind = _TYPES.get(status, "InvalidRequestError" if status < 500 else "InternalServerError")
    return {
        "message": message,
        "type": kind,
        "param": None,
        "code": status,
        "stage": str(row.stage),
        "reason": row.reason,
    }


def answer(
    row: Row, detail: str, api: Api | None, extra_headers: bytes, *, close: bool, head_only: bool = False
) -> bytes:
    """A whole HTTP answer. `extra_headers` are complete lines."""
    content: dict[str, object] = {"error": _error(row, detail, row.status)}
    if api is MESSAGES:
        content = {"type": "error", **content}
    body = msgspec.json.encode(content)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
        row.status,
        HTTPStatus(row.status).phrase.encode(),
        len(body),
    )
    if row.retry_after_s:
        head += b"retry-after: %d\r\n" % row.retry_after_s
    if close:
        head += b"connection: close\r\n"
    return head + extra_headers + b"\r\n" + (b"" if head_only else body)


def event(row: Row, api: Api | None, *, after_partial_event: bool) -> bytes:
    """An SSE event that tells a streaming client that the answer ends here and is not complete."""
    error = _error(row, "", 502)
    if api is MESSAGES:
        text = b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error})
    elif api is RESPONSES:
        text = b"event: error\ndata: " + msgspec.json.encode({**error, "type": "error", "code": "server_error"})
    else:
        text = b"data: " + msgspec.json.encode({"error": error})
    return (b"\n\n" if after_partial_event else b"") + text + b"\n\n"
