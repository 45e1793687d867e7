"""What the pods hold, whatever the values: no deadlock, no privilege, ports that match, labels that may change."""

from typing import Any

import pytest

from tests.chart.render import (
    LAST_WITHOUT_NATIVE,
    VALUES,
    container,
    containers,
    is_one,
    one,
    pod_spec,
    pods,
    rendered,
    selector_of,
    sidecars,
    template_of,
    with_values,
    workload,
)

WITH_PODS = [name for name in VALUES if name != "sidecar-only"]


def decode(values: str) -> dict[str, Any]:
    return pod_spec(workload(rendered(values), "decode"))


@pytest.mark.parametrize("values", WITH_PODS)
def test_nothing_that_starts_the_engine_waits_for_it(values: str) -> None:
    """The startup probe of a native sidecar gates the engine's container: it asks the admin port alone, and so does
    liveness. Only readiness knows of the engine."""
    sidecar = container(decode(values), "routing-proxy")
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/startupz", "port": "sidecar-admin"}
    assert sidecar["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "sidecar-admin"}
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "sidecar-admin"}
    assert "postStart" not in sidecar.get("lifecycle", {})


@pytest.mark.parametrize("named", [[], ["decoder"], ["prefiller"], ["decoder", "prefiller"]], ids=str)
def test_engines_that_speak_tls_are_probed_and_scraped_so(named: list[str]) -> None:
    """A probe in plain HTTP would find no engine ready, and restart it after an hour."""
    documents = with_values({"sidecar.settings.enable-tls": named, "monitoring.podMonitor.enabled": True})
    for role, name, monitor in (("decode", "decoder", "sidecar"), ("prefill", "prefiller", "prefill")):
        engine = container(pod_spec(workload(documents, role)), "vllm")
        scheme = {"scheme": "HTTPS"} if name in named else {}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert engine[probe]["httpGet"] == {"path": "/health", "port": "engine"} | scheme
        endpoints = one(documents, "PodMonitor", monitor)["spec"]["podMetricsEndpoints"]
        schemes = {each["port"]: each.get("scheme") for each in endpoints}
        assert schemes.pop("sidecar-admin", None) is None, "the admin port speaks plain HTTP"
        assert schemes == {"engine": "https" if scheme else None}


@pytest.mark.parametrize("values", WITH_PODS)
def test_sidecar_is_native_where_clusters_know_it(values: str) -> None:
    native = values != "plain-container"
    spec = decode(values)
    assert [one["name"] for one in spec.get("initContainers", [])] == (["routing-proxy"] if native else [])
    assert container(spec, "routing-proxy").get("restartPolicy") == ("Always" if native else None)
    old = pod_spec(workload(rendered(values, kube=LAST_WITHOUT_NATIVE), "decode"))
    assert "initContainers" not in old
    assert "restartPolicy" not in container(old, "routing-proxy")


def test_plain_sidecar_drains_before_its_engine_ends() -> None:
    """Both get SIGTERM after their own preStop: the engine's lasts as much longer as the drain takes."""
    spec = decode("plain-container")
    sleeps = {one["name"]: one["lifecycle"]["preStop"]["sleep"]["seconds"] for one in spec["containers"]}
    assert sleeps == {"routing-proxy": 15, "vllm": 15 + 30}
    old = pod_spec(workload(rendered("plain-container", kube="1.29"), "decode"))
    commands = {one["name"]: one["lifecycle"]["preStop"]["exec"]["command"] for one in old["containers"]}
    assert commands["vllm"] == ["sleep", "45"]
    assert commands["routing-proxy"][0] == "python3"  # the image has no shell and no sleep


