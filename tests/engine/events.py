"""KV-cache events on ZMQ, as vLLM publishes them (distributed/kv_events.py, v1/core/kv_cache_utils.py of 0.32).

Block hashes are computed as the real engine's default algorithm does, `sha256` over pickles. The publisher connects
to a plain address and binds one with a wildcard; missed batches are asked for at the replay endpoint. Knows blocks
by their cache keys and nothing of requests.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
import zmq

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.02  # how long a replay request may have to wait; up to 0.1 s in vLLM


class KvEvents:
    """The publisher of one data-parallel rank, with a thread of its own."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        rank: int = 0,
        topic: str = "",
        buffer_steps: int = 10_000,
    ) -> None:
        self.config: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": offset_port(endpoint, rank),
            "replay_endpoint": offset_port(replay_endpoint, rank) if replay_endpoint else None,
            "buffer_steps": buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": topic,
        }
        self.rank = rank
        # To simulate loss: so many batches are numbered and buffered but not sent.
        self.lose_batches = 0
        self.published = 0
        self._hash_of_key: dict[bytes, bytes] = {}
        self._pending: list[dict[str, Any]] = []
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    # -- what happened in the cache; one batch for each flush, which is a step of the engine

    def stored(
        self,
        keys: Sequence[bytes],
        first: int,
        last: int,
        tokens: array[int],
        block_size: int,
        lora: str | None,
        salt: str | None,
    ) -> None:
        """Blocks `first` to `last` - 1 of the prompt whose blocks have these `keys` are new in the cache."""
        parent = self._hash_of_key.get(keys[first - 1]) if first else None
        before = parent or _none_hash()
        hashes = []
        extras = []
        for block in range(first, last):
            extra: tuple[Any, ...] = (("lora", lora, f"/adapters/{lora}"),) if lora else ()
            if salt and block == 0:
                extra += (("cache_salt", salt),)
            ids = tuple(tokens[block * block_size : (block + 1) * block_size])
            before = _hash((before, ids, extra or None))
            self._hash_of_key[keys[block]] = before
            hashes.append(_short(before))
            # Published without the tags and the path.
            extras.append([each[1] for each in extra] or None)
        self._pending.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": _short(parent) if parent else None,
                "token_ids": list(tokens[first * block_size : last * block_size]),
                "block_size": block_size,
                "lora_id": 1 if lora else None,
                "medium": "GPU",
                "lora_name": lora,
                "extra_keys": extras,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def removed(self, key: bytes) -> None:
        found = self._hash_of_key.pop(key, None)
        if found is not None:
            self._pending.append(
                {"type": "BlockRemoved", "block_hashes": [_short(found)], "medium": "GPU", "group_idx": 0}
            )

    def cleared(self) -> None:
        self._hash_of_key.clear()
        self._pending.append({"type": "AllBlocksCleared"})

    def flush(self) -> None:
        if self._pending:
            batch = [time.time(), self._pending, self.rank]
            self._pending = []
            self._queue.put(msgspec.msgpack.encode(batch))

    # -- the thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            publisher = context.socket(zmq.PUB)
            endpoint = self.config["endpoint"]
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                publisher.bind(endpoint)
            else:
                publisher.connect(endpoint)
            replay = None
            if self.config["replay_endpoint"] is not None:
                replay = context.socket(zmq.ROUTER)
                replay.bind(self.config["replay_endpoint"])
            self._ready.set()
            self._serve(publisher, replay)
        except Exception as error:
            self._error = error
        finally:
            self._ready.set()
            context.destroy(linger=0)

    def _serve(self, publisher: zmq.Socket[bytes], replay: zmq.Socket[bytes] | None) -> None:
        topic = self.config["topic"].encode()
        while True:
            if replay is not None and replay.poll(0):
                self._replay(replay, topic)
            try:
                payload = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if payload is None:
                return
            number = self.published
            self.published += 1
            self._buffer.append((number, payload))
            if self.lose_batches:
                self.lose_batches -= 1
            else:
                publisher.send_multipart((topic, number.to_bytes(8, "big"), payload))

    def _replay(self, socket: zmq.Socket[bytes], topic: bytes) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3:
            return
        start = int.from_bytes(frames[2], "big")
        for number, payload in list(self._buffer):
            if number >= start:
                socket.send_multipart((frames[0], b"", topic, number.to_bytes(8, "big"), payload))
        socket.send_multipart((frames[0], b"", b"", _END_OF_REPLAY, b""))


def offset_port(endpoint: str, rank: int) -> str:
    """Each data-parallel rank has the next port."""
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


def _hash(value: Any) -> bytes:
    return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _none_hash() -> bytes:
    return _hash(os.environ.get("PYTHONHASHSEED") or "vllm-none-hash")


def _short(digest: bytes) -> int:
    """The low 64 bits (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES, the default)."""
    return int.from_bytes(digest, "big") & (2**64 - 1)
