"""/metrics with the names, types and labels of vLLM 0.32 (the families that routers and schedulers read)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.engine.core import Core
    from tests.engine.engine import Engine

_PLAIN_COUNTERS = (
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
    "nixl_num_kv_expired_reqs_total",
    "nixl_num_notifications_after_expiry_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
)
_HISTOGRAMS = (
    "nixl_xfer_time_seconds",
    "nixl_bytes_transferred",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS = ("stop", "length", "abort", "error", "repetition")


def exposition(engine: Engine, names: Collection[str] = ()) -> str:
    """All families, or those named."""
    lines = [line for line in _lines(engine) if not names or _family(line) in names]
    return "".join(f"{line}\n" for line in lines)


def _family(line: str) -> str:
    return line.split()[2] if line.startswith("#") else line.partition("{")[0]


def _labels(engine: Engine, rank: int, **more: object) -> str:
    labels = {"engine": rank, "model_name": engine.served_models[0], **more}
    return "{" + ",".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}"


def _lines(engine: Engine) -> Iterator[str]:
    def family(name: str, kind: str) -> Iterator[str]:
        yield f"# HELP vllm:{name} Simulated."
        yield f"# TYPE vllm:{name} {kind}"

    cores = list(enumerate(engine.cores))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        yield from family(name, "gauge")
        for rank, core in cores:
            yield f"vllm:{name}{_labels(engine, rank)} {_gauge(name, core)}"
    yield from family("num_requests_waiting_by_reason", "gauge")
    for rank, core in cores:
        yield f"vllm:num_requests_waiting_by_reason{_labels(engine, rank, reason='capacity')} {len(core.waiting)}.0"
        yield f"vllm:num_requests_waiting_by_reason{_labels(engine, rank, reason='deferred')} 0.0"
    yield from family("num_requests_kv_fetch_by_stage", "gauge")
    for rank, core in cores:
        for stage, count in (
            ("waiting_to_start", 0),
            ("in_progress", core.pulling),
            ("completed_waiting", 0),
        ):
            labels = _labels(engine, rank, stage=stage)
            yield f"vllm:num_requests_kv_fetch_by_stage{labels} {float(count)}"
    yield from family("engine_sleep_state", "gauge")
    for rank, _ in cores:
        for state in ("awake", "weights_offloaded", "discard_all"):
            labels = _labels(engine, rank, sleep_state=state)
            yield f"vllm:engine_sleep_state{labels} {float(state == 'awake')}"
    yield from _counters(engine, cores)
    for name in _HISTOGRAMS:
        yield from family(name, "histogram")
        for rank, core in cores:
            count, total = core.observed(name)
            yield f"vllm:{name}_bucket{_labels(engine, rank, le='+Inf')} {float(count)}"
            yield f"vllm:{name}_count{_labels(engine, rank)} {float(count)}"
            yield f"vllm:{name}_sum{_labels(engine, rank)} {total}"
    yield from family("cache_config_info", "gauge")
    limits = engine.limits
    for rank, _ in cores:
        labels = (
            f'block_size="{limits.block_size}",cache_dtype="auto",enable_prefix_caching="{limits.prefix_caching}",'
            f'engine="{rank}",hash_block_size="{limits.block_size}",'
            f'kv_cache_size_tokens="{limits.num_blocks * limits.block_size}",'
            f'num_gpu_blocks="{limits.num_blocks}",prefix_caching_hash_algo="sha256"'
        )
        yield f"vllm:cache_config_info{{{labels}}} 1.0"
    yield from engine.adapters.exposition()


def _gauge(name: str, core: Core) -> float:
    if name == "num_requests_running":
        return float(len(core.running))
    if name == "num_requests_waiting":
        return float(len(core.waiting))
    return core.pool.used_blocks / core.pool.num_blocks


def _counters(engine: Engine, cores: list[tuple[int, Core]]) -> Iterator[str]:
    for name in _PLAIN_COUNTERS:
        yield f"# HELP vllm:{name} Simulated."
        yield f"# TYPE vllm:{name} counter"
        for rank, core in cores:
            yield f"vllm:{name}{_labels(engine, rank)} {float(core.counters[name])}"
    for name, label, values, prefix in (
        ("prompt_tokens_by_source_total", "source", _SOURCES, "prompt_tokens_"),
        ("request_success_total", "finished_reason", _REASONS, "request_success_"),
    ):
        yield f"# HELP vllm:{name} Simulated."
        yield f"# TYPE vllm:{name} counter"
        for rank, core in cores:
            for value in values:
                labels = _labels(engine, rank, **{label: value})
                yield f"vllm:{name}{labels} {float(core.counters[prefix + value])}"
    name = "admission_rejections_total"
    yield f"# HELP vllm:{name} Simulated."
    yield f"# TYPE vllm:{name} counter"
    model = engine.served_models[0]
    rejected = float(engine.counter("admission_rejections"))
    yield f'vllm:{name}{{model_name="{model}",reason="max_num_queued_reqs"}} {rejected}'
    yield f'vllm:{name}{{model_name="{model}",reason="max_num_queued_tokens"}} 0.0'
