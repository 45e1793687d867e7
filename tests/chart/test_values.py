"""Values that cannot work are refused before they reach a cluster, and YAML's traps are none."""

import json
from typing import Any

import pytest
import yaml

from docs import values_schema
from sidecar import config
from sidecar.connectors import CONNECTORS
from tests.chart.render import (
    HELMS,
    LAST_WITHOUT_NATIVE,
    container,
    one,
    parsed,
    pod_spec,
    sidecars,
    template,
    validated,
    values_file,
    with_values,
    with_values_raw,
)

REFUSED = [
    ("disagg", "maybe"),
    ("sidecar.settings.disagg", "off"),  # the ConfigMap's: a flag would win over it
    ("sidecar.settings.config", "/tmp/other"),
    ("sidecar.settings.no-such-flag", 1),
    ("sidecar.settings.port", 0),
    ("sidecar.settings.port", "http"),
    ("sidecar.settings.prefill", "10.0.0.5:8000"),
    ("sidecar.settings.on-prefill-failure", "panic"),
    ("sidecar.settings.nixl-relay", "maybe"),
    ("sidecar.settings.pull-timeout", 0),
    ("sidecar.setings", {}),
    ("sidecar.image.tag", "latest"),
    ("engine.image.tag", "latest"),
    ("sidecar.image.digest", "sha256:abc"),
    ("sidecar.mode", "sidecar"),
    ("decode.replicas", -1),
    ("decode.kvRole", "kv_consmer"),
    ("decode.service.type", "ExternalName"),
    ("prefill.dataParallelSize", 0),
    ("networkPolicy.enable", True),
    ("networkPolicy.nixlDataPorts", {"first": 20000, "last": 200000}),
    ("monitoring.podMonitor.labls", {}),
    ("engine.keepAliveSeconds", 0),
    ("engine.hashSeed", "random"),
]


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_the_schema_refuses(key: str, value: Any, name: str) -> None:
    done = with_values_raw({key: value}, name=name)
    assert done.returncode != 0
    assert "schema" in done.stderr
    assert key.rpartition(".")[2] in done.stderr or key.split(".")[-2] in done.stderr
    validated[f"bad values refused by {name}"] += 1


TOO_SMALL = [
    ({"decode.terminationGracePeriodSeconds": 134}, "decode.terminationGracePeriodSeconds 134"),
    ({"prefill.terminationGracePeriodSeconds": 30}, "need 75"),
    ({"decode.terminationGracePeriodSeconds": 135, "sidecar.settings.drain-timeout": 60.5}, "need 136"),
    ({"engine.keepAliveSeconds": 4}, "engine-idle-timeout 4"),
    ({"sidecar.image.repository": ""}, "sidecar.image.repository is needed"),
    ({"model.name": ""}, "model.name is needed"),
    ({"sidecar.tls.clientCa": True}, "sidecar.tls.secretName is needed"),
    ({"serviceAccount.create": False}, "serviceAccount.name is needed"),
    ({"sidecar.settings.inference-pool": "models/qwen"}, "discovery-namespace"),
    ({"prefill.dataParallelSize": 2, "prefill.portPerRank": True}, "would leave all ranks but the first idle"),
]


@pytest.mark.parametrize(("values", "why"), TOO_SMALL, ids=lambda value: str(value)[:40])
def test_rendering_fails_and_says_why(values: dict[str, Any], why: str) -> None:
    done = with_values_raw(values)
    assert done.returncode != 0
    assert why in done.stderr


def test_native_sidecar_in_an_old_cluster_is_refused() -> None:
    done = with_values_raw({"sidecar.mode": "native"}, kube=LAST_WITHOUT_NATIVE)
    assert done.returncode != 0
    assert "set sidecar.mode=container" in done.stderr


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 15 + 45 + 60 + 15),
        ({"sidecar.settings.drain-timeout": 0, "decode.preStopSeconds": 0}, 45 + 15),
        ({"sidecar.settings.drain-timeout": 0.2}, 15 + 45 + 1 + 15),
        ({"decode.terminationGracePeriodSeconds": 600}, 600),
        ({"sidecar.mode": "container"}, 15 + 60 + 45 + 15),
    ],
)
def test_grace_period_covers_its_parts(values: dict[str, Any], seconds: int) -> None:
    assert pod_spec(one(with_values(values), "Deployment", "decode"))["terminationGracePeriodSeconds"] == seconds


