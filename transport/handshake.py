"""The NIXL handshake's frames: what the decode engine asks, what a prefill engine answers. Pure, strict, bounded.

Source: vLLM 0.32 distributed/kv_transfer/kv_connector/v1/nixl: base_scheduler.py (the listener), base_worker.py
(the asking side), metadata.py (the two structures). Must not know where the bytes come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

VERB: Final = b"get_meta_msg"  # metadata.py GET_META_MSG
CONNECTOR_VERSION: Final = "14"  # metadata.py NIXL_CONNECTOR_VERSION; the wire does not carry it

# An agent blob grows with registered regions and network devices; 1 KB for a tiny model on one TCP device.
PAYLOAD_BYTES_MAX: Final = 8 * 2**20
REQUEST_BYTES_MAX: Final = 64  # b"\x93\xc4\x0c" + verb + two integers of at most 9 bytes
RANKS_MAX: Final = 1024  # of one engine; wider than any deployment, small enough to enumerate

_REGIONS_MAX: Final = 65_536


class Rank(NamedTuple):
    """A pipeline-parallel and a tensor-parallel rank of one engine, in the order of the wire."""

    pp: int
    tp: int


class Ranks(NamedTuple):
    """How many ranks an engine has: `tp_size` and `pp_size` of its handoffs. Metadata does not say."""

    pp: int
    tp: int

    def covers(self, rank: Rank) -> bool:
        return 0 <= rank.pp < self.pp and 0 <= rank.tp < self.tp

    def all(self) -> list[Rank]:
        return [Rank(pp, tp) for pp in range(self.pp) for tp in range(self.tp)]


FIRST: Final = Rank(0, 0)  # the one rank that every engine has
ONE: Final = Ranks(1, 1)


class HandshakeError(ValueError):
    """Not a frame of this handshake. `kind` is a short label that may become a metric's."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


_RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=_REGIONS_MAX)]
_Names = Annotated[list[_Text], msgspec.Meta(max_length=_REGIONS_MAX)]

_request_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, _RankNumber, _RankNumber])
_clock_decoder: Final = msgspec.msgpack.Decoder(float)


def encode_request(rank: Rank) -> bytes:
    """The one frame behind REQ's empty delimiter: msgpack `[bin VERB, pp, tp]`."""
    return msgspec.msgpack.encode((VERB, rank.pp, rank.tp))


def decode_request(frame: bytes) -> Rank:
    """Raises HandshakeError for anything that is not exactly a request with ranks in 0..RANKS_MAX-1.

    The engine's own listener does not check: it dies of what is refused here.
    """
    if len(frame) > REQUEST_BYTES_MAX:
        raise HandshakeError("request", f"a request of {len(frame)} bytes")
    try:
        verb, pp, tp = _request_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError("request", f"not a metadata request: {error}") from None
    if verb != VERB:
        raise HandshakeError("verb", "not the verb of a metadata request")
    return Rank(pp, tp)


def encode_clock(seconds: float) -> bytes:
    """Frame 1 of a reply: `time.perf_counter()` of the engine's scheduler process, seconds."""
    return msgspec.msgpack.encode(float(seconds))


def decode_clock(frame: bytes) -> float:
    """Seconds of the engine's own clock. Raises HandshakeError."""
    try:
        seconds = _clock_decoder.decode(frame[:16])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError("clock", f"not a clock frame: {error}") from None
    if len(frame) > 16 or not math.isfinite(seconds):
        raise HandshakeError("clock", "not a clock frame")
    return seconds


class Payload(msgspec.Struct, frozen=True, gc=False):
    """NixlHandshakePayload (metadata.py): the outer map of frame 0."""

    compatibility_hash: _Text
    agent_metadata_bytes: bytes


class AgentMetadata(msgspec.Struct, frozen=True):
    """NixlAgentMetadata (metadata.py), connector version 14: the inner map. Lengths and strides in bytes."""

    engine_id: _Text
    agent_metadata: bytes
    kv_caches_base_addr: Annotated[list[int], msgspec.Meta(max_length=_REGIONS_MAX)]
    device_id: int
    num_blocks: _Positive
    block_lens: _Sizes
    block_strides: _Sizes
    kv_cache_layout: _Text
    block_size: _Positive
    ssm_sizes: tuple[_Size, _Size]
    attn_backend_name: _Text
    physical_blocks_per_logical_kv_block: _Positive
    region_num_blocks: _Sizes | None = None
    region_group_ids: _Sizes | None = None
    region_names: _Names | None = None
    region_mem_types: _Names | None = None
    dcp_size: _Positive = 1
    pcp_size: _Positive = 1
    ple_block_len: _Size | None = None
    region_members: Annotated[list[_Names], msgspec.Meta(max_length=_REGIONS_MAX)] = msgspec.field(
        default_factory=list
    )
    packed_member_layouts: dict[_Text, tuple[_Size, _Size]] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of an engine's metadata decides whether two engines fit. Hashable, so that equal ranks share one."""

    num_blocks: int
    """Physical (kernel) blocks; the block ids of a handoff are logical ones: see `logical_blocks`."""
    block_size: int
    """Tokens in a physical block."""
    physical_per_logical: int
    block_lens: tuple[int, ...]
    block_strides: tuple[int, ...]
    regions: int
    layout: str
    attention_backend: str
    ssm_sizes: tuple[int, int]
    dcp_size: int
    pcp_size: int

    @property
    def logical_blocks(self) -> int:
        """How many block ids the engine has: handoffs name 0..logical_blocks-1."""
        return self.num_blocks // self.physical_per_logical

    @property
    def logical_block_size(self) -> int:
        """Tokens that one block id of a handoff stands for."""
        return self.block_size * self.physical_per_logical

    @property
    def recurrent(self) -> bool:
        """Whether the model has state-space layers, whose layout rules differ."""
        return any(self.ssm_sizes)


