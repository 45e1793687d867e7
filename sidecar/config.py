"""Reads the settings of settings.py: flags over environment over file over defaults, typed, checked, described."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sidecar.connectors import CONNECTORS
from sidecar.prefill.address import AllowList, BadAddress, canonical_host, parse
from sidecar.prefill.discovery.cluster import check_api, misplaced
from sidecar.prefill.discovery.spec import BadSpec, check_label_value, check_name, check_selector, parse_spec
from sidecar.settings import Settings

ENV_PREFIX = "PD_SIDECAR_"


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
    import yaml  # more than a megabyte, which a sidecar without a file and a worker do without

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
            meant = _meant(variable[len(ENV_PREFIX) :], lambda name: ENV_PREFIX + name.upper().replace("-", "_"))
            mistakes.append(f"environment {variable}: unknown setting{meant}")
            continue
        typed: Any = [part for part in re.split(r"[,\s]+", value) if part] if field.is_list else value
        given[field.name] = (f"environment {variable}", typed)
    return given


def _meant(name: str, written: Callable[[str], str] = str) -> str:
    """`written`: how the name of a setting is written where this one was found."""
    import difflib

    close = difflib.get_close_matches(name.lower().replace("_", "-"), _BY_NAME, n=1)
    return f"; did you mean {written(close[0])!r}?" if close else ""


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
    if settings.workers > 1 and settings.kv_events == "on":
        mistakes.append(
            f"--workers {settings.workers} and --kv-events on exclude each other: one process follows the "
            "events, and the others would know none of the prefixes; leave one of them out"
        )
    if settings.workers > 1 and not sys.platform.startswith("linux"):
        mistakes.append(
            f"--workers {settings.workers}: only Linux deals the connections of one port out to several"
        )
    if settings.model_server_uds and size > 1:
        mistakes.append("--model-server-uds serves one rank; with --data-parallel-size use ports")
    return mistakes


def doubts(settings: Settings) -> list[str]:
    """What is possible and hardly meant, one line each."""
    found = []
    if settings.kv_connector in ("none", "lmcache", "mooncake"):
        found = [
            f"--{name.replace('_', '-')} on: engines with --kv-connector {settings.kv_connector} have no P2P tier"
            for name in ("enable_p2p_pull", "prefill_from_decode")
            if getattr(settings, name) == "on"
        ]
    if settings.disagg == "off" or not CONNECTORS[settings.kv_connector].splits:
        return found
    if not (settings.prefill or settings.prefill_allow or settings.discovery != "none"):
        why = "no prefill endpoint is allowed: x-prefiller-host-port gets 403 and all else stays local"
        found.append(f"{why}; add --discovery, --prefill-allow CIDR or --prefill HOST:PORT")
    return found


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
