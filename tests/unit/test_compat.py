"""The command line of the sidecar that this one replaces."""

import pytest

from sidecar import config
from sidecar.compat import translated
from sidecar.config import load


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-port=8000 -vllm-port=8001 -connector=nixlv2", "--port=8000 --vllm-port=8001 --kv-connector=nixlv2"),
        ("--connector nixlv2", "--kv-connector nixlv2"),
        ("--prefill-max-retries=0", "--prefill-attempts=1"),
        ("--prefill-max-retries 3", "--prefill-attempts=4"),
        ("--data-parallel-size=2 --metrics-port=9091", "--data-parallel-size=2 --metrics-port=9091"),
        ("--nixl-relay=false", "--nixl-relay=off"),
        ("--nixl-relay", "--nixl-relay=on"),
        ("--nixl-relay off", "--nixl-relay=off"),
        ("--secure-proxy=false", "--secure-serving=off"),
        ("-prefiller-use-tls -decoder-use-tls=false", "--enable-tls=prefiller"),
        ("--decoder-tls-insecure-skip-verify=true", "--tls-insecure-skip-verify=decoder"),
        ("--inference-pool-name=pool --pool-namespace=x", "--inference-pool=pool --discovery-namespace=x"),
        ("--enable-ssrf-protection", ""),
        ("--enable-ssrf-protection=true", ""),
        ("--enable-p2p-pull=false --enable-prefiller-sampling=false", ""),
        # Ours pass as they are.
        ("--disagg on --prefill a:1 --prefill b:2", "--disagg on --prefill a:1 --prefill b:2"),
        ("--prefill-allow -1", "--prefill-allow -1"),
        ("stray", "stray"),
    ],
)
def test_in_our_terms(theirs: str, ours: str) -> None:
    assert translated(theirs.split()) == (ours.split(), [])


@pytest.mark.parametrize(
    "theirs",
    [
        *("--zap-log-level=debug", "-v=5", "-v 5", "--v 5", "--max-idle-conns-per-host=100"),
        *("--prefill-retry-backoff 50ms", "--mooncake-bootstrap-port=8998", "--p2p-connector-port 7777"),
        *("--enable-p2p-pull", "--enable-prefiller-sampling=true", "--enable-ssrf-protection=false"),
    ],
)
def test_what_means_nothing_here_is_said_in_one_line(theirs: str) -> None:
    flags, notes = translated([*theirs.split(), "--port", "9000"])
    assert flags == ["--port", "9000"]
    (note,) = notes
    assert theirs.lstrip("-").partition("=")[0].partition(" ")[0] in note
    assert "means nothing here" in note
    assert "\n" not in note


@pytest.mark.parametrize(
    "theirs", ["--prefill-max-retries=many", "--prefill-max-retries", "--nixl-relay=maybe", "-nonsense=1", "--x"]
)
def test_mistakes_are_still_mistakes(theirs: str) -> None:
    with pytest.raises(config.BadSettings) as caught:
        load(translated([theirs])[0], {})
    assert len(caught.value.mistakes) == 1


def test_every_setting_can_be_said_as_go_would(capsys: pytest.CaptureFixture[str]) -> None:
    for field in config.FIELDS:
        if set(field.choices) != {"on", "off"}:
            continue
        name = field.name.replace("-", "_")
        for text, meant in (("true", "on"), ("FALSE", "off"), ("1", "on"), ("off", "off")):
            assert getattr(load(translated([f"-{field.name}={text}"])[0], {})[0], name) == meant
