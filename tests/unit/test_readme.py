"""The README's pod: it parses, its sidecar starts with these arguments, and its times add up."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import config

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def pod() -> Any:
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return yaml.safe_load(block)["spec"]


def test_the_sidecar_takes_its_arguments(pod: Any) -> None:
    (sidecar,) = pod["initContainers"]
    command, *flags = sidecar["args"]
    assert command == "serve"
    settings = config.load(flags)[0]
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    assert ports == {"http": settings.port, "sidecar-admin": settings.metrics_port}
    probes = {sidecar[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "readiness", "liveness")}
    assert probes == {settings.metrics_port}


def test_the_engine_listens_where_the_sidecar_looks_for_it(pod: Any) -> None:
    (engine,) = pod["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in engine["args"])
    assert int(flags["port"]) == config.load([])[0].model_server_port
    assert json.loads(flags["kv-transfer-config"])["kv_connector"] == "NixlConnector"


def test_nobody_is_cut_off_when_the_pod_ends(pod: Any) -> None:
    (engine,) = pod["containers"]
    (shutdown,) = [flag for flag in engine["args"] if flag.startswith("--shutdown-timeout=")]
    command, pre_stop_s = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed_s = int(pre_stop_s) + int(shutdown.partition("=")[2]) + config.load([])[0].drain_timeout + 15
    assert pod["terminationGracePeriodSeconds"] == needed_s
