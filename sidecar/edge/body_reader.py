"""Reads the rest of a large request body from the socket into its place, without a copy in between.

It stands in for the client connection meanwhile, as its transport's protocol, and knows nothing of HTTP.
"""

import asyncio
from typing import TYPE_CHECKING

from sidecar import process
from sidecar.edge.request import Request

if TYPE_CHECKING:
    from sidecar.edge.client import ClientConnection


READ_IN_PLACE_BYTES = 131072
"""Less than this is not worth a change of protocol."""
READ_BEFORE = 8
"""Part of a body that must have arrived before there is a place for all of it: a length is easily stated."""


def is_worth_its_place(request: Request) -> bool:
    """Whether the rest of a body that has begun is to be read by a `BodyReader`."""
    is_there = request.size * READ_BEFORE >= request.length
    return is_there and request.length - request.size >= READ_IN_PLACE_BYTES and not request.is_streamed


class BodyReader(asyncio.BufferedProtocol):
    """Stands in for a client connection while a large body is read."""

    def __init__(self, client: "ClientConnection", request: Request) -> None:
        self._client = client
        self._request = request
        self._body = process.unfilled(request.length)
        filled = 0
        for part in request.parts:
            self._body[filled : filled + len(part)] = part
            filled += len(part)
        request.parts = []
        self._filled = filled
        self._view = memoryview(self._body)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self._client.body_progressed()
        if self._filled == len(self._body):
            self._view.release()
            self._client.body_read(self._request, self._body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost(exc)

    def eof_received(self) -> None:
        self._client.eof_received()

    def pause_writing(self) -> None:
        self._client.pause_writing()

    def resume_writing(self) -> None:
        self._client.resume_writing()