def test_prefill_grace_knows_no_drain() -> None:
    assert pod_spec(one(with_values({}), "Deployment", "prefill"))["terminationGracePeriodSeconds"] == 15 + 45 + 15


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("mode", ["on", "off", "auto"])
def test_a_bare_on_or_off_is_no_truth_value(mode: str, name: str, tmp_path: Any) -> None:
    """YAML 1.1 reads them as true and false; the file and --set must mean the same."""
    file = tmp_path / "values.yaml"
    file.write_text(f"disagg: {mode}\nsidecar: {{settings: {{warm-up: {'off' if mode == 'off' else 'on'}}}}}\n")
    minimal = ["--values", str(values_file("minimal"))]
    for flags in (["--values", str(file)], ["--set", f"disagg={mode}"]):
        documents = parsed(template(*minimal, *flags, name=name).stdout)
        assert yaml.safe_load(one(documents, "ConfigMap", "switch")["data"]["sidecar.yaml"]) == {"disagg": mode}
    documents = parsed(template(*minimal, "--values", str(file), name=name).stdout)
    assert f"--warm-up={'off' if mode == 'off' else 'on'}" in sidecars(documents)[0]["args"]


@pytest.mark.parametrize("name", HELMS)
def test_numbers_are_spelled_as_the_parser_reads_them(name: str, tmp_path: Any) -> None:
    """Helm reads integers of a file as floats: 67108864 would become 6.7108864e+07."""
    file = tmp_path / "values.yaml"
    file.write_text("sidecar: {settings: {max-body-bytes: 1099511627776, kv-lease: 7.25, prefill-attempts: 3}}\n")
    documents = parsed(template("--values", str(values_file("minimal")), "--values", str(file), name=name).stdout)
    arguments = sidecars(documents)[0]["args"]
    for argument in ("--max-body-bytes=1099511627776", "--kv-lease=7.25", "--prefill-attempts=3"):
        assert argument in arguments


def test_null_takes_a_setting_back() -> None:
    arguments = sidecars(with_values({"sidecar.settings.log-format": None}))[0]["args"]
    assert not any(argument.startswith("--log-format") for argument in arguments)


def test_every_flag_of_serve_is_a_value() -> None:
    closed = values_schema.settings_schema()
    assert closed["additionalProperties"] is False
    assert set(closed["properties"]) == {field.name for field in config.FIELDS} - {"disagg"}


def test_what_is_not_ours_stays_open() -> None:
    """A schema that knows better than Kubernetes keeps people from upgrading."""
    values = {
        "decode.podSpec": {"anything": {"goes": True}},
        "decode.resources": {"claims": []},
        "engine.probes": "ours do not know it",
        "mine": {"for": "a parent chart"},
        "global": {},
    }
    assert with_values_raw(values).returncode == 0


def test_model_label_is_a_label() -> None:
    for model in ("openai/gpt-oss-120b", "/models/" + "x" * 80 + "/", "a b:c"):
        labels = one(with_values({"model.name": model}), "Deployment", "decode")["metadata"]["labels"]
        label = labels["llm-d.ai/model"]
        assert len(label) <= 63
        assert label.strip("-._/") == label
        assert label.replace("-", "").replace(".", "").isalnum()


def _argument(container: Any, name: str) -> str | None:
    return next((one.partition("=")[2] for one in container["args"] if one.startswith(f"--{name}=")), None)


