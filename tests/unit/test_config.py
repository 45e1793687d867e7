"""Settings: who wins, what is a mistake, and that every description of them is made from one list."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import sidecar
from sidecar import config
from sidecar.config import ALIASES, FIELDS, BadSettings, Field, load
from sidecar.settings import Settings

DEFAULTS = load([], {})[0]
README = Path(sidecar.__file__).parent.parent / "README.md"

# Ports first: they must not meet those of other settings.
POOL = (
    *("20001", "20002", "4096", "8192", "2", "3", "2.5", "3.5", "on", "off", "fail", "recompute", "json", "text"),
    *("debug", "error", "cost", "static", "none", "nixlv2", "prefiller", "decoder", "0.5", "0.25"),
    *("http://127.0.0.1:4318", "https://collector.example/otlp"),
    *("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.1", "/run/engine.sock"),
    *("file:/run/endpoints", "dns:prefill:8000", "https://10.0.0.1", "https://10.0.0.2:6443"),
    *("inference.networking.k8s.io", "inference.networking.x-k8s.io"),
)

KUBERNETES = ["--discovery=kubernetes", "--kubernetes-api=http://127.0.0.1:8001", "--discovery-namespace=llm"]
BESIDE = {"inference-pool": KUBERNETES, "discovery-model": KUBERNETES}
"""What some settings are of no use without."""


def value(settings: Settings, field: Field) -> Any:
    return getattr(settings, field.name.replace("-", "_"))


def mistakes(argv: list[str] | None = None, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(BadSettings) as caught:
        load(argv or [], environ or {})
    assert caught.value.mistakes
    for mistake in caught.value.mistakes:
        assert "\n" not in mistake
        assert "Traceback" not in mistake
    return caught.value.mistakes


def two_values(field: Field) -> tuple[str, str]:
    """Two texts that mean different things to this setting, the first of them not the default."""
    found: dict[Any, str] = {}
    beside = BESIDE.get(field.name, [])
    for text in POOL:
        try:
            settings, _ = load([*beside, f"--{field.name}", text], {})
        except BadSettings:
            continue
        meant = value(settings, field)
        found.setdefault(tuple(meant) if isinstance(meant, list) else meant, text)
    default = value(DEFAULTS, field)
    texts = sorted(
        found.values(), key=lambda text: value(load([*beside, f"--{field.name}", text], {})[0], field) == default
    )
    assert len(texts) >= 2, f"no two values are known for --{field.name}: add some to POOL"
    return texts[0], texts[1]


def file_with(folder: Path, content: str | bytes) -> Path:
    path = folder / "sidecar.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# -- precedence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_flag_over_environment_over_file_over_default(field: Field, tmp_path: Path) -> None:
    one, other = two_values(field)
    beside = BESIDE.get(field.name, [])
    first, second = (value(load([*beside, f"--{field.name}", text], {})[0], field) for text in (one, other))
    assert first != second
    path = file_with(tmp_path, yaml.safe_dump({field.name: first}))
    file = ["--config", str(path)]

    def read(argv: list[str], environ: dict[str, str]) -> Any:
        return value(load([*beside, *argv], environ)[0], field)

    assert read([], {}) == field.default
    assert read(file, {}) == first
    assert read([], {field.env: one}) == first
    assert read(file, {field.env: other}) == second
    assert read([*file, f"--{field.name}", other], {}) == second
    assert read([f"--{field.name}", one], {field.env: other}) == first
    assert read([*file, f"--{field.name}={other}"], {field.env: one}) == second
    assert read([], {"PD_SIDECAR_CONFIG": str(path)}) == first


def test_path_of_the_file_is_told(tmp_path: Path) -> None:
    path = file_with(tmp_path, "port: 8001")
    assert load(["--config", str(path)], {})[1] == path
    assert load([], {"PD_SIDECAR_CONFIG": str(path)})[1] == path
    assert load([], {})[1] is None
    assert load([], {"PD_SIDECAR_CONFIG": ""})[1] is None
    other = tmp_path / "other.yaml"
    other.write_text("port: 8002")
    settings, used = load(["--config", str(other)], {"PD_SIDECAR_CONFIG": str(path)})
    assert (settings.port, used) == (8002, other)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--disagg", "yes"], "off, on, auto"),
        (["--enable-tls", "prefill"], "prefiller, decoder"),
        (["--drain-timeout", "60s"], "seconds"),
        (["--prefil", "a:1"], "did you mean 'prefill'"),
    ],
)
def test_mistakes_name_what_is_possible(argv: list[str], hint: str) -> None:
    (mistake,) = mistakes(argv)
    assert hint in mistake


def test_alias_everywhere(tmp_path: Path) -> None:
    assert load(["--vllm-port", "1"], {})[0].model_server_port == 1
    assert load([], {"PD_SIDECAR_VLLM_PORT": "2"})[0].model_server_port == 2
    assert load(["--config", str(file_with(tmp_path, "vllm-port: 3"))], {})[0].model_server_port == 3
    assert set(ALIASES.values()) <= {field.name for field in FIELDS}


def test_last_of_a_repeated_flag_counts_and_lists_grow() -> None:
    settings, _ = load(["--port", "1", "--port", "2", "--prefill", "a:1", "--prefill", "b:2"], {})
    assert settings.port == 2
    assert settings.prefill == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [("a:1", ["a:1"]), ("a:1,b:2", ["a:1", "b:2"]), (" a:1 ,\n b:2 ", ["a:1", "b:2"]), ("", [])],
)
def test_lists_in_the_environment(text: str, entries: list[str]) -> None:
    assert load([], {"PD_SIDECAR_PREFILL": text})[0].prefill == entries


def test_list_of_a_flag_replaces_that_of_the_environment() -> None:
    assert load(["--prefill", "a:1"], {"PD_SIDECAR_PREFILL": "b:2,c:3"})[0].prefill == ["a:1"]


# -- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        *[(f"disagg: {word}", "on") for word in ("on", "On", "true", "yes", "'on'", '"on"')],
        *[(f"disagg: {word}", "off") for word in ("off", "OFF", "false", "no", "'off'")],
        *[(f"disagg: {word}", "auto") for word in ("auto", "'auto'")],
    ],
)
def test_on_and_off_are_words(tmp_path: Path, text: str, mode: str) -> None:
    """YAML 1.1 takes them for truth values."""
    assert load(["--config", str(file_with(tmp_path, text))], {})[0].disagg == mode


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "{}", "---\n...\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    assert load(["--config", str(file_with(tmp_path, content))], {})[0] == DEFAULTS


def test_json_is_yaml(tmp_path: Path) -> None:
    path = file_with(tmp_path, json.dumps({"port": 8001, "prefill": ["a:1"], "pull-timeout": 2.5}))
    settings = load(["--config", str(path)], {})[0]
    assert (settings.port, settings.prefill, settings.pull_timeout) == (8001, ["a:1"], 2.5)


BAD_FILES = {
    "no mapping": ("- port: 1", "KEY: VALUE"),
    "a word": ("port", "KEY: VALUE"),
    "unknown key": ("prot: 1", "'prot'"),
    "underscore": ("kv_connector: none", "did you mean 'kv-connector'"),
    "number as key": ("1: 2", "'1'"),
    "unclosed": ("port: [1", "line"),
    "tab": ("port:\n\t1", "line"),
    "two colons": ("a: b: c", "line 1"),
    "unhashable": ("{[1]: 2}", "YAML"),
    "python": ("port: !!python/object/apply:os.getpid []", "YAML"),
    "alias": ("port: *a", "YAML"),
    "date": ("kv-lease: 2024-99-99", "YAML"),
    "tagged": ('port: !!int "x"', "YAML"),
    "tagged float": ("kv-lease: !!float x", "YAML"),
    "control": ("port: \x00", "YAML"),
    "no utf-8": (b"port: \xff", "utf-8"),
    "string": ("port: eight", "'eight'"),
    "null": ("port:", "None"),
    "truth": ("port: true", "True"),
    "list": ("port: [1]", "[1]"),
    "no list": ("prefill: 10.0.0.1:8000", "'10.0.0.1:8000'"),
    "wrong entry": ("prefill: [1]", "[1]"),
    "day": ("host: 2024-01-01", "host"),
    "deep": ("prefill: " + "[" * 1500 + "]" * 1500, "file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_mistakes_of_the_file(tmp_path: Path, name: str) -> None:
    content, hint = BAD_FILES[name]
    path = file_with(tmp_path, content)
    found = mistakes(["--config", str(path)])
    assert len(found) == 1
    assert found[0].startswith(f"file {path}")
    assert hint in found[0]


def test_no_file(tmp_path: Path) -> None:
    assert mistakes(["--config", str(tmp_path / "none.yaml")]) == [
        f"file {tmp_path / 'none.yaml'}: No such file or directory"
    ]
    assert "directory" in mistakes(["--config", str(tmp_path)])[0]


# -- the environment -------------------------------------------------------------------------------------------

SERVICE_LINKS = {
    "PD_SIDECAR_SERVICE_HOST": "10.96.0.1",
    "PD_SIDECAR_SERVICE_PORT": "8000",
    "PD_SIDECAR_SERVICE_PORT_HTTP": "8000",
    "PD_SIDECAR_PORT": "tcp://10.96.0.1:8000",
    "PD_SIDECAR_PORT_8000_TCP": "tcp://10.96.0.1:8000",
    "PD_SIDECAR_PORT_8000_TCP_PROTO": "tcp",
    "PD_SIDECAR_PORT_8000_TCP_PORT": "8000",
    "PD_SIDECAR_PORT_8000_TCP_ADDR": "10.96.0.1",
    "PD_SIDECAR_PORT_53_UDP": "udp://10.96.0.1:53",
    "PD_SIDECAR_METRICS_PORT": "tcp://10.96.0.2:9090",
    "PD_SIDECAR_METRICS_SERVICE_HOST": "10.96.0.2",
    "PD_SIDECAR_METRICS_SERVICE_PORT": "9090",
    "PD_SIDECAR_METRICS_PORT_9090_TCP_ADDR": "10.96.0.2",
    "PD_SIDECAR_OTHER_PORT": "tcp://10.96.0.3:1",
    "PD_SIDECAR_MODEL_SERVER_PORT": "sctp://10.96.0.3:1",
}


def test_kubernetes_service_links_are_not_meant_for_us() -> None:
    """A Service of the name pd-sidecar brings all of them into every container of its namespace."""
    assert load([], SERVICE_LINKS)[0] == DEFAULTS
    for name, text in SERVICE_LINKS.items():
        assert load([], {name: text})[0] == DEFAULTS


def test_ports_in_the_environment_are_read_all_the_same() -> None:
    environ = {"PD_SIDECAR_PORT": "8001", "PD_SIDECAR_METRICS_PORT": "9091", "PD_SIDECAR_MODEL_SERVER_PORT": "8201"}
    settings = load([], {**SERVICE_LINKS, **environ})[0]
    assert (settings.port, settings.metrics_port, settings.model_server_port) == (8001, 9091, 8201)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("PD_SIDECAR_PROT", "1", "did you mean 'PD_SIDECAR_PORT'"),
        ("PD_SIDECAR_METRIC_PORT", "9091", "did you mean 'PD_SIDECAR_METRICS_PORT'"),
        ("PD_SIDECAR_PORT", "", "''"),
        ("PD_SIDECAR_PORT", "http://x", "'http://x'"),
        ("PD_SIDECAR_DISAGG", "ON", "'ON'"),
        ("PD_SIDECAR_PREFILL", "a", "HOST:PORT"),
        ("PD_SIDECAR_", "1", "unknown"),
        ("PD_SIDECAR_zzz", "1", "unknown"),
    ],
)
def test_mistakes_of_the_environment(name: str, text: str, hint: str) -> None:
    found = mistakes([], {name: text})
    assert len(found) == 1
    assert found[0].startswith(f"environment {name}: ")
    assert hint in found[0]


def test_other_variables_are_none_of_our_business() -> None:
    assert load([], {"PATH": "/bin", "PORT": "1", "pd_sidecar_port": "2", "XPD_SIDECAR_PORT": "3"})[0] == DEFAULTS


# -- flags -----------------------------------------------------------------------------------------------------

BAD_FLAGS: list[tuple[list[str], str]] = [
    (["--prot", "1"], "--prot"),
    (["--por", "1"], "--por"),
    (["8000"], "8000"),
    (["--port"], "--port"),
    (["--port", ""], "''"),
    *[(["--port", text], repr(text)) for text in ("0", "65536", "-0", "x", "1.5", "1e999", "0x10", "1_000", " 1")],
    (["--port=-1"], "'-1'"),
    *[(["--pull-timeout", text], repr(text)) for text in ("0", "nan", "inf", "Infinity", "1e5", "1s", "")],
    *[([f"--{f.name}", "nan"], "'nan'") for f in FIELDS if isinstance(f.default, float)],
    *[([f"--{f.name}", "inf"], "'inf'") for f in FIELDS if isinstance(f.default, float)],
    *[([f"--{f.name}=-inf"], "'-inf'") for f in FIELDS if isinstance(f.default, float)],
    *[([f"--{f.name}=-1"], "'-1'") for f in FIELDS if isinstance(f.default, int | float)],
    *[([f"--{f.name}", "maybe"], "'maybe'") for f in FIELDS if f.choices],
    (["--kv-lease", "1"], "'1'"),
    (["--data-parallel-size", "0"], "'0'"),
    (["--data-parallel-size", "257"], "'257'"),
    (["--prefill-attempts", "0"], "'0'"),
    (["--max-body-bytes", "1023"], "'1023'"),
    (["--kv-connector", "nixl"], "nixlv2"),
    (["--prefill", "localhost"], "HOST:PORT"),
    (["--prefill", "a:1", "--prefill", "127.1:80"], "127.1"),
    (["--prefill-allow", "10.0.0.1/8"], "10.0.0.1/8"),
    (["--prefill-allow", "all"], "all"),
    (["--local-side-channel", "nonsense"], "HOST:PORT"),
    # What only together is impossible
    (["--metrics-port", "8000"], "--metrics-port 8000"),
    (["--data-parallel-size", "2", "--metrics-port", "8001"], "--metrics-port 8001"),
    (["--model-server-port", "8000"], "call itself"),
    (["--data-parallel-size", "256", "--metrics-port", "1"], "call itself"),
    (["--model-server-host", "::1", "--vllm-port", "8000"], "call itself"),
    (["--port", "65535", "--data-parallel-size", "2"], "beyond 65535"),
    (["--model-server-port", "65535", "--data-parallel-size", "2"], "beyond 65535"),
    (["--model-server-uds", "/run/x", "--data-parallel-size", "2"], "--model-server-uds"),
]


@pytest.mark.parametrize(
    ("argv", "hint"), BAD_FLAGS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistakes_of_flags(argv: list[str], hint: str) -> None:
    found = mistakes(argv)
    assert len(found) == 1
    assert hint in found[0]


def test_each_mistake_has_a_line(tmp_path: Path) -> None:
    path = file_with(tmp_path, "prot: 1\nport: x\nkv-lease: 0\n")
    found = mistakes(
        ["--config", str(path), "--disagg", "maybe", "--prefill", "a", "--prefill", "b"],
        {"PD_SIDECAR_LOG_LEVEL": "loud", "PD_SIDECAR_NONSENSE": "1"},
    )
    assert len(found) == 8
    assert len({line for line in found if "file" in line}) == 3


def test_mistake_that_is_overruled_is_none(tmp_path: Path) -> None:
    """A flag replaces what the file says, so that is never looked at."""
    path = file_with(tmp_path, "port: x")
    assert load(["--config", str(path), "--port", "1"], {})[0].port == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "8200", "--model-server-host", "10.0.0.5"],
        ["--port", "8200", "--model-server-uds", "/run/x"],
        ["--min-remote-tokens", "0"],
        ["--recompute-max-concurrent", "0", "--recompute-max-tokens", "0"],
        ["--drain-timeout", "0"],
        ["--pull-timeout", "0.001"],
        ["--kv-lease", "1.001"],
        ["--kv-lease", "1e1"],
        ["--prefill", "[fd00::1]:8000", "--prefill-allow", "any", "--prefill-allow", "fd00::/8"],
        ["--local-side-channel", "[::1]:5600"],
        ["--host", "::"],
    ],
    ids=" ".join,
)
def test_edges_that_are_allowed(argv: list[str]) -> None:
    load(argv, {})


# -- what follows from settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease_s", "age_s"), [(30, 25), (15, 10), (6, 4), (3, 2), (600, 595)])
def test_handoffs_are_dropped_before_their_lease_ends(lease_s: int, age_s: float) -> None:
    settings = load(["--kv-lease", str(lease_s)], {})[0]
    assert settings.handoff_max_age == pytest.approx(age_s)


# -- descriptions ----------------------------------------------------------------------------------------------

CONTRACT = {
    "port": 8000,
    "model-server-port": 8200,
    "model-server-host": "127.0.0.1",
    "model-server-uds": "",
    "data-parallel-size": 1,
    "metrics-port": 9090,
    "disagg": "auto",
    "kv-connector": "nixlv2",
    "prefill": [],
    "prefill-allow": [],
    "min-remote-tokens": 256,
    "on-prefill-failure": "recompute",
    "recompute-max-concurrent": 4,
    "recompute-max-tokens": 0,
    "prefill-attempts": 2,
    "prefill-connect-timeout": 1.0,
    "prefill-timeout": 120.0,
    "pull-timeout": 10.0,
    "nixl-relay": "on",
    "max-body-bytes": 67108864,
    "drain-timeout": 60.0,
}
"""Names and defaults that deployments depend on."""


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str) -> None:
    field = next(field for field in FIELDS if field.name == name)
    assert field.default == CONTRACT[name]
    assert type(field.default) is type(CONTRACT[name])


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_fields_are_described(field: Field) -> None:
    assert field.description
    assert "\n" not in field.description
    assert "|" not in field.description, "it would break the table"
    assert field.env == "PD_SIDECAR_" + field.name.replace("-", "_").upper()
    assert value(DEFAULTS, field) == field.default
    assert not config._SERVICE_LINK.fullmatch(field.env), "Kubernetes would hide it"


def test_readme_holds_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    table = text.partition("<!-- flags -->\n")[2].partition("<!-- /flags -->")[0]
    assert table == config.markdown(), "run `make docs`"


def test_schema_knows_every_setting() -> None:
    schema = config.json_schema()
    definition = schema["$defs"]["Settings"]
    assert set(definition["properties"]) == {field.name for field in FIELDS}
    assert definition["additionalProperties"] is False
    assert definition["properties"]["port"]["maximum"] == 65535


def test_effective_settings_read_back(tmp_path: Path) -> None:
    settings = load(["--prefill", "a:1", "--pull-timeout", "2.5", "--disagg", "off"], {})[0]
    path = file_with(tmp_path, yaml.safe_dump(config.shown(settings)))
    assert load(["--config", str(path)], {})[0] == settings


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setattr(config, "SECRET", re.compile("^(log-level|host|port)$"))
    shown = config.shown(DEFAULTS)
    assert shown["log-level"] == "<hidden>"
    assert shown["host"] == "", "nothing is there to hide"
    assert "hunter2" not in mistakes(["--port", "hunter2"])[0]


@pytest.mark.parametrize("name", ["api-token", "client-secret", "password", "engine-api-key"])
def test_names_of_secrets(name: str) -> None:
    assert config.SECRET.search(name)
    assert not [field.name for field in FIELDS if config.SECRET.search(field.name)]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        DEFAULTS.port = 1  # type: ignore[misc]
    assert msgspec.structs.replace(DEFAULTS, port=1).port == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--discovery", "consul:x"], "'consul:x' is not none, kubernetes, dns:NAME:PORT or file:PATH"),
        (["--discovery", "dns:prefill"], "has no port"),
        (["--discovery", "file:"], "names no file"),
        (["--discovery-dns-server", "ns.example.com:53"], "the DNS server's IP address is needed"),
        (["--discovery-dns-server", "10.0.0.10"], "HOST:PORT"),
    ],
)
def test_mistakes_about_discovery(argv: list[str], says: str) -> None:
    (mistake,) = mistakes(argv)
    assert mistake.startswith(f"flag {argv[0]}: ")
    assert says in mistake


def test_kubernetes_outside_a_cluster() -> None:
    (said,) = mistakes(["--discovery", "kubernetes"])
    assert said.startswith("--discovery kubernetes: KUBERNETES_SERVICE_HOST is not set")


def test_kubernetes_without_an_account(tmp_path: Path) -> None:
    """Every thing that is missing, by name."""
    flags = ["--discovery", "kubernetes", "--kubernetes-account", str(tmp_path)]
    said = mistakes([*flags, "--kubernetes-api", "https://10.96.0.1"])
    assert all(mistake.startswith("--discovery kubernetes: ") for mistake in said)
    for missing in ("token", "ca.crt", "namespace"):
        assert any(f"{tmp_path}/{missing}: No such file" in mistake for mistake in said), missing


def test_kubernetes_in_a_cluster(tmp_path: Path) -> None:
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text("llm")
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    settings, _ = load(["--discovery", "kubernetes", "--kubernetes-account", str(tmp_path)], environ)
    assert settings.discovery_selector == "llm-d.ai/role in (prefill,prefill-decode)"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--inference-pool", "p"], "--inference-pool is of use with --discovery kubernetes only"),
        (["--discovery-model", "m"], "--discovery-model is of use with --discovery kubernetes only"),
        ([*KUBERNETES, "--discovery-selector="], "every pod of the namespace"),
        ([*KUBERNETES, "--discovery-selector", "a in b"], "is no label requirement"),
        ([*KUBERNETES, "--discovery-model", "org/model"], "is no label value"),
        ([*KUBERNETES, "--inference-pool", "a/b"], "is no name of a Kubernetes object"),
        ([*KUBERNETES, "--pool-group", "example.com"], "is not possible"),
        (["--kubernetes-api", "http://10.0.0.1"], "without TLS only on this machine"),
    ],
)
def test_mistakes_about_kubernetes(argv: list[str], says: str) -> None:
    (mistake,) = mistakes(argv)
    assert says in mistake


@pytest.mark.parametrize("connector", ["none", "lmcache", "mooncake", "nixlv2", "offloading"])
@pytest.mark.parametrize("flag", ["--enable-p2p-pull", "--prefill-from-decode"])
def test_p2p_with_engines_that_have_no_p2p_tier(connector: str, flag: str) -> None:
    settings, _ = load(["--kv-connector", connector, "--prefill", "10.0.0.5:8000", flag, "on"], {})
    said = config.doubts(settings)
    assert said == (
        [f"{flag} on: engines with --kv-connector {connector} have no P2P tier"]
        if connector in ("none", "lmcache", "mooncake")
        else []
    )


def test_workers_follow_no_kv_events() -> None:
    (mistake,) = mistakes(["--workers", "2", "--kv-events", "on"])
    assert "--workers 2 and --kv-events on exclude each other" in mistake
    assert load(["--workers", "1", "--kv-events", "on"], {})[0].workers == 1


@pytest.mark.parametrize("count", ["0", "65", "two"])
def test_impossible_workers(count: str) -> None:
    assert mistakes(["--workers", count])


def test_workers_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    (mistake,) = mistakes(["--workers", "2"])
    assert "only Linux" in mistake
