"""The legs of a request: what is sent on one engine connection, and what its answer means for the runner.

A leg knows how its answer is to be read (whole, relayed, thrown away); what follows from it the runner asks the
machine.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, cast

from sidecar.connectors.connector import Handoff
from sidecar.edge import errors
from sidecar.edge.engine import Buffer, EngineConnection, EnginePool
from sidecar.edge.head import Head
from sidecar.edge.unreached import OWN_SHORTAGE
from sidecar.exchange.failures import Row
from sidecar.exchange.peek import FirstEvents, Verdict
from sidecar.exchange.usage import CachedTokens

if TYPE_CHECKING:
    from sidecar.edge.client import ClientConnection
    from sidecar.edge.runner import Runner


class Leg:
    """What all legs share: getting a connection, a silent second try on a stale one, and being dropped."""

    name = ""
    no_connection = "unreachable"
    """The fault where this process may open no connection: one that is held against nobody."""

    def __init__(self, runner: "Runner", parts: Sequence[Buffer]) -> None:
        self._runner = runner
        self._parts = parts
        self._pool: EnginePool | None = None
        self._call_off: Callable[[], None] | None = None
        self._connection: EngineConnection | None = None
        self._tried_again = False
        self._dropped = False

    def acquire(self, pool: EnginePool) -> None:
        self._pool = pool
        self._call_off = pool.acquire(self, fresh=self._needs_fresh_connection())

    def _needs_fresh_connection(self) -> bool:
        return False

    def drop(self) -> None:
        """The leg ends here; an answer that is not complete is cut off at once."""
        self._dropped = True
        self._parts = ()
        if self._call_off is not None:
            self._call_off()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        # Runner and leg know each other; without this the cycle would wait for the collector, body and all.
        self._runner = cast("Runner", None)

    def pause_reading(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.resume_reading()

    # -- from the connection --

    def connected(self, connection: EngineConnection, reused: bool) -> None:
        if self._dropped:
            connection.abort()
            return
        self._connection = connection
        connection.send(self, self._parts)

    def interim(self, raw: bytes) -> None:
        """Only a relayed answer's 1xx is of interest to the client."""

    def head(self, head: Head) -> None:
        raise NotImplementedError

    def data(self, raw: bytes, pieces: Sequence[bytes], last: bool) -> None:
        raise NotImplementedError

    def upgraded(self, head: Head, rest: bytes) -> None:
        self.failed("garbage", "101 to a request that asked for no upgrade", False)

    def failed(self, fault: str, detail: str, untouched: bool) -> None:
        self._connection = None
        if self._dropped:
            return
        if untouched and not self._tried_again and self._may_try_again():
            self._tried_again = True
            assert self._pool is not None
            self._call_off = self._pool.acquire(self, fresh=True)
            return
        if fault == OWN_SHORTAGE:
            fault = self.no_connection
        label = self._pool.label if self._pool is not None else ""
        self._runner.fault(fault, detail if label in detail else f"{label}: {detail}")

    def _may_try_again(self) -> bool:
        return True

    def pause(self) -> None:
        """The whole request is in the connection's buffer anyway."""

    def resume(self) -> None:
        pass

    def relay(self) -> None:
        raise NotImplementedError


class PrefillLeg(Leg):
    """Sends the prefill body and reads the answer as a whole."""

    name = "prefill"
    no_connection = "none_usable"  # nor could the next one be reached

    def __init__(self, runner: "Runner", parts: Sequence[Buffer]) -> None:
        super().__init__(runner, parts)
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._born = 0.0
        self._peer_host = ""

    def head(self, head: Head) -> None:
        self._head = head
        self._born = time.monotonic()
        if self._connection is not None:
            self._peer_host = self._connection.peer_host

    def data(self, raw: bytes, pieces: Sequence[bytes], last: bool) -> None:
        self._pieces += pieces
        self._size += sum(map(len, pieces))
        if self._size > self._runner.service.settings.max_body_bytes:
            self._runner.fault("too_large")
        elif last:
            assert self._head is not None
            self._connection = None
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._runner.prefill_answered(self._head.status, body, self._born, self._peer_host)

    def relay(self) -> None:
        head, runner = self._head, self._runner
        assert head is not None
        client = runner.client
        if client is not None:
            close = client.must_close(runner.request)
            framing = b"content-length: %d\r\n" % self._size
            client.write((runner.write_head(head, framing=framing, close=close), *self._pieces))
        runner.finish()