@pytest.mark.parametrize("values", VALUES)
def test_sidecars_have_no_privilege(values: str) -> None:
    for _, spec in pods(rendered(values)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # PD_SIDECAR_PORT=tcp://... would be one
        for each in containers(spec):
            assert each["image"].rpartition(":")[2] not in ("latest", each["image"])
            if each["name"] == "vllm":
                continue
            security = each["securityContext"]
            assert (security["runAsNonRoot"], security["readOnlyRootFilesystem"]) == (True, True)
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in each["resources"]["limits"]


@pytest.mark.parametrize("values", WITH_PODS)
def test_ports(values: str) -> None:
    """Names are unique and at most 15 characters, numbers do not collide, and Services and probes name them."""
    documents = rendered(values)
    for role in ("decode", "prefill"):
        spec = pod_spec(workload(documents, role))
        ports = [port for each in containers(spec) for port in each["ports"]]
        names = [port["name"] for port in ports]
        assert len(set(names)) == len(names)
        assert len({port["containerPort"] for port in ports}) == len(ports)
        assert all(len(name) <= 15 for name in names)
        for each in containers(spec):
            own = {port["name"] for port in each["ports"]}
            assert all(each[probe]["httpGet"]["port"] in own for probe in each if probe.endswith("Probe"))
        for service in documents:
            if service["kind"] == "Service" and service["metadata"]["name"].endswith(role):
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(names)
                numbers = {port["name"]: port["containerPort"] for port in ports}
                assert all(port["port"] == numbers[port["targetPort"]] for port in service["spec"]["ports"])


def test_ranks_have_ports_of_their_own() -> None:
    documents = rendered("data-parallel")
    spec = pod_spec(workload(documents, "decode"))
    numbers = {port["name"]: port["containerPort"] for each in containers(spec) for port in each["ports"]}
    assert [numbers[name] for name in ("http", "http-1", "http-2", "http-3")] == [8000, 8001, 8002, 8003]
    assert [numbers[name] for name in ("engine", "engine-1", "engine-2", "engine-3")] == [8200, 8201, 8202, 8203]
    assert [numbers[f"nixl-{rank}"] for rank in range(4)] == [5700, 5701, 5702, 5703]
    prefill = container(pod_spec(workload(documents, "prefill")), "vllm")
    assert [port["containerPort"] for port in prefill["ports"]] == [8000, 8001, 5700, 5701]
    assert "--data-parallel-size-local=2" in prefill["args"]
    assert "--data-parallel-size=2" in prefill["args"]
    assert "replicas" not in workload(documents, "prefill")["spec"]
    assert one(documents, "Service", "prefill")["spec"]["clusterIP"] == "None"


def test_ranks_behind_one_port() -> None:
    """Without a gateway that picks ranks vLLM balances them itself; each still has its side channel."""
    documents = with_values({"prefill.dataParallelSize": 2})
    prefill = container(pod_spec(workload(documents, "prefill")), "vllm")
    assert [port["containerPort"] for port in prefill["ports"]] == [8000, 5600, 5601]
    assert "--data-parallel-size=2" in prefill["args"]
    assert "--data-parallel-multi-port-external-lb" not in prefill["args"]
    assert [port["port"] for port in one(documents, "Service", "prefill")["spec"]["ports"]] == [8000, 5600, 5601]


@pytest.mark.parametrize("values", WITH_PODS)
def test_engines_know_their_pods_address(values: str) -> None:
    documents = rendered(values)
    for role in ("decode", "prefill"):
        for each in containers(pod_spec(workload(documents, role))):
            names = [variable["name"] for variable in each["env"]]
            assert len(set(names)) == len(names)
            variables = {variable["name"]: variable for variable in each["env"]}
            assert variables["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]["value"] == "$(POD_IP)"
            # Kubernetes only expands what stands before.
            assert names.index("POD_IP") < names.index("VLLM_NIXL_SIDE_CHANNEL_HOST")
    engine = container(decode(values), "vllm")
    keep_alive = next(one["value"] for one in engine["env"] if one["name"] == "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    idle = next(
        argument.partition("=")[2]
        for argument in sidecars(documents)[0]["args"]
        if argument.startswith("--engine-idle-timeout=")
    )
    assert float(keep_alive) > float(idle)


@pytest.mark.parametrize("values", WITH_PODS)
def test_labels_of_llm_d_are_on_pods_and_never_in_selectors(values: str) -> None:
    documents = rendered(values)
    for role in ("decode", "prefill"):
        deployment = workload(documents, role)
        selector = selector_of(documents, role)
        labels = template_of(deployment)["metadata"]["labels"]
        assert set(selector) == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
        assert selector.items() <= labels.items()
        assert labels["llm-d.ai/role"] == role
        assert labels["llm-d.ai/inference-serving"] == "true"
        assert labels["llm-d.ai/engine-type"] == "vllm"
        assert labels["llm-d.ai/model"]
        # What changes with every release of the chart would restart engines for nothing.
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)


@pytest.mark.parametrize("values", WITH_PODS)
def test_everything_that_selects_pods_selects_those_of_its_role(values: str) -> None:
    documents = rendered(values)
    for role in ("decode", "prefill"):
        wanted = selector_of(documents, role)
        budgets = [each for each in documents if is_one(each, "PodDisruptionBudget", role)]
        services = [each for each in documents if is_one(each, "Service", role)]
        spread = pod_spec(workload(documents, role)).get("topologySpreadConstraints", [])
        assert [each["spec"]["selector"]["matchLabels"] for each in budgets] == [wanted] * len(budgets)
        assert [each["spec"]["selector"] for each in services] == [wanted] * len(services)
        assert [each["labelSelector"]["matchLabels"] for each in spread] == [wanted] * len(spread)


@pytest.mark.parametrize("values", WITH_PODS)
def test_both_sides_run_the_same_model_in_the_same_way(values: str) -> None:
    """Or their KV never fits, or the same prompt has other block hashes."""
    engines = [container(pod_spec(workload(rendered(values), role)), "vllm") for role in ("decode", "prefill")]
    for same in ("image", "command"):
        assert engines[0][same] == engines[1][same]
    assert engines[0]["args"][0] == engines[1]["args"][0]
    for variable in ("PYTHONHASHSEED", "UCX_TLS"):
        found = [[each for each in engine["env"] if each["name"] == variable] for engine in engines]
        assert found[0] == found[1]
    assert {"name": "PYTHONHASHSEED", "value": "0"} in engines[0]["env"]
    assert [arg for arg in engines[0]["args"] if arg.startswith("--served-model-name=")] == (
        ["--served-model-name=gpt-oss"] if values == "gpu-rdma" else []
    )
    assert all("--shutdown-timeout=45" in engine["args"] for engine in engines)


def test_the_selector_is_a_value() -> None:
    labels = {"app": "mine", "llm-d.ai/role": "decode"}
    none = {"sidecar.settings.discovery": "none", "networkPolicy.enabled": True}
    documents = with_values({"decode.selectorLabels": labels} | none)
    deployment = workload(documents, "decode")
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert one(documents, "Service", "decode")["spec"]["selector"] == labels
    assert one(documents, "PodDisruptionBudget", "decode")["spec"]["selector"]["matchLabels"] == labels
    assert one(documents, "NetworkPolicy", "decode")["spec"]["podSelector"]["matchLabels"] == labels


def test_turning_the_switch_rolls_nothing() -> None:
    on, off = (with_values({"disagg": mode}) for mode in ("on", "off"))
    changed = [each["metadata"]["name"] for each, other in zip(on, off, strict=True) if each != other]
    assert changed == ["rel-pd-sidecar-switch"]


def test_the_switch_is_mounted_as_a_folder() -> None:
    """A file mounted by subPath is never renewed."""
    sidecar = sidecars(rendered("minimal"))[0]
    mount = next(one for one in sidecar["volumeMounts"] if one["name"] == "pd-sidecar-config")
    assert "subPath" not in mount
    assert f"--config={mount['mountPath']}/sidecar.yaml" in sidecar["args"]


def test_rdma_shared_memory_and_ucx_reach_the_engines() -> None:
    for role in ("decode", "prefill"):
        spec = pod_spec(workload(rendered("gpu-rdma"), role))
        engine = container(spec, "vllm")
        assert engine["resources"]["limits"]["rdma/ib"] == engine["resources"]["requests"]["rdma/ib"] == 1
        assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert {"name": "UCX_TLS", "value": "rc,cuda_copy,cuda_ipc"} in engine["env"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in engine["volumeMounts"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}} in spec["volumes"]
    assert pod_spec(workload(rendered("gpu-rdma"), "decode"))["priorityClassName"] == "serving"


def test_traces_name_their_pod() -> None:
    traced, untraced = (sidecars(rendered(values))[0]["env"] for values in ("gpu-rdma", "minimal"))
    names = [variable["name"] for variable in traced]
    where = next(variable["value"] for variable in traced if variable["name"] == "OTEL_RESOURCE_ATTRIBUTES")
    assert where == "k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME)"
    for variable in ("POD_NAMESPACE", "POD_NAME"):  # Kubernetes only expands what stands before
        assert names.index(variable) < names.index("OTEL_RESOURCE_ATTRIBUTES")
    assert "OTEL_RESOURCE_ATTRIBUTES" not in [variable["name"] for variable in untraced]


def test_only_the_sidecar_may_read_and_only_what_discovery_needs() -> None:
    documents = rendered("discovery")
    assert one(documents, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["inference.networking.x-k8s.io"],
            "resources": ["inferencepools"],
            "verbs": ["get", "list", "watch"],
        },
    ]
    for kind in ("Role", "RoleBinding"):
        assert one(documents, kind)["metadata"]["namespace"] == "models"
    account = one(documents, "ServiceAccount")["metadata"]["name"]
    assert one(documents, "RoleBinding")["subjects"][0] == {
        "kind": "ServiceAccount",
        "name": account,
        "namespace": "space",
    }
    spec = pod_spec(workload(documents, "decode"))
    assert spec["serviceAccountName"] == account
    tokens = {
        each["name"]
        for each in containers(spec)
        if any(mount["mountPath"].startswith("/var/run/secrets") for mount in each["volumeMounts"])
    }
    assert tokens == {"routing-proxy"}


def test_without_a_pool_there_is_no_right_to_read_one() -> None:
    role = one(rendered("minimal"), "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert role["metadata"]["namespace"] == "space"
    assert not [each for each in with_values({"rbac.create": False}) if each["kind"].startswith("Role")]


@pytest.mark.parametrize("values", ["data-parallel", "plain-container"])
def test_without_discovery_there_is_nothing_to_read(values: str) -> None:
    assert not [each for each in rendered(values) if each["kind"] in ("Role", "RoleBinding", "ClusterRole")]
    assert "token" not in str(decode(values)["volumes"])
