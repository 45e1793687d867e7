"""Can these two engines ever transfer? Decided from their metadata alone, before a prompt is computed twice. Pure.

Source of every rule: vLLM 0.32 nixl/base_worker.py, `_nixl_handshake`, `_validate_remote_parallel_config` and
`_validate_remote_agent_handshake`. Only what the decode engine is certain to refuse is said to be incompatible.
What depends on things that nobody tells the sidecar (the local engine's tensor- and pipeline-parallel sizes, number
of KV heads, host buffers, `enable_permute_local_kv`) is left for the engine to find out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from transport.handshake import Description, Geometry

Reason = Literal[
    "hash",
    "same_engine",
    "engine_id",
    "metadata",
    "ranks_differ",
    "tp_size",
    "context_parallel",
    "block_size",
    "layout",
]


@dataclass(frozen=True, slots=True)
class Incompatible:
    """`reason` is a bounded label; `cause` says what was seen, `change` what to do about it: one clause each."""

    reason: Reason
    cause: str
    change: str


def check(local: Description | None, remote: Sequence[Description]) -> Incompatible | None:
    """Why the local (decode) engine can never pull from the remote (prefill) one; None if nothing says so.

    `local`: what its first rank says; None if it is not known: only what holds for any pair is checked then.
    `remote`: what each rank that was asked says, the first rank first.
    """
    found = _itself(remote)
    if found is not None or local is None:
        return found
    there = remote[0]
    if local.engine_id is not None and local.engine_id == there.engine_id:
        return Incompatible(
            "same_engine",
            "the side channel of this endpoint is the local engine's own",
            "set VLLM_NIXL_SIDE_CHANNEL_HOST on the prefill engine to its pod address (its default is localhost)",
        )
    if local.compatibility_hash != there.compatibility_hash:
        return _hash_differs(local, there)
    if local.geometry is None or there.geometry is None:
        return None
    for rule in _PAIR_RULES:
        if (found := rule(local.geometry, there.geometry)) is not None:
            return found
    return None


def check_engine_id(description: Description, named: str) -> Incompatible | None:
    """Whether the engine behind an endpoint is the one that a handoff names (`remote_engine_id`)."""
    if description.engine_id is None or description.engine_id == named:
        return None
    return Incompatible(
        "engine_id",
        "the handoff names another engine than the one that answers on the side channel",
        "nothing if the prefill engine has just restarted; else check that VLLM_NIXL_SIDE_CHANNEL_HOST and "
        "VLLM_NIXL_SIDE_CHANNEL_PORT are its own",
    )


def _itself(remote: Sequence[Description]) -> Incompatible | None:
    """Does one engine's metadata agree with itself: the asserts that need no second engine."""
    shapes = [description.geometry for description in remote if description.geometry is not None]
    if any(description.engine_id != remote[0].engine_id for description in remote):
        return Incompatible(
            "ranks_differ", "ranks of one side channel carry different engine ids", "restart the prefill engine"
        )
    if not all(map(_regular, shapes)):
        return Incompatible("metadata", "its metadata contradicts itself", "run the same vLLM on both sides")
    return None


def _regular(shape: Geometry) -> bool:
    if len(shape.block_lens) != len(shape.block_strides) or len(shape.block_strides) != shape.regions:
        return False
    return all(stride >= size for size, stride in zip(shape.block_lens, shape.block_strides, strict=True))


def _hash_differs(here: Description, there: Description) -> Incompatible:
    """The hash says only that they differ. What the metadata shows beside it is the likely cause."""
    if here.geometry is not None and there.geometry is not None:
        if here.geometry.attention_backend != there.geometry.attention_backend:
            return Incompatible(
                "hash",
                f"{there.geometry.attention_backend} attention there, {here.geometry.attention_backend} here",
                "use the same --attention-backend on both sides",
            )
        if here.geometry.regions != there.geometry.regions:
            return Incompatible(
                "hash",
                f"{there.geometry.regions} KV regions there, {here.geometry.regions} here: not the same model",
                "serve the same model on both sides",
            )
        if here.geometry.block_lens != there.geometry.block_lens:
            return Incompatible(
                "hash",
                f"KV blocks of {_span(there.geometry)} bytes there, {_span(here.geometry)} here: another model, "
                "dtype, --kv-cache-dtype, --block-size or tensor-parallel size",
                "make model, --dtype and --kv-cache-dtype the same on both sides",
            )
    if here.schema != there.schema or here.missing_fields != there.missing_fields:
        return Incompatible(
            "hash",
            "the metadata has other fields there than here: two vLLM versions",
            "run the same vLLM version on both sides",
        )
    return Incompatible(
        "hash",
        "compatibility hashes differ though the KV caches look alike: another vLLM version, --model given as "
        "another path or name, a pull and a push connector, or other speculative decoding",
        "start both sides with the same vLLM version, the very same --model string and the same connector",
    )


def _span(shape: Geometry) -> str:
    low, high = min(shape.block_lens, default=0), max(shape.block_lens, default=0)
    return str(low) if low == high else f"{low}-{high}"


def _context_parallel(here: Geometry, there: Geometry) -> Incompatible | None:
    change = "make --decode-context-parallel-size and --prefill-context-parallel-size fit each other"
    if there.pcp_size > 1 and there.dcp_size not in (1, there.pcp_size):
        cause = f"PCP {there.pcp_size} with DCP {there.dcp_size} there"
    elif here.pcp_size > 1 and here.dcp_size == 1 and there.dcp_size > 1:
        cause = "replicated PCP here, DCP shards there"
    elif there.pcp_size > 1 and there.dcp_size == 1 and here.dcp_size > 1:
        cause = "replicated PCP there, DCP shards here"
    elif here.dcp_size % there.dcp_size and there.dcp_size % here.dcp_size:
        cause = f"DCP {there.dcp_size} there and {here.dcp_size} here do not divide one another"
    elif here.recurrent and here.dcp_size != there.dcp_size:
        cause = f"DCP {there.dcp_size} there, {here.dcp_size} here, with state-space layers"
    else:
        return None
    return Incompatible("context_parallel", cause, change)


def _block_size(here: Geometry, there: Geometry) -> Incompatible | None:
    # The engine itself admits multiples (base_worker.py), and on CPU then reads every prompt wrong, with 200.
    if here.block_size == there.block_size:
        return None
    return Incompatible(
        "block_size",
        f"KV blocks of {there.block_size} tokens there, of {here.block_size} here",
        "use the same --block-size on both sides",
    )


def _layout(here: Geometry, there: Geometry) -> Incompatible | None:
    if here.layout == there.layout or "MLA" in here.attention_backend.upper():
        return None
    if there.layout == "LBHNC" and here.layout == "LBNHC":  # legal with enable_permute_local_kv, which is not told
        return None
    return Incompatible(
        "layout",
        f"KV cache layout {there.layout} there, {here.layout} here",
        "set the same VLLM_KV_CACHE_LAYOUT on both sides",
    )


_PAIR_RULES: Final[tuple[Callable[[Geometry, Geometry], Incompatible | None], ...]] = (
    _context_parallel,
    _block_size,
    _layout,
)
