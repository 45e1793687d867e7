"""Settings: flags over environment over file over defaults, typed, checked, and described once.

`Settings` is the only list of flags: the command line, the environment, the file, the JSON schema, `/config` and
the README's table are made from it. Knows what a setting means, not what is done with it.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from sidecar.connectors import CONNECTORS
from sidecar.prefill.address import AllowList, BadAddress, canonical_host, parse
from sidecar.prefill.discovery.cluster import ACCOUNT, check_api, misplaced
from sidecar.prefill.discovery.spec import BadSpec, check_label_value, check_name, check_selector, parse_spec

ENV_PREFIX = "PD_SIDECAR_"


def _m(description: str, **bounds: Any) -> Meta:
    return Meta(description=description, **bounds)


ROLE_SELECTOR = "llm-d.ai/role in (prefill,prefill-decode)"

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Settings(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """What `serve` is told. Times are seconds, sizes bytes."""

    host: Annotated[str, _m("address to listen on; empty: every one, IPv4 and IPv6")] = ""
    port: Annotated[int, _m("where clients come in; rank r listens on port + r", ge=1, le=65535)] = 8000
    model_server_host: Annotated[str, _m("host of the local decode engine", min_length=1)] = "127.0.0.1"
    model_server_port: Annotated[
        int, _m("port of the local decode engine; rank r on port + r (alias --vllm-port)", ge=1, le=65535)
    ] = 8200
    model_server_uds: Annotated[str, _m("Unix socket of the local decode engine, in place of host and port")] = ""
    data_parallel_size: Annotated[int, _m("local decode ranks", ge=1, le=256)] = 1
    metrics_host: Annotated[str, _m("address of the admin port; empty: every one")] = ""
    metrics_port: Annotated[
        int,
        _m("admin port: /metrics /livez /readyz /startupz /config /decisions /endpoints /disagg", ge=1, le=65535),
    ] = 9090
    admin_token_file: Annotated[
        str,
        _m(
            "file with the bearer key for /config, /decisions, /endpoints and /disagg from outside the pod; "
            "empty: from within it only"
        ),
    ] = ""
    disagg: Annotated[
        Literal["off", "on", "auto"],
        _m("off: pass through; on: remote whenever possible; auto: the decision rules choose. Hot-reloaded"),
    ] = "auto"
    kv_connector: Annotated[
        str,
        _m(
            "how the engines move KV: nixlv2 (pull), nixl-push, offloading (P2P tier), mooncake, "
            "a store of both (shared-storage, lmcache) or none"
        ),
    ] = "nixlv2"
    prefill: Annotated[list[str], _m("static prefill endpoint HOST:PORT (repeatable)")] = []
    prefill_allow: Annotated[
        list[str],
        _m("targets that x-prefiller-host-port may name besides: CIDR, HOST:PORT or any (repeatable)"),
    ] = []
    enable_prefiller_sampling: Annotated[
        Literal["on", "off"],
        _m(
            "of several targets in x-prefiller-host-port any may be tried first; off: they are tried in their order"
        ),
    ] = "off"
    secure_serving: Annotated[
        Literal["on", "off"],
        _m("TLS on the serving port, 1.2 at least (alias --secure-proxy)"),
    ] = "off"
    cert_path: Annotated[
        str, _m("folder with tls.crt and tls.key of the serving port; taken over when they change")
    ] = ""
    client_ca: Annotated[
        str, _m("PEM file of authorities: clients of the serving port need a certificate of one of them")
    ] = ""
    enable_tls: Annotated[
        list[Literal["prefiller", "decoder"]],
        _m("TLS towards prefill engines, the decode engine, or both (repeatable)"),
    ] = []
    tls_insecure_skip_verify: Annotated[
        list[Literal["prefiller", "decoder"]],
        _m("take any certificate from prefill engines or the decode engine (repeatable)"),
    ] = []
    tls_ca: Annotated[
        str, _m("PEM file of authorities for the engines' certificates; empty: those of the system")
    ] = ""
    tls_client_cert: Annotated[
        str,
        _m("folder with tls.crt and tls.key for engines that ask for a certificate; taken over when they change"),
    ] = ""
    probe_token_file: Annotated[
        str, _m("file with the bearer key for probes of engines and warm-up; taken over when it changes")
    ] = ""
    discovery: Annotated[
        str,
        _m(
            "where prefill endpoints are found besides: kubernetes, dns:NAME:PORT (headless Service), "
            "file:PATH (HOST:PORT a line, or a YAML list; read again when it changes) or none"
        ),
    ] = "none"
    discovery_dns_server: Annotated[
        list[str],
        _m("IP:PORT of a DNS server that dns: asks in place of those of /etc/resolv.conf (repeatable)"),
    ] = []
    discovery_selector: Annotated[str, _m("kubernetes: labels of the pods that prefill")] = ROLE_SELECTOR
    discovery_model: Annotated[
        str, _m("kubernetes: value of their label llm-d.ai/model; empty: whatever it is")
    ] = ""
    discovery_port: Annotated[
        int, _m("kubernetes: port of these pods' engines, where no InferencePool says it", ge=1, le=65535)
    ] = 8000
    discovery_namespace: Annotated[str, _m("kubernetes: namespace of the pods; empty: the service account's")] = ""
    inference_pool: Annotated[
        str,
        _m("kubernetes: InferencePool whose pods, of those with these labels, are used at its targetPorts"),
    ] = ""
    pool_group: Annotated[
        Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"],
        _m("kubernetes: API group of the InferencePool (v1, or v1alpha2 before it)"),
    ] = "inference.networking.k8s.io"
    kubernetes_api: Annotated[
        str, _m("URL of the API server; empty: that of the cluster. Without TLS (kubectl proxy) on loopback only")
    ] = ""
    kubernetes_account: Annotated[
        str, _m("folder of the service account: token, ca.crt, namespace", min_length=1)
    ] = ACCOUNT
    split_remote_media: Annotated[
        Literal["on", "off"],
        _m("prompts with media behind URLs may go remote: both engines fetch them, so they must never change"),
    ] = "off"
    min_remote_tokens: Annotated[
        int, _m("auto: prompts of fewer tokens stay local; 0: every prompt may go remote", ge=0)
    ] = 256
    decision_rule: Annotated[
        Literal["cost", "static"],
        _m("auto, from --min-remote-tokens on: cost compares what both ways are learnt to take; static: remote"),
    ] = "cost"
    stall_weight: Annotated[
        float,
        _m("how much a second that running streams lose counts against one that a prompt waits", ge=0, le=1000),
    ] = 30.0
    kv_events: Annotated[
        Literal["on", "off"],
        _m("listen for the decode engine's KV events (its --kv-events-config), to know which prefixes it holds"),
    ] = "off"
    kv_events_port: Annotated[
        int, _m("loopback port that the decode engine publishes to; rank r to port + r", ge=1, le=65535)
    ] = 5557
    kv_events_replay_port: Annotated[
        int, _m("port of the decode engine's replay endpoint, rank r on port + r; 0: none", ge=0, le=65535)
    ] = 0
    on_prefill_failure: Annotated[
        Literal["recompute", "fail"], _m("what follows a failed remote prefill: local recompute, or an error")
    ] = "recompute"
    recompute_max_concurrent: Annotated[
        int, _m("failed prefills recomputed locally at once; beyond it 503 with Retry-After", ge=0)
    ] = 4
    recompute_max_tokens: Annotated[int, _m("their prompt tokens at once; 0: no limit", ge=0)] = 0
    prefill_attempts: Annotated[int, _m("prefill endpoints tried for one request", ge=1, le=16)] = 2
    prefill_connect_timeout: Annotated[float, _m("seconds to connect to a prefill endpoint", gt=0, le=600)] = 1.0
    prefill_timeout: Annotated[float, _m("seconds for the whole prefill stage", gt=0, le=86400)] = 120.0
    pull_timeout: Annotated[
        float,
        _m(
            "seconds that decode may wait for KV while the prefill peer answers no probe; three times if it does",
            gt=0,
            le=86400,
        ),
    ] = 10.0
    kv_lease: Annotated[
        float,
        _m(
            "seconds that prefill engines hold blocks (their kv_lease_duration); older handoffs are dropped",
            gt=1,
            le=86400,
        ),
    ] = 30.0
    nixl_relay: Annotated[
        Literal["on", "off"],
        _m("answer the decode engine's NIXL handshakes here and check prefill engines before they are used"),
    ] = "on"
    nixl_relay_port: Annotated[int, _m("port of the relay's loopback addresses", ge=1, le=65535)] = 5601
    prefill_side_channel_port: Annotated[
        int, _m("usual side-channel port of prefill engines; asked until a handoff names another", ge=1, le=65535)
    ] = 5600
    local_side_channel: Annotated[
        str,
        _m(
            "HOST:PORT of the decode engine's own side channel; "
            "empty: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, else the engine's host and 5600"
        ),
    ] = ""
    p2p_connector_port: Annotated[
        int, _m("control port of the P2P tier of prefill engines; rank r on port + r", ge=1, le=65280)
    ] = 7777
    mooncake_bootstrap_port: Annotated[
        int, _m("port of the Mooncake bootstrap server of prefill engines", ge=1, le=65535)
    ] = 8998
    enable_p2p_pull: Annotated[
        Literal["on", "off"],
        _m("whichever engine computes may fetch a prefix from the peer that x-kv-cache-source-host-port names"),
    ] = "off"
    prefill_from_decode: Annotated[
        Literal["on", "off"],
        _m("prefill may fetch what the decode engine holds of a prompt, earlier turns, from its P2P tier"),
    ] = "off"
    local_p2p: Annotated[
        str,
        _m(
            "HOST:PORT of the decode engine's own P2P tier, rank r on port + r; empty: VLLM_P2P_SIDE_CHANNEL_HOST "
            "and _PORT, else it is not asked"
        ),
    ] = ""
    tokenize_once: Annotated[
        Literal["on", "off"],
        _m("chat and completions of text: decode takes prefill's token ids, so that both mean the same prompt"),
    ] = "on"
    warm_up: Annotated[
        Literal["on", "off"],
        _m(
            "send one tiny request through each new pair of engines, so that no user's request has to connect "
            "them; an endpoint with a dead side channel gets one every 30 s in any case"
        ),
    ] = "on"
    warm_up_timeout: Annotated[
        float,
        _m("seconds that readiness waits for the warm-up of engines known at the start", ge=0, le=600),
    ] = 10.0
    max_body_bytes: Annotated[
        int, _m("larger requests get 413; prefill answers have the same bound", ge=1024, le=2**40)
    ] = 64 << 20
    drain_timeout: Annotated[float, _m("seconds that open answers get after SIGTERM", ge=0, le=86400)] = 60.0
    client_head_timeout: Annotated[float, _m("seconds that a request head may take", gt=0, le=86400)] = 30.0
    client_body_timeout: Annotated[
        float, _m("seconds without progress that a request body may take", gt=0, le=86400)
    ] = 30.0
    client_idle_timeout: Annotated[
        float, _m("seconds that an idle client connection is kept; longer than the gateway's", gt=0, le=86400)
    ] = 660.0
    engine_idle_timeout: Annotated[
        float, _m("seconds that an idle engine connection is kept; shorter than the engine's", gt=0, le=86400)
    ] = 4.0
    decision_header: Annotated[Literal["on", "off"], _m("write x-pd-decision to the client")] = "on"
    tracing: Annotated[Literal["on", "off"], _m("OpenTelemetry spans of requests, sent as OTLP over HTTP")] = "off"
    trace_sample: Annotated[
        float,
        _m(
            "share of the requests without a trace context that are traced; others: as their context says",
            ge=0,
            le=1,
        ),
    ] = 0.01
    otlp_endpoint: Annotated[
        str, _m("base URL of the collector; empty: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318")
    ] = ""
    log_format: Annotated[Literal["text", "json"], _m("log lines as text or JSON")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _m("least level that is logged")] = "info"

    @property
    def channel_port(self) -> int:
        """Where prefill engines have the control channel of connectors whose answers do not say it."""
        return self.mooncake_bootstrap_port if self.kv_connector == "mooncake" else self.p2p_connector_port

    @property
    def handoff_max_age(self) -> float:
        """Seconds after which a handoff is no longer used: the lease less what its journey may still take. The
        decode engine does not notice that it reads blocks that hold another prompt by now."""
        return self.kv_lease - min(5.0, self.kv_lease / 3)


ALIASES = {"vllm-port": "model-server-port", "secure-proxy": "secure-serving"}
SECRET = re.compile(r"(token|secret|password|key)$")


class BadSettings(Exception):
    """One line per mistake."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class Field(msgspec.Struct, frozen=True):
    """One setting as flags, environment and documentation see it."""

    name: str
    """Kebab case: `--name`, the key in the file, `PD_SIDECAR_` + upper case."""
    type: Any
    default: Any
    description: str
    choices: tuple[str, ...]
    is_list: bool

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")


