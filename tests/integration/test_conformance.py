"""An llm-d decode pod in which only the sidecar's image was changed: its manifest is checked, and then it serves.

docs/conformance.md has every behaviour of the sidecar that is replaced, and the test that shows it here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from tests.engine import ThreadedEngine
from tests.integration.apis import COMPLETIONS
from tests.integration.client import Client
from tests.integration.sidecar import ROOT, Rig, Sidecar, completion, eventually
from tests.kube.api import ThreadedApi
from tests.kube.objects import pod, pool
from tests.ports import free_ports

MANIFEST = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: decode, labels: {llm-d.ai/role: decode, llm-d.ai/inferenceServing: "true"}}
spec:
  template:
    spec:
      initContainers:
        - name: routing-proxy
          image: REGISTRY/pd-sidecar:0.1.0
          restartPolicy: Always
          args:
            - --port=8000
            - --vllm-port=8200
            - --kv-connector=nixlv2
            - --secure-proxy=false
            - --prefill-max-retries=2
            - --data-parallel-size=1
          env:
            - {name: POD_IP, value: 127.0.0.1}
            - {name: ENABLE_PREFILLER_SAMPLING, value: "true"}
            - {name: INFERENCE_POOL, value: llm/p}
          ports: [{containerPort: 8000, name: sidecar}]
      containers:
        - name: vllm
          args: [--port=8200]
""")
"""What the field's guides have; the image is ours."""
CONTAINER = MANIFEST["spec"]["template"]["spec"]["initContainers"][0]


def check_config(*added: str) -> subprocess.CompletedProcess[str]:
    """`check-config` with the container's arguments and variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PD_SIDECAR_")}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", "check-config", *CONTAINER["args"], *added],
        cwd=ROOT,
        env={**inherited, **variables()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def variables() -> dict[str, str]:
    return {one["name"]: one["value"] for one in CONTAINER["env"]}


@pytest.fixture
def engines() -> Iterator[tuple[ThreadedEngine, ThreadedEngine]]:
    """Prefill and decode."""
    with ThreadedEngine() as prefill, ThreadedEngine() as decode:
        yield prefill, decode


def serve(stack: ExitStack, decode: ThreadedEngine, *added: str) -> Sidecar:
    """The container itself; its ports are others, as several tests share a machine."""
    moved = [argument for argument in CONTAINER["args"] if not argument.startswith(("--port", "--vllm-port"))]
    flags = [f"--vllm-port={decode.port}", *moved, *added]
    sidecar = Sidecar(
        *flags, "--local-side-channel", f"127.0.0.1:{decode.side_channel_port}", environment=variables()
    )
    stack.callback(sidecar.stop)
    return sidecar


def ask(sidecar: Sidecar, target: str, **fields: Any) -> Any:
    return sidecar.ask("POST", COMPLETIONS, completion(2000, **fields), [("x-prefiller-host-port", target)])


def test_only_the_image_changed() -> None:
    """It is accepted as it is, with one warning: the line that has to be added."""
    done = check_config()
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert "--prefill-allow" in warning
    effective = yaml.safe_load(done.stdout)
    assert (effective["port"], effective["model-server-port"]) == (8000, 8200)
    assert effective["prefill-attempts"] == 3
    assert effective["enable-prefiller-sampling"] == "on"
    assert effective["secure-serving"] == "off"


def test_until_the_line_is_added_every_target_is_refused(engines: tuple[ThreadedEngine, ThreadedEngine]) -> None:
    prefill, decode = engines
    with ExitStack() as stack:
        sidecar = serve(stack, decode)
        answer = ask(sidecar, prefill.address)
        assert (answer.status, answer.reason_code) == (403, "reading_not_allowed")
        assert "--prefill-allow" in sidecar.log
        assert ask(sidecar, "").decision == "local; reason=no_target"
        assert not [one for one in prefill.requests if one.method == "POST"]


def test_the_line_is_added(engines: tuple[ThreadedEngine, ThreadedEngine]) -> None:
    assert check_config("--prefill-allow=10.0.0.0/8").stderr == ""
    prefill, decode = engines
    with ExitStack() as stack:
        sidecar = serve(stack, decode, "--prefill-allow=127.0.0.0/8")
        assert ask(sidecar, prefill.address).decision == f"remote; prefill={prefill.address}"


def test_a_pool_in_its_place() -> None:
    """`--inference-pool` as it is given there: whom the pool picks may be named, nobody else."""
    with ExitStack() as stack:
        prefill = stack.enter_context(ThreadedEngine(host="127.0.9.1", side_channel_host="127.0.9.1"))
        decode = stack.enter_context(ThreadedEngine())
        server = stack.enter_context(ThreadedApi())
        server.do(lambda: server.apply("inferencepools", pool("p", {"app": "x"}, prefill.port)))
        labels = {"app": "x", "llm-d.ai/role": "prefill"}
        server.do(lambda: server.apply("pods", pod("p0", prefill.host, labels=labels)))
        sidecar = serve(stack, decode, "--inference-pool=llm/p", "--kubernetes-api", server.url)
        eventually(lambda: prefill.address in sidecar.admin("GET", "/endpoints")[1])
        assert ask(sidecar, prefill.address).decision == f"remote; prefill={prefill.address}"
        assert ask(sidecar, f"127.0.9.2:{free_ports()}").status == 403
        # By its variable, as soon as their protection is asked for.
        by_variable = serve(stack, decode, "--enable-ssrf-protection", "--kubernetes-api", server.url)
        eventually(lambda: prefill.address in by_variable.admin("GET", "/endpoints")[1])
        assert ask(by_variable, prefill.address).decision == f"remote; prefill={prefill.address}"


def test_every_rank_asks_the_same_list(engines: tuple[ThreadedEngine, ThreadedEngine]) -> None:
    prefill, _ = engines
    first = free_ports(2)
    with ExitStack() as stack:
        ranks = [stack.enter_context(ThreadedEngine(port=first + rank)) for rank in range(2)]
        flags = ("--vllm-port", str(first), "--data-parallel-size=2", f"--prefill-allow={prefill.address}")
        sidecar = Sidecar(*flags, "--disagg", "on", ranks=2)
        stack.callback(sidecar.stop)
        for rank, engine in enumerate(ranks):
            with Client(("127.0.0.1", sidecar.port + rank)) as client:
                for target, status in ((prefill.address, 200), (f"127.0.9.2:{prefill.port}", 403)):
                    client.request("POST", COMPLETIONS, completion(), [("x-prefiller-host-port", target)])
                    assert client.answer("POST").status == status, (rank, target)
            assert sum(one.method == "POST" for one in engine.requests) == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_usage_without_details_stays_without(rigged: Callable[..., Rig], streamed: bool) -> None:
    plain = {"enable_prompt_tokens_details": False}
    rig = rigged(prefill=plain, decode=plain)
    more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answer = rig.post(COMPLETIONS, completion(**more))
    assert answer.decision.startswith("remote")
    last = json.loads(answer.events[-2]) if streamed else answer.json
    assert last["usage"]["prompt_tokens"] == 400
    assert last["usage"].get("prompt_tokens_details") is None
