"""A DNS server on loopback, UDP and TCP on one port, as well or as badly behaved as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.own_loop import OwnLoop
from tests.ports import free_ports

MAX_UDP_BYTES = 1232


class NameServer:
    """`records` holds the addresses of a name; a name that is not in it does not exist. On the running loop."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.aliases: dict[str, tuple[str, int]] = {}
        """Name -> (the name it stands for, TTL of that)."""
        self.ttl_s = 1
        self.negative_ttl_s = 1
        self.rcode: dns.rcode.Rcode | None = None
        """Says this to everything."""
        self.silent: set[str] = set()
        """Types of which nothing is said."""
        self.delay_s = 0.0
        self.garbage = b""
        self.asked: list[tuple[float, str, str, str]] = []
        """When, name, type, and udp or tcp."""
        self.port = 0
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def count(self, record_type: str = "A") -> int:
        return sum(1 for one in self.asked if one[2] == record_type)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.port = self.port or free_ports()
        self._tcp = await asyncio.start_server(self._serve_tcp, "127.0.0.1", self.port)
        self._udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), ("127.0.0.1", self.port))

    async def stop(self) -> None:
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()
        await asyncio.sleep(0)

    async def answer(self, wire: bytes, over: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = str(question.name).rstrip(".").lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((asyncio.get_running_loop().time(), name, kind, over))
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if kind in self.silent:
            return None
        if self.garbage:
            return self.garbage
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        self._fill(response, question.name, name, kind)
        data = response.to_wire(max_size=65535)
        if over == "udp" and len(data) > MAX_UDP_BYTES:
            response = dns.message.make_response(query)
            response.flags |= dns.flags.TC
            data = response.to_wire()
        return data

    def _fill(self, response: dns.message.Message, owner: dns.name.Name, name: str, kind: str) -> None:
        if self.rcode is not None:
            response.set_rcode(self.rcode)
            return
        if name in self.aliases:
            name, ttl_s = self.aliases[name]
            response.answer.append(dns.rrset.from_text(owner, ttl_s, "IN", "CNAME", f"{name}."))
            owner = dns.name.from_text(name)
        addresses = [one for one in self.records.get(name, ()) if (":" in one) == (kind == "AAAA")]
        if addresses:
            response.answer.append(dns.rrset.from_text(owner, self.ttl_s, "IN", kind, *addresses))
            return
        if name not in self.records:
            response.set_rcode(dns.rcode.NXDOMAIN)
        soa = f"ns.test. admin.test. 1 3600 600 86400 {self.negative_ttl_s}"
        response.authority.append(dns.rrset.from_text(owner.parent(), 3600, "IN", "SOA", soa))

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    (size,) = struct.unpack("!H", await reader.readexactly(2))
                    data = await self.answer(await reader.readexactly(size), "tcp")
                    if data is not None:
                        writer.write(struct.pack("!H", len(data)) + data)
        finally:  # the loop may end before the client does
            writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        task = asyncio.ensure_future(self._answer(data, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, peer: Any) -> None:
        answer = await self._server.answer(data, "udp")
        if answer is not None and not self._transport.is_closing():
            self._transport.sendto(answer, peer)


class ThreadedNameServer(OwnLoop, NameServer):
    """What a test changes holds from the next question on."""
