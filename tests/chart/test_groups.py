"""An engine over several pods: the sidecar beside its leader, and workers that nobody mistakes for an engine."""

from typing import Any

import pytest

from tests.chart.render import (
    LAST_WITHOUT_NATIVE,
    container,
    containers,
    one,
    pod_spec,
    rendered,
    sidecars,
    template_of,
    with_values,
    with_values_raw,
    worker_of,
    workload,
)

VALUES = "leader-worker-set"
ROLES = ("decode", "prefill")
NODES = {"decode": 4, "prefill": 2}


def arguments(spec: dict[str, Any]) -> list[str]:
    found: list[str] = container(spec, "vllm")["args"]
    return found


def test_only_leaders_of_decode_have_a_sidecar() -> None:
    documents = rendered(VALUES)
    assert len(sidecars(documents)) == 1
    assert "routing-proxy" in [each["name"] for each in containers(pod_spec(workload(documents, "decode")))]
    for role in ROLES:
        assert [each["name"] for each in containers(worker_of(workload(documents, role))["spec"])] == ["vllm"]


def test_handshakes_do_not_go_to_a_loopback_that_workers_cannot_reach() -> None:
    assert "--nixl-relay=off" in sidecars(rendered(VALUES))[0]["args"]
    refused = with_values_raw({"decode.kind": "LeaderWorkerSet", "sidecar.settings.nixl-relay": "on"})
    assert refused.returncode != 0
    assert "workers of other pods cannot ask it" in refused.stderr
    of_prefill = sidecars(with_values({"prefill.kind": "LeaderWorkerSet"}))[0]
    assert not [each for each in of_prefill["args"] if each.startswith("--nixl-relay")]


@pytest.mark.parametrize("role", ROLES)
def test_workers_join_their_leader(role: str) -> None:
    made = workload(rendered(VALUES), role)
    group = made["spec"]["leaderWorkerTemplate"]
    leader, worker = arguments(pod_spec(made)), arguments(worker_of(made)["spec"])
    assert worker == [*leader, "--headless"]
    assert f"--nnodes={NODES[role]}" in leader
    assert group["size"] == NODES[role]
    assert {"--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"} <= set(leader)
    assert made["spec"]["startupPolicy"] == "LeaderCreated"  # a leader is ready once its workers are


@pytest.mark.parametrize("role", ROLES)
def test_nobody_selects_workers(role: str) -> None:
    documents = rendered(VALUES)
    made = workload(documents, role)
    labels = worker_of(made)["metadata"]["labels"]
    assert not [label for label in labels if label.startswith("llm-d.ai/")]
    assert labels["app.kubernetes.io/component"] == f"{role}-worker"
    assert template_of(made)["metadata"]["labels"]["llm-d.ai/role"] == role
    engine = container(worker_of(made)["spec"], "vllm")
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(engine)


@pytest.mark.parametrize("kube", ["1.34", LAST_WITHOUT_NATIVE])
@pytest.mark.parametrize("role", ROLES)
def test_workers_outlast_what_their_leader_has_begun(role: str, kube: str) -> None:
    """All pods of a group are told to stop at once."""
    made = workload(rendered(VALUES, kube=kube), role)
    spec = worker_of(made)["spec"]
    stop = container(spec, "vllm")["lifecycle"]["preStop"]
    seconds = stop["sleep"]["seconds"] if "sleep" in stop else int(stop["exec"]["command"][1])
    assert list(stop) == (["sleep"] if kube == "1.34" else ["exec"])
    assert seconds == 15 + 45
    assert seconds < spec["terminationGracePeriodSeconds"] <= pod_spec(made)["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ROLES)
def test_workers_hold_what_leaders_hold(role: str) -> None:
    made = workload(rendered(VALUES), role)
    leader, worker = container(pod_spec(made), "vllm"), container(worker_of(made)["spec"], "vllm")
    for same in ("image", "command", "env", "resources", "securityContext", "volumeMounts"):
        assert leader[same] == worker[same]
    own = {volume["name"] for volume in worker_of(made)["spec"]["volumes"]}
    assert {mount["name"] for mount in worker["volumeMounts"]} == own
    assert pod_spec(made).get("nodeSelector") == worker_of(made)["spec"].get("nodeSelector")


def test_placement_and_rollout_are_values() -> None:
    made = workload(rendered(VALUES), "decode")
    assert made["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack",
        "leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology": "example.com/host-pair",
    }
    assert made["spec"]["leaderWorkerTemplate"]["subGroupPolicy"] == {"subGroupSize": 2}
    assert made["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert made["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    plain = workload(rendered(VALUES), "prefill")
    assert "annotations" not in plain["metadata"]
    assert "rolloutStrategy" not in plain["spec"]
    assert plain["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_one_pod_is_a_deployment_and_names_stay() -> None:
    kinds = [with_values({"decode.kind": kind}) for kind in ("Deployment", "LeaderWorkerSet")]
    names = {each["kind"]: each["metadata"]["name"] for each in (workload(one_of, "decode") for one_of in kinds)}
    assert names == {"Deployment": "rel-pd-sidecar-decode", "LeaderWorkerSet": "rel-pd-sidecar-decode"}
    assert one(kinds[0], "Service", "decode") == one(kinds[1], "Service", "decode")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"sidecar.settings.data-parallel-size": 2}, "data-parallel ranks"),
        ({"decode.strategy": {"rollingUpdate": {"maxSurge": 0}}}, "decode.leaderWorkerSet.rollingUpdate"),
        ({"decode.leaderWorkerSet.size": 1}, "size"),
        ({"decode.leaderWorkerSet.rollingUpdate": {"surge": 1}}, "surge"),
    ],
)
def test_refused(values: dict[str, Any], why: str) -> None:
    done = with_values_raw({"decode.kind": "LeaderWorkerSet"} | values)
    assert done.returncode != 0
    assert why in done.stderr
