"""--discovery taken apart, and what is no source."""

import pytest

from sidecar.prefill.discovery.spec import BadSpec, Spec, check_label_value, check_selector, parse_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", Spec("none")),
        ("kubernetes", Spec("kubernetes")),
        ("file:/etc/pd/endpoints", Spec("file", path="/etc/pd/endpoints")),
        ("file:a:b", Spec("file", path="a:b")),
        ("dns:prefill.llm.svc:8000", Spec("dns", host="prefill.llm.svc", port=8000)),
        ("dns:Prefill:80", Spec("dns", host="prefill", port=80)),
        ("dns:prefill.llm.svc.cluster.local.:80", Spec("dns", host="prefill.llm.svc.cluster.local.", port=80)),
    ],
)
def test_sources(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "none, kubernetes, dns:NAME:PORT or file:PATH"),
        ("consul:prefill", "none, kubernetes"),
        ("File:/x", "none, kubernetes"),
        ("kubernetes:prefill", "none, kubernetes"),
        ("file:", "names no file"),
        ("dns:prefill", "has no port"),
        ("dns::8000", "HOST:PORT"),
        ("dns:prefill:0", "port"),
        ("dns:prefill:http", "port"),
        ("dns:pre fill:80", "host name"),
        ("dns:10.0.0.1:80", "use --prefill 10.0.0.1:80"),
        ("dns:[::1]:80", "use --prefill [::1]:80"),
    ],
)
def test_mistakes(text: str, says: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parse_spec(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a=b",
        "a==b",
        "a!=b",
        "a",
        "!a",
        "a in (b,c)",
        "llm-d.ai/role in (prefill, prefill-decode)",
        "a notin (b)",
        "x.y/z=1,b in (c,d),!e",
        "a=",
        " a = b , c ",
    ],
)
def test_selectors(text: str) -> None:
    check_selector(text)


@pytest.mark.parametrize("text", ["", "a=b=c", "a in b", "a in (", "a in ()x", "a,,b", "a&b", "=b", "a>1", "A/B/c"])
def test_no_selectors(text: str) -> None:
    with pytest.raises(BadSpec):
        check_selector(text)


def test_label_values() -> None:
    for text in ("", "a", "Qwen2.5-0.5B", "a" * 63):
        check_label_value(text)
    for text in ("org/model", "-a", "a_", "a" * 64, "a b"):
        with pytest.raises(BadSpec):
            check_label_value(text)
