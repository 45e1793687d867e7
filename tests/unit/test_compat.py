"""The command line of the sidecar that this one replaces."""

from pathlib import Path

import pytest

from sidecar import config
from sidecar.compat import RENAMED, SAME, markdown, translated
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
        (
            "--inference-pool-name=pool --pool-namespace=x",
            "--inference-pool=pool --discovery=kubernetes --discovery-namespace=x",
        ),
        (
            "--inference-pool=ns/pool",
            "--inference-pool=pool --discovery-namespace=ns --discovery=kubernetes",
        ),
        ("--inference-pool pool --discovery kubernetes", "--inference-pool=pool --discovery kubernetes"),
        ("--enable-prefiller-sampling", "--enable-prefiller-sampling=on"),
        ("--enable-prefiller-sampling=false", "--enable-prefiller-sampling=off"),
        ("--enable-tls=prefiller,decoder", "--enable-tls=prefiller,decoder"),
        ("--tls-insecure-skip-verify prefiller", "--tls-insecure-skip-verify=prefiller"),
        ("--metrics-port 9091", "--metrics-port=9091"),
        ("--enable-ssrf-protection", ""),
        ("--enable-ssrf-protection=true", ""),
        ("--enable-p2p-pull=false --enable-speculative-prefill=false", "--enable-p2p-pull=off"),
        ("--mooncake-bootstrap-port=8999", "--mooncake-bootstrap-port=8999"),
        ("--enable-p2p-pull --p2p-connector-port=7777", "--enable-p2p-pull=on --p2p-connector-port=7777"),
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
        "--prefill-retry-backoff 50ms",
        *("--enable-speculative-prefill=true", "--enable-ssrf-protection=false"),
        *("--ec-connector=ec-nixl", "--tls-min-version VersionTLS13", "--tls-cipher-suites=X,Y"),
        *("--metrics-cert-dir=/x", "--metrics-port=0", "--metrics-port 0", "--enable-tls=encoder"),
        *("--moriio-write-mode", "--moriio-tp-size=2", "--moriio-remote-hosts a,b", "--decode-chunk-size=64"),
    ],
)
def test_what_means_nothing_here_is_said_in_one_line(theirs: str) -> None:
    flags, notes = translated([*theirs.split(), "--port", "9000"])
    assert flags == ["--port", "9000"]
    (note,) = notes
    assert theirs.lstrip("-").partition("=")[0].partition(" ")[0] in note
    assert "means nothing here" in note
    assert "\n" not in note


def test_an_encoder_beside_others() -> None:
    flags, notes = translated(["--enable-tls=prefiller,encoder"])
    assert flags == ["--enable-tls=prefiller"]
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("variables", "given", "meant"),
    [
        ({"ENABLE_PREFILLER_SAMPLING": "true"}, "", "--enable-prefiller-sampling=on"),
        ({"ENABLE_PREFILLER_SAMPLING": "1"}, "--enable-prefiller-sampling=off", "--enable-prefiller-sampling=off"),
        (
            {"INFERENCE_POOL": "ns/pool"},
            "--enable-ssrf-protection",
            "--inference-pool=pool --discovery-namespace=ns --discovery=kubernetes",
        ),
        ({"INFERENCE_POOL": "ns/pool"}, "", ""),  # without their protection the pool was never looked at
        ({"INFERENCE_POOL": ""}, "--enable-ssrf-protection", ""),
        ({"POD_IP": "10.0.0.1", "PORT": "1"}, "", ""),
    ],
)
def test_variables_of_theirs(variables: dict[str, str], given: str, meant: str) -> None:
    assert translated(given.split(), variables) == (meant.split(), [])


def test_ports_of_theirs_by_variables() -> None:
    flags, notes = translated([], {"MOONCAKE_BOOTSTRAP_PORT": "8998", "P2P_CONNECTOR_PORT": "7778"})
    assert notes == []
    settings, _ = load(flags, {})
    assert (settings.mooncake_bootstrap_port, settings.p2p_connector_port) == (8998, 7778)


def test_configuration_in_yaml(tmp_path: Path) -> None:
    text = "{port: 8085, vllm-port: 8203, secure-proxy: false, enable-tls: [prefiller, decoder]}"
    (tmp_path / "sidecar.yaml").write_text(text)
    for given in (
        [f"--configuration={text}"],
        ["--configuration", text],
        [f"--configuration-file={tmp_path / 'sidecar.yaml'}"],
    ):
        flags, notes = translated([*given, "--port=9000"], {})
        settings, _ = load(flags, {})
        assert notes == []
        assert settings.port == 9000, "flags come before it"
        assert settings.model_server_port == 8203
        assert settings.enable_tls == ["prefiller", "decoder"]


@pytest.mark.parametrize(
    "theirs",
    [
        "--configuration={port: 8085, nonsense: 1}",
        "--configuration=[",
        "--configuration-file=/nonexistent",
        "--configuration=x",
    ],
)
def test_configuration_that_cannot_be_meant(theirs: str) -> None:
    with pytest.raises(config.BadSettings) as caught:
        load(translated([theirs], {})[0], {})
    assert len(caught.value.mistakes) == 1


def test_what_is_said_to_be_the_same_is() -> None:
    ours = {field.name for field in config.FIELDS}
    assert {config.ALIASES.get(name, name) for name in SAME} <= ours


def test_the_table_names_every_flag() -> None:
    table = markdown()
    for name in (*SAME, *RENAMED, "prefill-max-retries", "inference-pool", "configuration", "prefiller-use-tls"):
        assert table.count(f"\n| `--{name}` |") == 1, name
    for name in ("enable-speculative-prefill", "ec-connector", "max-idle-conns-per-host"):
        assert f"| `--{name}` | a warning: " in table


@pytest.mark.parametrize(
    "theirs",
    [
        "--enable-tls",
        "--inference-pool",
        "--prefill-max-retries=many",
        "--prefill-max-retries",
        "--nixl-relay=maybe",
        "-nonsense=1",
        "--x",
    ],
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
