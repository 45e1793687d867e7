"""What the chart gives to engines is what the real vLLM reads: every argument list goes through its own parser, and
every variable that the chart sets is one of its."""

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from e2e.install import engine_python
from tests.chart.render import (
    VALUES,
    container,
    pod_spec,
    rendered,
    worker_of,
    workload,
)

PARSE = """
import json, sys
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
asked = json.load(sys.stdin)
parsed = []
for arguments in asked["arguments"]:
    options = parser.parse_args(arguments)
    validate_parsed_serve_args(options)
    parsed.append(vars(options))
unknown = [name for name in asked["variables"] if name not in envs.environment_variables]
json.dump([parsed, unknown], sys.stdout, default=str)
"""

ENGINES = [(values, role) for values in VALUES if values != "sidecar-only" for role in ("decode", "prefill")]
WORKERS = [("leader-worker-set", "decode-worker"), ("leader-worker-set", "prefill-worker")]


def engine(values: str, role: str) -> dict[str, Any]:
    """As the kubelet starts it: with what the LeaderWorkerSet controller says in the environment."""
    is_worker = role.endswith("-worker")
    made = workload(rendered(values), role.removesuffix("-worker"))
    found = container(worker_of(made)["spec"] if is_worker else pod_spec(made), "vllm")
    given = {"$(LWS_WORKER_INDEX)": "1" if is_worker else "0", "$(LWS_LEADER_ADDRESS)": "rel-0.rel.space"}
    for name, value in given.items():
        found["args"] = [argument.replace(name, value) for argument in found["args"]]
    return found


@cache
def parsed() -> dict[tuple[str, str], dict[str, Any]]:
    """The arguments as vLLM understands them; importing it takes long, so all at once."""
    engines = [engine(*each) for each in (*ENGINES, *WORKERS)]
    variables = {variable["name"] for each in engines for variable in each["env"]}
    asked = {
        "arguments": [each["args"] for each in engines],
        "variables": sorted(name for name in variables if name.startswith("VLLM_")),
    }
    done = subprocess.run(
        [str(engine_python()), "-c", PARSE],
        input=json.dumps(asked),
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, unknown = json.loads(done.stdout.splitlines()[-1])
    assert unknown == [], "vLLM has no such variable"
    return dict(zip([*ENGINES, *WORKERS], found, strict=True))


@pytest.mark.parametrize(("values", "role"), ENGINES)
def test_vllm_reads_what_the_chart_says(values: str, role: str) -> None:
    understood = parsed()[values, role]
    rendered_engine = engine(values, role)
    ports = {port["name"]: port["containerPort"] for port in rendered_engine["ports"]}
    assert understood["model_tag"] == rendered_engine["args"][0]
    assert understood["port"] == ports["engine"]
    assert understood["shutdown_timeout"] == 45
    assert "Nixl" in str(understood["kv_transfer_config"])
    ranks = sum(1 for name in ports if name.startswith("engine"))
    assert understood["data_parallel_size"] == ranks
    assert understood["data_parallel_multi_port_external_lb"] is (ranks > 1)
    publishes = values == "gpu-rdma" and role == "decode"
    assert ("tcp://127.0.0.1:5557" in str(understood["kv_events_config"])) is publishes


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_vllm_finds_the_nodes_of_one_engine(role: str) -> None:
    leader, worker = parsed()["leader-worker-set", role], parsed()["leader-worker-set", f"{role}-worker"]
    differ = {name for name in leader if leader[name] != worker[name]} - {"kv_transfer_config"}  # has an engine id
    assert differ == {"node_rank", "headless"}
    assert (leader["node_rank"], worker["node_rank"], worker["headless"]) == (0, 1, True)
    assert leader["master_addr"] == "rel-0.rel.space"
    assert leader["tensor_parallel_size"] * leader["pipeline_parallel_size"] % leader["nnodes"] == 0