def _field(info: msgspec.structs.FieldInfo) -> Field:
    annotated = get_type_hints(Settings, include_extras=True)[info.name]
    base, meta = get_args(annotated)
    default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
    is_list = get_origin(base) is list
    one = get_args(base)[0] if is_list else base
    choices = get_args(one) if get_origin(one) is Literal else ()
    return Field(info.encode_name, annotated, default, meta.description, choices, is_list)


FIELDS: tuple[Field, ...] = tuple(map(_field, msgspec.structs.fields(Settings)))
_BY_NAME = {field.name: field for field in FIELDS}


# -- reading -------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = f"unknown flag {unknown}{_meant(unknown.lstrip('-').partition('=')[0])}"
        raise BadSettings([message])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All settings as flags; values stay text, `load` types them."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings (key = flag name)")
    for field in FIELDS:
        names = [f"--{field.name}", *(f"--{alias}" for alias, name in ALIASES.items() if name == field.name)]
        default = " ".join(field.default) if field.is_list else field.default
        parser.add_argument(
            *names,
            dest=field.name,
            action="append" if field.is_list else "store",
            metavar="|".join(field.choices) or field.name.rsplit("-", 1)[-1].upper(),
            help=f"{field.description} (default: {default if default != '' else 'none'})".replace("%", "%%"),
        )


