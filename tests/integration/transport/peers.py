"""The other sides of the side channel, built on libzmq as in vLLM: prefill engines' listeners and who asks them.

Only for tests. Knows the wire from vLLM's source (nixl/base_scheduler.py, metadata.py), not from what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import uvloop
import zmq

from transport.prober import Endpoint

T = TypeVar("T")
LOCALHOST = "127.0.0.1"
AT_ONCE_SECONDS = 2.5
"""For what happens at once, on a machine that has something else to do. A decode engine by itself waits for 5 s."""
pack = msgspec.msgpack.encode


def run(main: Coroutine[Any, Any, T]) -> T:
    """On the loop that the sidecar has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Listener:
    """A prefill engine's side channel with `ranks` tensor-parallel ranks, as fragile as the real one."""

    def __init__(
        self,
        engine_id: str,
        *,
        host: str = LOCALHOST,
        port: int = 0,
        ranks: int = 1,
        compatibility_hash: str = "h",
        padding_bytes: int = 0,
        **metadata: Any,
    ) -> None:
        start = uuid.uuid4().bytes  # two starts of one engine never have the same metadata
        self.payloads = {
            (0, rank): pack(
                {
                    "compatibility_hash": compatibility_hash,
                    "agent_metadata_bytes": pack(
                        described(engine_id, start + bytes([rank]) + bytes(padding_bytes)) | metadata
                    ),
                }
            )
            for rank in range(ranks)
        }
        self.requests: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.running = threading.Event()
        """While cleared nothing is answered: the thread is stuck."""
        self.running.set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.ipv6 = ":" in host
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        if port:
            self._socket.bind(f"{where}:{port}")
        else:
            port = self._socket.bind_to_random_port(where)
        self.port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(LOCALHOST, self.port)

    def stop(self) -> None:
        self._stopping.set()
        self.running.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._socket.poll(10):
                    continue
                self.running.wait()
                if self._stopping.is_set():
                    break
                identity, _, message = self._socket.recv_multipart()
                _verb, pp, tp = msgspec.msgpack.decode(message)
                self.requests.append((pp, tp))
                payload = self.payloads[(pp, tp)]
                self._socket.send_multipart((identity, b"", payload, pack(time.perf_counter())))
        except Exception as error:  # whatever it was: the real listener has no handler at all
            self.error = error
        finally:
            self._context.destroy(linger=0)


def described(engine_id: str, blob: bytes) -> dict[str, Any]:
    """NixlAgentMetadata of connector version 14."""
    return {
        "engine_id": engine_id,
        "agent_metadata": blob,
        "kv_caches_base_addr": [0x7F0000000000, 0x7F0000100000],
        "device_id": 0,
        "num_blocks": 100,
        "block_lens": [4096, 4096],
        "block_strides": [4096, 4096],
        "kv_cache_layout": "LBHNC",
        "block_size": 16,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "CPU_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [100, 100],
        "region_group_ids": [0, 0],
        "region_names": ["layer.0", "layer.1"],
        "region_mem_types": ["DRAM", "DRAM"],
        "dcp_size": 1,
        "pcp_size": 1,
        "ple_block_len": None,
        "region_members": [["layer.0"], ["layer.1"]],
        "packed_member_layouts": {},
    }


class Payload(msgspec.Struct):
    """NixlHandshakePayload, as the asking engine decodes it."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


class Reply(NamedTuple):
    frames: list[bytes]
    seconds: float

    @property
    def decodable(self) -> bool:
        try:
            msgspec.msgpack.decode(self.frames[0], type=Payload)
        except msgspec.MsgspecError:
            return False
        return True

    @property
    def clock_seconds(self) -> float:
        clock = msgspec.msgpack.decode(self.frames[1])
        assert isinstance(clock, float)
        return clock


def ask(address: tuple[str, int], *ranks: int, timeout_seconds: float = 5.0) -> list[Reply]:
    """What a decode engine does (nixl/base_worker.py): one REQ, its ranks one after the other, 5 s for each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        req = context.socket(zmq.REQ)
        req.connect(f"tcp://{address[0]}:{address[1]}")
        req.setsockopt(zmq.RCVTIMEO, int(timeout_seconds * 1000))
        replies = []
        for rank in ranks or (0,):
            began = time.perf_counter()
            req.send(pack((b"get_meta_msg", 0, rank)))
            replies.append(Reply(req.recv_multipart(), time.perf_counter() - began))
        return replies
    finally:
        context.destroy(linger=0)


async def asked(address: tuple[str, int], *ranks: int) -> list[Reply]:
    return await asyncio.to_thread(ask, address, *ranks)


@contextlib.contextmanager
def mute(backlog: int = 8) -> Iterator[Endpoint]:
    """A peer that accepts connections and never says a word: a stopped process."""
    with socket.create_server((LOCALHOST, 0), backlog=backlog) as server:
        yield Endpoint(LOCALHOST, server.getsockname()[1])


@contextlib.contextmanager
def black_hole() -> Iterator[Endpoint]:
    """An address where no connection is made, nor refused: its queue is full, so the kernel drops packets."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((LOCALHOST, 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        time.sleep(0.05)
        yield Endpoint(LOCALHOST, server.getsockname()[1])


@contextlib.contextmanager
def speaking(*lines: bytes) -> Iterator[Endpoint]:
    """A peer that says the same to everyone who connects, whatever it hears, and then keeps the connection."""
    stop = threading.Event()
    held: list[socket.socket] = []
    with socket.create_server((LOCALHOST, 0)) as server:
        server.settimeout(0.02)

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    held.append(connection)
                    for line in lines:
                        connection.sendall(line)
                        time.sleep(0.005)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(LOCALHOST, server.getsockname()[1])
        finally:
            stop.set()
            thread.join()
            for connection in held:
                connection.close()


def descriptors() -> int:
    """Open ones of this process, without the /dev/null that libuv keeps in reserve."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(path.readlink())
    return len([link for link in links if link != Path("/dev/null")])


async def until(condition: Any, timeout_seconds: float = 10.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - there is nothing to be woken by
            await asyncio.sleep(0.005)
