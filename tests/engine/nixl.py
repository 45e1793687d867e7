"""The NIXL side channel: the metadata listener of a prefill engine and the handshake of a decode engine.

Wire format of vLLM 0.32, connector version 14 (distributed/kv_transfer/kv_connector/v1/nixl: base_scheduler.py
for the listener, base_worker.py for the handshake, metadata.py for the payload). The listener is as fragile as
the real one: one message it can't take ends it for good. Knows nothing of HTTP and of what blocks hold; the
fabric itself is a dictionary of the engines in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

GET_META_MSG = b"get_meta_msg"
_POLL_MS = 20  # how often a waiting thread looks whether it is to stop

# The fabric: agent blob -> the core that it leads to. An engine of another process can't be reached.
fabric: dict[bytes, Any] = {}


class HandshakePayload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class AgentMetadata(msgspec.Struct):
    """Fields and order of `NixlAgentMetadata` (nixl/metadata.py)."""

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    block_strides: list[int]
    kv_cache_layout: str
    block_size: int
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: list[int] | None
    region_group_ids: list[int] | None
    region_names: list[str] | None
    region_mem_types: list[str] | None
    dcp_size: int
    pcp_size: int
    ple_block_len: int | None
    region_members: list[list[str]]
    packed_member_layouts: dict[str, tuple[int, int]]


def compatibility_hash(model: str, salt: str = "") -> str:
    return hashlib.sha256(f"vllm 0.32.0|14|{model}|{salt}".encode()).hexdigest()


def new_agent_blob() -> bytes:
    """Stands for the UCX worker addresses: opaque, unique to one start of one engine, 379 bytes as measured."""
    return (b"simulated-nixl-agent:" + uuid.uuid4().bytes).ljust(379, b"\0")


def metadata(engine_id: str, blob: bytes, num_blocks: int, block_size: int, layers: int = 2) -> AgentMetadata:
    length = 2 * block_size * 2 * 16 * 2
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]
    return AgentMetadata(
        engine_id=engine_id,
        agent_metadata=blob,
        kv_caches_base_addr=[0x7F0000000000 + layer * num_blocks * length for layer in range(layers)],
        device_id=0,
        num_blocks=num_blocks,
        block_lens=[length] * layers,
        block_strides=[length] * layers,
        kv_cache_layout="LBHNC",
        block_size=block_size,
        ssm_sizes=(0, 0),
        attn_backend_name="CPU_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=[num_blocks] * layers,
        region_group_ids=[0] * layers,
        region_names=names,
        region_mem_types=["DRAM"] * layers,
        dcp_size=1,
        pcp_size=1,
        ple_block_len=None,
        region_members=[[name] for name in names],
        packed_member_layouts={},
    )


class SideChannel:
    """The listener of one engine (one data-parallel rank), on a thread of its own."""

    def __init__(self, host: str, port: int, payloads: dict[tuple[int, int], bytes]) -> None:
        self.host = host
        self.port = port
        self.alive = False
        self.requests = 0
        self.error: BaseException | None = None
        # While cleared the thread answers nothing, as in a stopped process.
        self.running = threading.Event()
        self.running.set()
        self._payloads = payloads
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl-side-channel", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if not self.alive:
            raise OSError(f"cannot bind the side channel to {self.host}:{self.port}: {self.error}")

    def stop(self) -> None:
        """Ends the listener and frees its port."""
        self._stop.set()
        self.running.set()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(f"tcp://{self.host}:{self.port}")
            self.alive = True
            self._ready.set()
            while not self._stop.is_set():
                if socket.poll(_POLL_MS):
                    self._answer(socket)
        except Exception as error:  # whatever it was: the real listener has no handler at all
            self.error = error
        finally:
            self.alive = False
            self._ready.set()
            socket.close()
            context.term()

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        self.running.wait()
        if self._stop.is_set():
            return
        # Any other number of frames, a body that is no msgpack triple or ranks that do not exist
        # raise here and end the thread (base_scheduler.py:356-377).
        identity, _, message = socket.recv_multipart()
        _verb, pp_rank, tp_rank = msgspec.msgpack.decode(message)
        self.requests += 1
        stamp = msgspec.msgpack.encode(time.perf_counter())
        socket.send_multipart((identity, b"", self._payloads[(pp_rank, tp_rank)], stamp))


class HandshakeError(Exception):
    """Why a peer could not be added; the request's blocks count as invalid then."""


