"""What an engine's metrics tell of its KV cache."""

import pytest

from sidecar.connectors.connector import EngineFacts
from sidecar.prefill.probe import parse_facts

LINE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",cpu_offload_gb="0",'
    'enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",num_cpu_blocks="None",'
    'num_gpu_blocks="2048",num_gpu_blocks_override="None"} 1.0'
)


@pytest.mark.parametrize(
    ("metrics", "facts"),
    [
        (f"# HELP x\n{LINE}\n", EngineFacts(16, 2048)),
        (f"{LINE}\n", EngineFacts(16, 2048)),
        (LINE.replace('"2048"', '"None"'), EngineFacts(16, 0)),
        (LINE.replace('block_size="16"', 'block_size=""'), EngineFacts(0, 2048)),
        (LINE.replace('"16"', '"-16"'), EngineFacts(0, 2048)),
        (LINE.replace('"16"', '"1.6"'), EngineFacts(0, 2048)),
        (LINE.replace('"16"', '"\u0661"'), EngineFacts(0, 2048)),
        ("", EngineFacts()),
        ("vllm:cache_config_info{} 1.0", EngineFacts()),
        ("x" + LINE, EngineFacts()),
        ("vllm:num_requests_running 0\n" * 1000 + LINE, EngineFacts(16, 2048)),
        (f"{LINE}\n" + LINE.replace('"2048"', '"1024"').replace('engine="0"', 'engine="1"'), EngineFacts(16, 2048)),
    ],
    ids=range(12),
)
def test_facts(metrics: str, facts: EngineFacts) -> None:
    assert parse_facts(metrics) == facts