def load(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Settings, Path | None]:
    """The effective settings and the file they were partly read from. Raises `BadSettings`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    flags = vars(parser.parse_args(list(argv)))
    file_name = flags.pop("config") or environ.get(ENV_PREFIX + "CONFIG")
    path = Path(file_name) if file_name else None
    mistakes: list[str] = []
    merged = _from_file(path, mistakes) if path else {}
    merged |= _from_environ(environ, mistakes)
    merged |= {name: ("flag --" + name, value) for name, value in flags.items() if value is not None}
    settings = _typed(merged, mistakes)
    if settings is not None:
        mistakes += misplaced(settings, environ)
    if settings is None or mistakes:
        raise BadSettings(mistakes)
    return settings, path


_Given = dict[str, tuple[str, Any]]
"""Setting → (where it was given, its untyped value)."""


def _from_file(path: Path, mistakes: list[str]) -> _Given:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        mistakes.append(f"file {path}: {getattr(error, 'strerror', None) or error}")
        return {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        mistakes.append(f"file {path}{where}: not valid YAML: {problem}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        mistakes.append(f"file {path}: must hold settings as KEY: VALUE")
        return {}
    given: _Given = {}
    for key, value in content.items():
        name = ALIASES.get(str(key), str(key))
        if name not in _BY_NAME:
            mistakes.append(f"file {path}: unknown setting {str(key)!r}{_meant(name)}")
            continue
        if isinstance(value, bool) and _BY_NAME[name].choices:
            value = "on" if value else "off"  # YAML 1.1 reads a bare on/off as a truth value
        given[name] = (f"file {path}: {name}", value)
    return given


_SERVICE_LINK = re.compile(r".*_SERVICE_(HOST|PORT)(_.*)?|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes sets variables for every Service of the namespace; one that is called pd-sidecar brings
PD_SIDECAR_PORT=tcp://..., which is not meant for us."""


