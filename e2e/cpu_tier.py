"""Runs in the engines' Python: vLLM's tiered offloading with a copy by memcpy in place of a GPU's copy engine.

vLLM 0.32 refuses to make an offloading worker on its CPU platform ("only supported on CUDA-alike and XPU GPUs",
v1/kv_offload/cpu/spec.py), because that one copies with CUDA streams. All else of the connector is plain Python and
NIXL. So only the worker is replaced, through the door that vLLM has for specs of others (`spec_module_path`):
scheduler, tiers, the P2P tier's control channel and its transfers are the engine's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies whole blocks between the engine's KV cache and the tier's shared region, at once."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cache in caches.tensors:
            own = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._pairs.append((own, region.create_next_worker_view(cache.page_size_bytes)))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=False)

    def _copy(self, job_id: int, src_spec: Any, dst_spec: Any, *, store: bool) -> bool:
        began = time.perf_counter()
        source = torch.as_tensor(src_spec.block_ids, dtype=torch.long)
        target = torch.as_tensor(dst_spec.block_ids, dtype=torch.long)
        assert len(source) == len(target)  # one block a chunk
        size = 0
        for own, tier in self._pairs:
            to, of = (tier, own) if store else (own, tier)
            to[target] = of[source]
            size += len(source) * own.shape[1]
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over when it is submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` for an engine without a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)
        return self._worker
