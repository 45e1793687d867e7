"""NIXL, pull and push: the decode engine reads the blocks that the prefill engine holds for it, or is sent them.

The schema is as strict as the engine is careless: vLLM 0.32 checks nothing of `kv_transfer_params`, and a
missing key hangs the request, a wrong one kills the process or reads another prompt's blocks
(kv_connector/v1/nixl/pull_scheduler.py, push_scheduler.py, base_worker.py). What the engine does not read passes
untouched, among them the block ids of a push: decode names its own.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from sidecar.connectors.connector import (
    NO_BLOCK_SIZE,
    Channel,
    Connector,
    EngineFacts,
    Handoff,
    PrefillAnswer,
    Rejection,
    Source,
)
from sidecar.prefill.address import BadAddress, canonical_host

_Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[^,\s\x00-\x1f]+\Z")]
"""The engines join request ids with commas in their heartbeats (pull_worker.py), so an id must hold none."""
_Size = Annotated[int, Meta(ge=1, le=4096)]

MAX_GROUPS = 64
MAX_BLOCKS = 1 << 20
_BLOCK_IDS = 2**31
_NULL_BLOCK = 0


def _groups(num_blocks: int) -> Any:
    """The type of the ids of so many blocks, by KV cache group."""
    block = Annotated[int, Meta(ge=0, lt=num_blocks)]
    return Annotated[list[Annotated[list[block], Meta(max_length=MAX_BLOCKS)]], Meta(max_length=MAX_GROUPS)]


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: bool
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_block_ids: _groups(_BLOCK_IDS)  # type: ignore[valid-type]
    do_remote_decode: bool = False
    tp_size: _Size = 1
    pp_size: _Size = 1
    dcp_size: _Size = 1
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    remote_prefill_cached_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    remote_blocks_expiry_time: float | None = None
    transfer_mode: str | None = None


class _PushParams(_Params, frozen=True, kw_only=True):
    tp_size: _Size
    """Without it a push ends the decode engine."""
    transfer_mode: str


@lru_cache(maxsize=1024)
def _decoder(params: type[_Params], num_blocks: int) -> Callable[[bytes], _Params]:
    """Reads `params` and refuses block ids beyond so many blocks, if it is known how many there are: a look at each
    id of its own would take half as long again."""
    if not num_blocks:
        return msgspec.json.Decoder(params).decode
    bounded = msgspec.defstruct(
        params.__name__, [("remote_block_ids", _groups(num_blocks))], bases=(params,), frozen=True, kw_only=True
    )
    return msgspec.json.Decoder(cast("type[_Params]", bounded)).decode


def _read_pull(answer: PrefillAnswer, source: Source) -> Handoff | Rejection:
    return _read(answer, source, _Params, "pull")


def _read_push(answer: PrefillAnswer, source: Source) -> Handoff | Rejection:
    return _read(answer, source, _PushParams, "push")


def _read(answer: PrefillAnswer, source: Source, schema: type[_Params], mode: str) -> Handoff | Rejection:
    raw, num_blocks = bytes(answer.kv_transfer_params), source.facts.num_blocks
    if raw in (b"", b"null"):
        return Rejection("missing", "no kv_transfer_params in the prefill answer")
    try:
        params = _decoder(schema, min(num_blocks, _BLOCK_IDS))(raw)
        raw.decode()  # what msgspec passes over it does not look at: decode would say 400 to a good client
    except (msgspec.MsgspecError, RecursionError) as error:
        return Rejection("invalid", f"kv_transfer_params: {_without_values(error)}")
    except UnicodeDecodeError:
        return Rejection("invalid", "kv_transfer_params: not UTF-8")
    if not params.do_remote_prefill or params.do_remote_decode:
        return Rejection("invalid", "kv_transfer_params: not a handoff for a decode engine")
    if params.transfer_mode not in (None, mode):
        right = "nixl-push" if mode == "pull" else "nixlv2"
        return Rejection("invalid", f"kv_transfer_params: transfer_mode is not {mode}; use --kv-connector {right}")
    if not _is_host_of(params.remote_host, source):
        return Rejection("wrong_host", f"remote_host is {params.remote_host!r}, the endpoint is {_known(source)}")
    prompt_tokens = answer.usage.total if answer.usage else 0
    if prompt_tokens <= 0:
        return Rejection("invalid", "the prefill answer does not say how many prompt tokens it had")
    cached = answer.usage.cached if answer.usage and params.remote_prefill_cached_tokens is None else None
    for group in params.remote_block_ids:
        distinct = len(set(group))
        # The null block stands wherever a window or a chunk of local attention holds nothing.
        if distinct < len(group) and distinct + group.count(_NULL_BLOCK) - 1 != len(group):
            return Rejection("invalid", "a block id is named twice")
    handoff = Handoff(
        params=raw,
        prompt_tokens=prompt_tokens,
        engine_id=params.remote_engine_id,
        host=params.remote_host,
        port=params.remote_port,
        tp_size=params.tp_size,
        pp_size=params.pp_size,
        # Only groups with full attention hold a block for every part of the prompt; sliding windows hold fewer.
        blocks=max(map(len, params.remote_block_ids), default=0),
        highest_block=-1 if num_blocks else max(map(max, filter(None, params.remote_block_ids)), default=-1),
        cached_tokens=cached,
        prefill_cached_tokens=params.remote_prefill_cached_tokens or cached or 0,
    )
    rejection = _fits(handoff, source.facts, source.fallback_block_size)
    if rejection is not None and not (handoff.empty and rejection.fault == "unverifiable"):
        return rejection
    return handoff


def _fits(handoff: Handoff, facts: EngineFacts, fallback_block_size: int) -> Rejection | None:
    """Too few blocks kill the engine (base_worker.py), too many make it read the wrong ones."""
    block_size = facts.block_size or fallback_block_size
    if not block_size:
        return NO_BLOCK_SIZE
    prompt_tokens, blocks = handoff.prompt_tokens, handoff.blocks
    if handoff.empty and prompt_tokens < block_size:
        return None  # nothing to pull for a prompt that fills no block
    # Exactly as many: of a longer list the engine reads the tail, which is another place of the prompt.
    if blocks != -(-prompt_tokens // block_size):
        return Rejection(
            "invalid", f"{blocks} blocks of {block_size} tokens do not fit {prompt_tokens} prompt tokens"
        )
    if facts.num_blocks and handoff.highest_block >= facts.num_blocks:
        return Rejection("invalid", f"a block id is beyond the engine's {facts.num_blocks} blocks")
    return None


def _is_host_of(host: str, source: Source) -> bool:
    if host in source.hosts:
        return True
    try:
        return canonical_host(host) in source.hosts
    except BadAddress:
        return False


def _without_values(error: Exception) -> str:
    """msgspec names types and paths, not values; the first line is all there is to say."""
    return str(error).splitlines()[0][:200]


def _known(source: Source) -> str:
    return " or ".join(sorted(source.hosts))


_PREFILL_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)

NIXLV2 = Connector(
    name="nixlv2",
    splits=True,
    channel=Channel.NIXL,
    releases=True,
    never=frozenset(),
    prefill_params=lambda _name: _PREFILL_PARAMS,
    read=_read_pull,
    fits=_fits,
    decode_params=Handoff.with_token_ids,
)

NIXL_PUSH = Connector(
    name="nixl-push",
    splits=True,
    channel=Channel.NIXL,
    releases=False,  # a refused request tells the prefill engine nothing (tried on vLLM 0.32)
    # Prefill finds its decode by the request id, and here each engine makes one of its own: decode waits for ever.
    never=frozenset({"responses"}),
    prefill_params=lambda _name: _PREFILL_PARAMS,
    read=_read_push,
    fits=_fits,
    decode_params=Handoff.with_token_ids,
)