class DecodeLeg(Leg):
    """Sends a request to the local engine and relays what comes back, byte for byte."""

    name = "decode"

    def __init__(
        self, runner: "Runner", parts: Sequence[Buffer], handoff: Handoff | None, *, streams_body: bool
    ) -> None:
        super().__init__(runner, parts)
        self._handoff = handoff
        self._streams_body = streams_body
        self._body_parts: list[bytes] = []
        self._sent = False
        self._head: Head | None = None
        self._unsent_head = b""
        """The answer's head as the client gets it, until it goes out with what came with it: one system call."""
        self._peek: FirstEvents | None = None
        self._held: list[bytes] = []
        self._held_pieces: list[bytes] = []
        self._relaying = False
        self._write: Callable[[bytes, Sequence[bytes]], None] = self._write_raw
        self._filter: CachedTokens | None = None
        self.tail = b""
        """The end of what was sent on, to tell whether an event was cut."""
        self._written = 0
        """Pieces of the answer that the client got: tokens, nearly always."""
        self._ends_whole = True
        """What was handed on so far ended with a whole chunk of the engine's."""
        self._is_chunked = False
        self._to_client: asyncio.Transport | None = None
        self._at_boundary = True

    def drop(self) -> None:
        super().drop()
        # What is kept of itself and of the client's connection would be kept until the collector comes.
        self._write = _written_off
        self._to_client = None

    def connected(self, connection: EngineConnection, reused: bool) -> None:
        if self._dropped:
            connection.abort()
            return
        self._connection = connection
        if not self._runner.decode_connected():
            return
        if self._body_parts and self._runner.client is not None:
            self._runner.client.resume_body()
        is_head = self._runner.request.method == b"HEAD"
        connection.send(self, (*self._parts, *self._body_parts), is_head_request=is_head)
        self._body_parts.clear()
        self._sent = True
        self._runner.decode_sent(self._handoff)

    def _needs_fresh_connection(self) -> bool:
        # What cannot be sent a second time is not sent on a connection that the engine may be closing.
        return self._streams_body or self._runner.request.upgrade

    def _may_try_again(self) -> bool:
        # A handoff is never sent twice, and of a streamed body the first part is gone.
        return self._handoff is None and not self._streams_body

    def failed(self, fault: str, detail: str, untouched: bool) -> None:
        if self._connection is not None:
            self._at_boundary = self._connection.at_chunk_boundary
        if fault == "reset" and not self._sent:  # accepted and closed in one breath: it has had no request
            fault = "refused"
        super().failed(fault, detail, untouched)

    # -- a request body that is streamed --

    def body_piece(self, data: bytes) -> None:
        if self._runner.request.is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._send_piece(data)

    def body_end(self, trailers: bytes) -> None:
        if self._runner.request.is_chunked:
            self._send_piece(b"0\r\n%b\r\n" % trailers)

    def _send_piece(self, data: bytes) -> None:
        if self._sent and self._connection is not None:
            self._connection.write((data,))
        elif not self._sent:
            self._body_parts.append(data)
            if self._runner.client is not None:  # what follows stays where it is until the engine takes it
                self._runner.client.pause_body()

    def pause(self) -> None:
        if self._streams_body and self._runner.client is not None:
            self._runner.client.pause_body()

    def resume(self) -> None:
        if self._streams_body and self._runner.client is not None:
            self._runner.client.resume_body()

    # -- the answer --

    def interim(self, raw: bytes) -> None:
        client = self._runner.client
        # 100 is ours to send, and HTTP/1.0 knows no interim answers.
        if client is not None and not self._runner.request.http_1_0 and raw[9:12] != b"100":
            client.write((raw,))

    def head(self, head: Head) -> None:
        self._head = head
        self._runner.decode_answered(head)

    def upgraded(self, head: Head, rest: bytes) -> None:
        connection, self._connection = self._connection, None
        if self._dropped or connection is None:
            return
        if not self._runner.request.upgrade:
            connection.abort()
            super().upgraded(head, rest)
            return
        self._runner.tunnel(head, connection, rest)

    def data(self, raw: bytes, pieces: Sequence[bytes], last: bool) -> None:
        if last:
            self._connection = None
        if self._relaying:
            self._written += len(pieces)
            self._write(raw, pieces)
            self._flush_head()
            if last:
                self._end()
            return
        self._held.append(raw)
        self._held_pieces += pieces
        if self._peek is None:  # nobody reads any more, and the engine has reached its first byte
            self._runner.first_event(False)
            return
        verdict = Verdict.UNDECIDED
        for piece in pieces:
            verdict = self._peek.feed(piece)
            if verdict is not Verdict.UNDECIDED:
                break
        if verdict is not Verdict.UNDECIDED or last:
            self._peek = None
            self._runner.first_event(verdict is Verdict.ERROR)
            if last:
                self._end()

    def peek(self, first_events: FirstEvents) -> None:
        self._peek = first_events

    def relay(self) -> None:
        """From here on everything goes to the client; what was held back first."""
        head, runner = self._head, self._runner
        client = runner.client
        assert head is not None
        if client is None:
            return
        self._relaying = True
        close = client.must_close(runner.request)
        self._filter = self._cached_tokens_filter(head)
        if head.no_body:
            framing = b""
            if head.length >= 0 and head.status != 204:
                framing = b"content-length: %d\r\n" % head.length
            elif head.chunked and head.status != 204 and not runner.request.http_1_0:
                framing = b"transfer-encoding: chunked\r\n"
        elif head.length >= 0:
            framing = b"content-length: %d\r\n" % head.length
            if self._filter is not None:
                self._write = self._write_filtered
        elif head.chunked and not runner.request.http_1_0:
            framing = b"transfer-encoding: chunked\r\n"
            self._is_chunked = True
            if self._filter is not None:
                self._write = self._write_filtered_chunks
        else:
            framing = b""
            close = True
            client.close_when_answered()
            self._write = self._write_filtered if self._filter is not None else self._write_pieces
        self._unsent_head = runner.write_head(head, framing=framing, close=close)
        if self._held:
            self._written += len(self._held_pieces)
            self._write(b"".join(self._held), self._held_pieces)
            self._held.clear()
            self._held_pieces.clear()
            self._flush_head()
        elif not head.with_more:
            self._flush_head()

    def _cached_tokens_filter(self, head: Head) -> CachedTokens | None:
        handoff, api = self._handoff, self._runner.api
        if handoff is None or handoff.cached_tokens is None or api is None or head.status != 200:
            return None
        if head.value(b"content-encoding") not in (b"", b"identity"):
            return None
        return CachedTokens(api, handoff.cached_tokens)

    # -- the ways to write --

    def _send(self, client: "ClientConnection", part: bytes) -> None:
        if self._unsent_head:
            client.write((self._unsent_head, part))
            self._unsent_head = b""
        else:
            client.write((part,))

    def _flush_head(self) -> None:
        """Where nothing came with the head that goes to the client."""
        head, self._unsent_head = self._unsent_head, b""
        if head and self._runner.client is not None:
            self._runner.client.write((head,))

    def _write_raw(self, raw: bytes, pieces: Sequence[bytes]) -> None:
        client = self._runner.client
        if not raw or client is None:
            return
        self._send(client, raw)
        self._runner.first_byte()
        if pieces:
            self.tail = pieces[-1]
        self._shorten(self._relay_chunk)

    def _shorten(self, relay: Callable[[bytes], None]) -> None:
        """From here on a whole chunk, as most tokens are, only passes `EngineConnection.data_received` and this."""
        connection, client = self._connection, self._runner.client
        if connection is not None and connection.relay is None and self._is_chunked and client is not None:
            self._to_client = client.transport
            connection.relay = relay

    def _relay_chunk(self, raw: bytes) -> None:
        transport = self._to_client
        if transport is not None and not transport.is_closing():  # uvloop raises for a closed one
            self.tail = raw
            self._written += 1
            transport.write(raw)

    def _relay_corrected_chunk(self, raw: bytes) -> None:
        """The same where a count may have to be corrected: that leaves a chunk as long as it was."""
        assert self._filter is not None
        if raw.endswith(b"\n\n\r\n") and self._filter.is_empty:  # an event's end: no field goes on behind it
            self._relay_chunk(self._filter.feed(raw))
        else:
            self._written += 1
            self._write_filtered_chunks(raw, (raw[raw.index(b"\r\n") + 2 : -2],))

    def _write_pieces(self, _raw: bytes, pieces: Sequence[bytes]) -> None:
        client = self._runner.client
        if pieces and client is not None:
            self._send(client, pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self._runner.first_byte()
            self.tail = pieces[-1]

    def _write_filtered(self, _raw: bytes, pieces: Sequence[bytes]) -> None:
        assert self._filter is not None
        out = b"".join([self._filter.feed(piece) for piece in pieces])
        if out:
            self._write_pieces(b"", (out,))

    def _is_whole_chunks(self) -> bool:
        """Whether what is at hand begins and ends with a chunk, and is not the end of the answer."""
        began_whole = self._ends_whole
        connection = self._connection
        self._ends_whole = connection is not None and connection.at_chunk_boundary
        return began_whole and self._ends_whole

    def _write_filtered_chunks(self, raw: bytes, pieces: Sequence[bytes]) -> None:
        assert self._filter is not None
        out = [self._filter.feed(piece) for piece in pieces]
        is_whole = self._is_whole_chunks()
        if is_whole and all(map(is_, out, pieces)):
            self._write_pieces(b"", (raw,))  # in the framing that it came in
        elif joined := b"".join(out):
            self._write_pieces(b"", (b"%x\r\n%b\r\n" % (len(joined), joined),))
            self.tail = joined
        if is_whole:
            self._shorten(self._relay_corrected_chunk)

    def _end(self) -> None:
        if not self._relaying:  # what the first event led to has replaced this leg
            return
        client = self._runner.client
        if self._filter is not None and client is not None:
            rest = self._filter.flush()
            if self._write == self._write_filtered_chunks:
                assert self._head is not None
                trailers = b"".join([b"%b: %b\r\n" % trailer for trailer in self._head.trailers])
                client.write(((b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n%b\r\n" % trailers,))
            elif rest:
                client.write((rest,))
        self._runner.finish(self._written)

    @property
    def would_look_whole(self) -> bool:
        """Whether an answer that broke off ends for the client as a complete one does, and no event tells."""
        head = self._head
        if head is None or head.value(b"content-type").startswith(b"text/event-stream"):
            return False
        return head.length < 0 and not self._is_chunked

    def last_words(self, row: Row) -> bytes:
        """What may still be written to a client whose answer broke off, in the framing that its head announced;
        never a clean end."""
        unsent, self._unsent_head = self._unsent_head, b""
        return unsent + self._last_event(row)

    def _last_event(self, row: Row) -> bytes:
        head = self._head
        if head is None or not head.value(b"content-type").startswith(b"text/event-stream") or head.length >= 0:
            return b""
        is_partial = bool(self.tail) and not self.tail.endswith((b"\n\n", b"\n\n\r\n"))
        event = errors.event(row, self._runner.api, after_partial_event=is_partial)
        if self._write in (self._write_pieces, self._write_filtered):
            return event
        if not self._at_boundary and self._write == self._write_raw:
            return b""  # in the middle of a chunk of announced size nothing can be said
        return b"%x\r\n%b\r\n" % (len(event), event)


def _written_off(_raw: bytes, _pieces: Sequence[bytes]) -> None:
    """What comes after a leg's end."""


__all__ = ["DecodeLeg", "Leg", "PrefillLeg"]
