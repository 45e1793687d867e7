"""What is read from pods and InferencePools, and what must be there to ask for them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.prefill.address import parse
from sidecar.prefill.discovery.cluster import Cluster, NotInCluster, check_api, find_cluster
from sidecar.prefill.discovery.discovery import Member, Standing
from sidecar.prefill.discovery.kubernetes import Pod, Pool, join_selectors, members_of, pod_of, pool_of
from sidecar.prefill.discovery.spec import BadSpec
from tests.kube.api import matches
from tests.kube.objects import old_pool, pod, pool

READY, NOT_READY, TERMINATING = Standing.READY, Standing.NOT_READY, Standing.TERMINATING


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (pod("a", "10.0.0.1"), Pod("10.0.0.1", READY)),
        (pod("a", "FD00::0:1"), Pod("fd00::1", READY)),
        (pod("a", "10.0.0.1", ready=False), Pod("10.0.0.1", NOT_READY)),
        (pod("a", "10.0.0.1", terminating=True), Pod("10.0.0.1", TERMINATING)),
        (pod("a", "10.0.0.1", phase="Succeeded"), Pod("10.0.0.1", NOT_READY)),
        (pod("a", phase="Pending"), Pod("", NOT_READY)),
        ({"metadata": {"name": "a"}}, Pod("", NOT_READY)),
        ({"metadata": {"name": "a"}, "status": {"conditions": None}}, Pod("", NOT_READY)),
    ],
)
def test_pods(written: dict[str, Any], expected: Pod) -> None:
    if expected.standing is READY:
        written["status"].setdefault("phase", "Running")
    assert pod_of(raw(written)) == expected


@pytest.mark.parametrize("written", [{}, {"metadata": {}, "status": {"podIP": 5}}, pod("a", "10.0.0.256"), []])
def test_no_pods(written: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        pod_of(raw(written))


def test_pools() -> None:
    labels = {"model": "m", "app": "vllm"}
    assert pool_of(raw(pool("p", labels, 8000, 8001))) == Pool("app=vllm,model=m", (8000, 8001))
    assert pool_of(raw(old_pool("p", labels, 8000))) == Pool("app=vllm,model=m", (8000,))
    for bad in (pool("p", {}, 80), pool("p", labels), pool("p", labels, 0), old_pool("p", {"a": 1}, 80)):  # type: ignore[dict-item]
        with pytest.raises(msgspec.ValidationError):
            pool_of(raw(bad))


LABELS = {"app": "vllm"}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([], "`object`, got `array`"),
        ({}, "spec is missing; it should be an object"),
        ({"spec": None}, "spec is null; it should be"),
        ({"spec": "x"}, 'spec is "x"; it should be'),
        ({"spec": {}}, "spec.selector is missing; it should be"),
        ({"spec": {"selector": "app=vllm"}}, 'spec.selector is "app=vllm"; it should be'),
        ({"spec": {"selector": ["app"]}}, 'spec.selector is ["app"]; it should be'),
        ({"spec": {"selector": {"matchLabels": None}}}, "spec.selector.matchLabels is null; it should be"),
        ({"spec": {"selector": {"matchLabels": [1]}}}, "spec.selector.matchLabels is [1]; it should be"),
        ({"spec": {"selector": {"matchExpressions": []}}}, "spec.selector is {"),
        ({"spec": {"selector": {"app": {"a": "b" * 999}}}}, "bbb...; it should be"),
        ({"spec": {"selector": LABELS}}, "spec.targetPorts is missing; it should be"),
        ({"spec": {"selector": LABELS, "targetPorts": 8000}}, "spec.targetPorts is 8000; it should be"),
        ({"spec": {"selector": LABELS, "targetPorts": "8000"}}, 'spec.targetPorts is "8000"; it should be'),
        ({"spec": {"selector": LABELS, "targetPorts": [8000]}}, "spec.targetPorts[0] is 8000; it should be"),
        ({"spec": {"selector": LABELS, "targetPorts": {"number": 1}}}, "spec.targetPorts is {"),
        (
            {"spec": {"selector": LABELS, "targetPorts": [{"number": 1}, {"number": "2"}]}},
            'spec.targetPorts[1] is {"number":"2"}; it should be {number: PORT}',
        ),
        ({"spec": {"selector": LABELS, "targetPorts": [{"number": True}]}}, "spec.targetPorts[0] is {"),
        ({"spec": {"selector": LABELS, "targetPorts": [{"number": 65536}]}}, "spec.targetPorts[0] is {"),
        ({"spec": {"selector": LABELS, "targetPortNumber": "80"}}, 'spec.targetPortNumber is "80"; it should be'),
        ({"spec": {"selector": LABELS, "targetPortNumber": [80]}}, "spec.targetPortNumber is [80]; it should be"),
    ],
)
def test_no_pools(written: Any, said: str) -> None:
    """Which field, what it is, and what to make of it, in one line."""
    with pytest.raises(msgspec.ValidationError) as caught:
        pool_of(raw(written))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


def test_members() -> None:
    pods = {
        "a": Pod("10.0.0.1", READY),
        "b": Pod("10.0.0.2", TERMINATING),
        "pending": Pod("", NOT_READY),
        "own": Pod("10.0.0.9", READY),
    }
    assert members_of(pods, (80, 81), "own") == {
        parse("10.0.0.1:80"): Member(READY, "pod a"),
        parse("10.0.0.1:81"): Member(READY, "pod a"),
        parse("10.0.0.2:80"): Member(TERMINATING, "pod b"),
        parse("10.0.0.2:81"): Member(TERMINATING, "pod b"),
    }


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_an_address_that_is_anothers_by_now(names: tuple[str, str]) -> None:
    pods = dict(zip(names, (Pod("10.0.0.1", TERMINATING), Pod("10.0.0.1", READY)), strict=True))
    assert [member.standing for member in members_of(pods, (80,), "").values()] == [READY]
    assert [one.standing for one in members_of(dict(reversed(pods.items())), (80,), "").values()] == [READY]


def test_joined_selectors() -> None:
    assert join_selectors("a=b", "", "c in (d,e)") == "a=b,c in (d,e)"


# -- where we are --------------------------------------------------------------------------------------------


def account(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text("llm\n")
    return str(folder)


IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": "decode-0"}


def test_in_a_pod(tmp_path: Path) -> None:
    folder = account(tmp_path, "token", "ca.crt", "namespace")
    assert find_cluster("", folder, "", IN_POD) == Cluster(
        "https://10.96.0.1:443", "llm", tmp_path / "token", tmp_path / "ca.crt", "decode-0"
    )
    found = find_cluster("", folder, "other", {**IN_POD, "KUBERNETES_SERVICE_HOST": "fd00::1", "POD_NAME": "p"})
    assert (found.url, found.namespace, found.pod) == ("https://[fd00::1]:443", "other", "p")


def test_outside_a_cluster(tmp_path: Path) -> None:
    for environ, missing in (({}, "HOST"), ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "PORT")):
        with pytest.raises(NotInCluster) as caught:
            find_cluster("", str(tmp_path), "", environ)
        (mistake,) = caught.value.mistakes
        assert f"KUBERNETES_SERVICE_{missing} is not set" in mistake
    with pytest.raises(NotInCluster) as caught:
        find_cluster("", str(tmp_path), "", IN_POD)
    for missing in ("/token", "/ca.crt", "/namespace"):
        assert any(missing in mistake for mistake in caught.value.mistakes), missing
    with pytest.raises(NotInCluster) as caught:
        find_cluster("https://10.0.0.1", account(tmp_path, "token", "ca.crt"), "", {})
    assert len(caught.value.mistakes) == 1
    assert f"{tmp_path}/namespace: No such file" in str(caught.value)


def test_through_a_proxy(tmp_path: Path) -> None:
    found = find_cluster("http://127.0.0.1:8001/", str(tmp_path), "llm", {})
    assert found == Cluster("http://127.0.0.1:8001", "llm", None, None, "")


@pytest.mark.parametrize("url", ["https://10.0.0.1", "https://api.example.com:6443", "http://[::1]:8001"])
def test_urls(url: str) -> None:
    check_api(url)


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:443", "https://", "ftp://a", "http://10.0.0.1:80", "https://u:p@a", "https://a:x", "https://[::1"],
)
def test_no_urls(url: str) -> None:
    with pytest.raises(BadSpec):
        check_api(url)


# -- the fake's selectors, which the real API's are held against in tests/kube ---------------------------------


@pytest.mark.parametrize(
    ("selector", "is_picked"),
    [
        ("", True),
        ("a=1", True),
        ("a==2", False),
        ("a!=2,c!=1", True),
        ("a in (2, 1),b", True),
        ("a notin (1)", False),
        ("c notin (1)", True),
        ("!c", True),
        ("!a", False),
        ("c", False),
    ],
)
def test_matches(selector: str, is_picked: bool) -> None:
    assert matches(selector, {"a": "1", "b": "x"}) is is_picked