def _from_environ(environ: Mapping[str, str], mistakes: list[str]) -> _Given:
    given: _Given = {}
    by_env = {field.env: field for field in FIELDS}
    by_env |= {ENV_PREFIX + alias.upper().replace("-", "_"): _BY_NAME[name] for alias, name in ALIASES.items()}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_PREFIX + "CONFIG":
            continue
        field = by_env.get(variable)
        if _SERVICE_LINK.fullmatch(variable) or (variable.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value)):
            continue
        if field is None:
            mistakes.append(f"environment {variable}: unknown setting{_meant(variable[len(ENV_PREFIX) :])}")
            continue
        typed: Any = [part for part in re.split(r"[,\s]+", value) if part] if field.is_list else value
        given[field.name] = (f"environment {variable}", typed)
    return given


def _meant(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name.lower().replace("_", "-"), _BY_NAME, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _typed(given: _Given, mistakes: list[str]) -> Settings | None:
    values: dict[str, Any] = {}
    for name, (where, value) in given.items():
        field = _BY_NAME[name]
        value = _listed(field, value)
        try:
            values[name] = msgspec.convert(value, field.type, strict=False)
        except msgspec.ValidationError as error:
            shown = "its value" if SECRET.search(name) else repr(value)
            mistakes.append(f"{where}: {shown} is not possible: {_wanted(field) or str(error).splitlines()[0]}")
            continue
        mistakes += [f"{where}: {problem}" for problem in _problems(name, values[name])]
    settings = msgspec.convert(values, Settings) if not mistakes else None
    if settings is not None:
        mistakes += _conflicts(settings)
    return settings


def _listed(field: Field, value: Any) -> Any:
    """llm-d's lists may be one flag: `--enable-tls=prefiller,decoder`."""
    if not (field.is_list and field.choices and isinstance(value, list)):
        return value
    return [part for entry in value for part in (entry.split(",") if isinstance(entry, str) else [entry])]


def _wanted(field: Field) -> str:
    """What a setting of few values may be, "" for the others."""
    base = get_args(field.type)[0]
    entries = get_args(get_args(base)[0]) if field.is_list and get_args(base) else ()
    choices = field.choices or entries
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"it is one of {', '.join(choices)}"
    return "it is a number of seconds, without a unit" if base is float else ""


def _problems(name: str, value: Any) -> list[str]:
    """What the type alone cannot say."""
    if name == "kv-connector" and value not in CONNECTORS:
        return [f"{value!r} is no KV connector; there are {', '.join(sorted(CONNECTORS))}"]
    if name == "otlp-endpoint" and value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        return [f"{value!r} is no URL: http://HOST:4318 is wanted"]
    checks: dict[str, Callable[[str], object]] = {
        "prefill": parse,
        "prefill-allow": lambda entry: AllowList([entry]),
        "local-side-channel": parse,
        "local-p2p": parse,
        "model-server-host": canonical_host,
        "host": canonical_host,
        "discovery": parse_spec,
        "discovery-dns-server": _ip_and_port,
        "discovery-selector": check_selector,
        "discovery-model": check_label_value,
        "discovery-namespace": check_name,
        "inference-pool": check_name,
        "kubernetes-api": check_api,
        "metrics-host": canonical_host,
    }
    problems = []
    entries = value if isinstance(value, list) else [value] if value else []
    for entry in entries if name in checks else ():
        try:
            checks[name](entry)
        except (BadAddress, BadSpec) as error:
            problems.append(str(error))
    return problems


def _ip_and_port(text: str) -> None:
    host = parse(text).host
    if not host[-1].isdigit() and ":" not in host:
        raise BadAddress(f"{text!r} is a name: the DNS server's IP address is needed")


def _conflicts(settings: Settings) -> list[str]:
    size = settings.data_parallel_size
    serving = range(settings.port, settings.port + size)
    engines = range(settings.model_server_port, settings.model_server_port + size)
    mistakes = []
    if serving.stop > 65536 or engines.stop > 65536:
        mistakes.append(f"--data-parallel-size {size} needs ports beyond 65535")
    if settings.metrics_port in serving:
        mistakes.append(f"--metrics-port {settings.metrics_port} is also a serving port; choose another")
    local = settings.model_server_host in ("127.0.0.1", "localhost", "::1")
    if local and not settings.model_server_uds and set(serving) & set(engines):
        mistakes.append(f"--port {settings.port} and --model-server-port overlap: the sidecar would call itself")
    events = range(settings.kv_events_port, settings.kv_events_port + size)
    if settings.kv_events == "on" and settings.kv_events_replay_port in events:
        mistakes.append(
            f"--kv-events-replay-port {settings.kv_events_replay_port} is also a --kv-events-port; choose another"
        )
    if settings.model_server_uds and size > 1:
        mistakes.append("--model-server-uds serves one rank; with --data-parallel-size use ports")
    return mistakes


def doubts(settings: Settings) -> list[str]:
    """What is possible and hardly meant, one line each."""
    if settings.disagg == "off" or not CONNECTORS[settings.kv_connector].splits:
        return []
    if settings.prefill or settings.prefill_allow or settings.discovery != "none":
        return []
    why = "no prefill endpoint is allowed: x-prefiller-host-port gets 403 and all else stays local"
    return [f"{why}; add --discovery, --prefill-allow CIDR or --prefill HOST:PORT"]


def shown(settings: Settings) -> dict[str, Any]:
    """The effective settings, secrets hidden."""
    values: dict[str, Any] = msgspec.to_builtins(settings)
    return {name: "<hidden>" if SECRET.search(name) and value else value for name, value in values.items()}


def json_schema() -> dict[str, Any]:
    """JSON schema of the file."""
    return msgspec.json.schema(Settings)


def markdown() -> str:
    """The settings as a table."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in FIELDS:
        default = ", ".join(field.default) if field.is_list else field.default
        lines.append(f"| `--{field.name}` | {default if default != '' else 'none'} | {field.description} |")
    return "\n".join(lines).replace("| off: pass", "| off: pass") + "\n"