@pytest.mark.parametrize("on", ["on", True])
def test_the_engine_publishes_where_the_sidecar_listens(on: Any) -> None:
    values = {"sidecar.settings.kv-events": on, "sidecar.settings.kv-events-port": 6000}
    documents = with_values(values | {"sidecar.settings.kv-events-replay-port": 6100})
    engine = container(pod_spec(one(documents, "Deployment", "decode")), "vllm")
    assert json.loads(_argument(engine, "kv-events-config") or "") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:6000",  # no wildcard: the engine connects, the sidecar binds
        "replay_endpoint": "tcp://127.0.0.1:6100",
    }
    assert _argument(sidecars(documents)[0], "kv-events") == "on"
    prefill = container(pod_spec(one(documents, "Deployment", "prefill")), "vllm")
    assert _argument(prefill, "kv-events-config") is None
    for off in ({}, {"sidecar.settings.kv-events": "off"}, {"sidecar.settings.kv-events": False}):
        engine = container(pod_spec(one(with_values(off), "Deployment", "decode")), "vllm")
        assert _argument(engine, "kv-events-config") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "roles"),
    [
        ("nixlv2", "NixlConnector", ["kv_consumer", "kv_producer"]),
        ("nixl-push", "NixlPushConnector", ["kv_consumer", "kv_producer"]),
        ("mooncake", "MooncakeConnector", ["kv_consumer", "kv_producer"]),
        ("lmcache", "LMCacheConnectorV1", ["kv_both", "kv_both"]),
    ],
)
def test_engines_have_the_sidecars_connector(ours: str, theirs: str, roles: list[str]) -> None:
    documents = with_values({"sidecar.settings.kv-connector": ours})
    for role, expected in zip(("decode", "prefill"), roles, strict=True):
        engine = container(pod_spec(one(documents, "Deployment", role)), "vllm")
        found = json.loads(_argument(engine, "kv-transfer-config") or "")
        assert found == {"kv_connector": theirs, "kv_role": expected}


def test_every_connector_has_its_counterpart() -> None:
    for name, connector in CONNECTORS.items():
        values = {"sidecar.settings.kv-connector": name}
        done = with_values_raw(values)
        if name == "shared-storage":  # there are several; the operator says which
            assert "engine.kvConnector is needed" in done.stderr
            done = with_values_raw(values | {"engine.kvConnector": "ExampleConnector"})
            assert "ExampleConnector" in done.stdout
        if name == "offloading":  # it has no size of its own
            assert "engine.kvTransferExtra.cpu_bytes_to_use is needed" in done.stderr
            done = with_values_raw(values | {"engine.kvTransferExtra.cpu_bytes_to_use": 1 << 30})
        assert done.returncode == 0, done.stderr
        assert ("--kv-transfer-config" in done.stdout) is connector.splits


def test_engines_with_a_p2p_tier() -> None:
    """Each dials the other back by the address that it gives: the pod's own, where the sidecar asks it too."""
    values = {"sidecar.settings.kv-connector": "offloading", "sidecar.settings.p2p-connector-port": 7000}
    documents = with_values(values | {"engine.kvTransferExtra.cpu_bytes_to_use": 1 << 30})
    for role in ("decode", "prefill"):
        engine = container(pod_spec(one(documents, "Deployment", role)), "vllm")
        found = json.loads(_argument(engine, "kv-transfer-config") or "")
        assert found == {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [{"type": "p2p"}],
                "cpu_bytes_to_use": 1 << 30,
            },
        }
        assert _p2p(engine) == {"VLLM_P2P_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_P2P_SIDE_CHANNEL_PORT": "7000"}
    assert _p2p(sidecars(documents)[0])
    assert not _p2p(sidecars(with_values({}))[0])
    assert _p2p(sidecars(with_values({"sidecar.settings.enable-p2p-pull": True}))[0])


def test_engines_with_mooncake_keep_its_bootstrap_server_where_the_sidecar_asks() -> None:
    values = {"sidecar.settings.kv-connector": "mooncake", "sidecar.settings.mooncake-bootstrap-port": 9000}
    engine = container(pod_spec(one(with_values(values), "Deployment", "prefill")), "vllm")
    assert {"name": "VLLM_MOONCAKE_BOOTSTRAP_PORT", "value": "9000"} in engine["env"]
    done = with_values_raw(values | {"networkPolicy.enabled": True})
    assert "networkPolicy.enabled does not go with kv-connector mooncake" in done.stderr


def _p2p(container: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "_P2P_" in one["name"]}


def test_lease_of_engines_and_sidecar_is_one() -> None:
    documents = with_values({"sidecar.settings.kv-lease": 45})
    for role in ("decode", "prefill"):
        spec = pod_spec(one(documents, "Deployment", role))
        argument = _argument(container(spec, "vllm"), "kv-transfer-config")
        assert json.loads(argument or "")["kv_connector_extra_config"]["kv_lease_duration"] == 45