@dataclass(frozen=True, slots=True)
class Description:
    """What frame 0 of a reply says about one rank."""

    compatibility_hash: str
    engine_id: str | None
    geometry: Geometry | None
    schema: str
    """`"14"` when the fields are exactly those of connector version 14, else `"unknown"` (never guessed)."""
    missing_fields: tuple[str, ...] = ()
    """Of version 14, in order."""


class _Named(msgspec.Struct, gc=False):
    engine_id: _Text


_payload_decoder: Final = msgspec.msgpack.Decoder(Payload)
_metadata_decoder: Final = msgspec.msgpack.Decoder(AgentMetadata)
_named_decoder: Final = msgspec.msgpack.Decoder(_Named)
_keys_decoder: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_FIELDS: Final = frozenset(AgentMetadata.__struct_fields__)


def split_reply(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """A reply's two frames, payload and clock. The decode engine asserts that there are exactly two."""
    if len(frames) != 2:
        raise HandshakeError("parts", f"a reply of {len(frames)} frames instead of 2")
    payload, clock = frames
    decode_clock(clock)
    return payload, clock


def decode_payload(frame: bytes) -> Payload:
    """Frame 0, its outer map: what the decode engine reads before it compares hashes. Raises HandshakeError."""
    if len(frame) > PAYLOAD_BYTES_MAX:
        raise HandshakeError("payload", f"a payload of {len(frame)} bytes")
    try:
        return _payload_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError("payload", f"not a NixlHandshakePayload: {error}") from None


def decode_metadata(frame: bytes) -> AgentMetadata:
    """The inner map, unknown fields ignored. Raises HandshakeError if it can't be read as connector version 14."""
    try:
        return _metadata_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError("metadata", f"not a NixlAgentMetadata: {error}") from None


def describe(frame: bytes) -> Description:
    """All that can be said about frame 0 of a reply.

    Only the outer map has to be right (HandshakeError if not). Metadata of another connector version is legal: it
    is described by its engine id, if it has one, and by what it lacks, and it can still be relayed.
    """
    payload = decode_payload(frame)
    inner = payload.agent_metadata_bytes
    try:
        names = _keys_decoder.decode(inner).keys()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Description(payload.compatibility_hash, None, None, "unknown")
    unknown, missing = names - _FIELDS, _FIELDS - names
    try:
        metadata = decode_metadata(inner)
    except HandshakeError:
        metadata = None
    engine_id = metadata.engine_id if metadata else _engine_id(inner)
    return Description(
        compatibility_hash=payload.compatibility_hash,
        engine_id=engine_id,
        geometry=_geometry(metadata) if metadata else None,
        schema=CONNECTOR_VERSION if metadata and not unknown and not missing else "unknown",
        missing_fields=tuple(sorted(missing)),
    )


def _engine_id(inner: bytes) -> str | None:
    try:
        return _named_decoder.decode(inner).engine_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _geometry(metadata: AgentMetadata) -> Geometry:
    return Geometry(
        num_blocks=metadata.num_blocks,
        block_size=metadata.block_size,
        physical_per_logical=metadata.physical_blocks_per_logical_kv_block,
        block_lens=tuple(metadata.block_lens),
        block_strides=tuple(metadata.block_strides),
        regions=len(metadata.kv_caches_base_addr),
        layout=metadata.kv_cache_layout,
        attention_backend=metadata.attn_backend_name,
        ssm_sizes=metadata.ssm_sizes,
        dcp_size=metadata.dcp_size,
        pcp_size=metadata.pcp_size,
    )


# Two frames that the decode engine can't decode: it fails the pull at once (0.11-0.18 s measured, against 5 s of
# silence) and recomputes. The clock must decode: the engine reads it first (base_worker.py). 0xc1 is the one byte
# that msgpack never uses.
UNDECODABLE: Final = (b"\xc1", encode_clock(0.0))