class Handshakes:
    """The one background thread on which a decode engine meets all its prefill engines, one after the other."""

    def __init__(self, compat_hash: str, timeout_seconds: float = 5.0) -> None:
        self.attempts = 0
        self.compat_hash = compat_hash
        self.timeout_seconds = timeout_seconds
        self._jobs: queue.SimpleQueue[tuple[Future[AgentMetadata], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, engine_id: Any, host: Any, port: Any, tp_size: Any, pp_size: Any) -> Future[AgentMetadata]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="nixl-handshake", daemon=True)
            self._thread.start()
        future: Future[AgentMetadata] = Future()
        self._jobs.put((future, (engine_id, host, port, tp_size, pp_size)))
        return future

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while not self._stop.is_set():
            job = self._jobs.get()
            if job is None:
                return
            future, arguments = job
            if not future.set_running_or_notify_cancel():
                continue
            self.attempts += 1
            try:
                future.set_result(self._handshake(*arguments))
            except Exception as error:
                future.set_exception(HandshakeError(f"{type(error).__name__}: {error}"))

    def _handshake(self, engine_id: Any, host: Any, port: Any, tp_size: Any, pp_size: Any) -> AgentMetadata:
        # Local tensor-parallel size is 1, so every rank of the peer is asked (kv_connector/utils.py:564-587).
        if tp_size <= 0:
            raise ValueError(f"remote tp_size {tp_size}")
        found: AgentMetadata | None = None
        with _req_socket(host, port) as socket:
            for pp_rank in range(pp_size):
                for tp_rank in range(tp_size):
                    found = self._ask(socket, engine_id, pp_rank, tp_rank)
        if found is None:
            raise ValueError("no rank to ask")
        return found

    def _ask(self, socket: zmq.Socket[bytes], engine_id: Any, pp_rank: int, tp_rank: int) -> AgentMetadata:
        socket.send(msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank)))
        # RCVTIMEO of 5 s for each rank, none on connecting: a refused port takes as long (base_worker.py:1044).
        deadline = time.monotonic() + self.timeout_seconds
        while not socket.poll(_POLL_MS):
            if self._stop.is_set() or time.monotonic() >= deadline:
                raise TimeoutError("Resource temporarily unavailable")
        reply = socket.recv_multipart()
        if len(reply) != 2:
            raise AssertionError("a reply has two frames")
        float(msgspec.msgpack.decode(reply[1]))
        payload = msgspec.msgpack.decode(reply[0], type=HandshakePayload)
        if payload.compatibility_hash != self.compat_hash:
            raise ValueError(f"compatibility hash {payload.compatibility_hash}, here {self.compat_hash}")
        found = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
        if found.engine_id != engine_id:
            raise ValueError(f"engine {found.engine_id} answered for {engine_id}")
        return found


@contextlib.contextmanager
def _req_socket(host: Any, port: Any) -> Iterator[zmq.Socket[bytes]]:
    if not isinstance(host, str | None) or host == "":
        raise zmq.ZMQError(msg="Invalid argument")
    # vLLM takes the path apart before it connects: no number, or one above 65535, fails at once.
    _ = urlsplit(f"tcp://h:{port}").port
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        address = f"[{host}]" if host is not None and ":" in host else host
        socket.connect(f"tcp://{address}:{port}")
        yield socket
    finally:
        socket.close()
        context.term()
