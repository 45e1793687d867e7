"""The command line of llm-d's routing sidecar, in our terms: its image can be replaced, its manifest kept.

Go's spelling (`-flag`, `--flag=false`), its old and new names, and flags that mean nothing here. Each of the last
is said in one line, so that nobody believes in a setting that does nothing. Knows flags, not what they do.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sidecar.config import ALIASES, FIELDS

RENAMED = {
    "connector": "kv-connector",
    "secure-proxy": "secure-serving",
    "inference-pool-name": "inference-pool",
    "inference-pool-namespace": "discovery-namespace",
    "pool-namespace": "discovery-namespace",
}
"""Their names, and ours for the same thing."""

_SWITCHES = frozenset(field.name for field in FIELDS if set(field.choices) == {"on", "off"})
_NAMES = frozenset(field.name for field in FIELDS)
_TRUE, _FALSE = frozenset({"true", "1", "t"}), frozenset({"false", "0", "f"})

_TLS = {
    "prefiller-use-tls": "--enable-tls=prefiller",
    "decoder-use-tls": "--enable-tls=decoder",
    "prefiller-tls-insecure-skip-verify": "--tls-insecure-skip-verify=prefiller",
    "decoder-tls-insecure-skip-verify": "--tls-insecure-skip-verify=decoder",
}
"""What were four truth values are two lists now, there and here."""

SAME = (
    *("port", "model-server-port", "vllm-port", "data-parallel-size", "kv-connector", "enable-prefiller-sampling"),
    *("enable-tls", "tls-insecure-skip-verify", "secure-serving", "secure-proxy", "cert-path"),
    *("pool-group", "metrics-port", "tracing", "enable-p2p-pull", "p2p-connector-port"),
    "mooncake-bootstrap-port",
)
"""Theirs that mean the same here."""

_BOOLEANS = {
    "enable-ssrf-protection": "it cannot be switched off here; --prefill-allow any admits every target",
    "enable-speculative-prefill": "no turn is prefilled before it is asked for",
}
"""Theirs that are either true or false, and what is said if they ask for what there is not."""

_VALUES = {
    "prefill-retry-backoff": "the next prefill endpoint is tried at once, a failing one left alone by its breaker",
    "max-idle-conns-per-host": "connections are pooled without a limit and closed after --engine-idle-timeout",
    "decode-chunk-size": "an answer is streamed as the engine streams it",
    "ec-connector": "there is no encoder stage here",
    "tls-min-version": "it is TLS 1.2",
    "tls-cipher-suites": "they are those of OpenSSL's default",
    "metrics-cert-dir": "the admin port speaks plain HTTP; --metrics-host 127.0.0.1 keeps it within the pod",
    "zap-log-level": "see --log-level",
    "zap-encoder": "see --log-format",
    "zap-devel": "see --log-level",
    "zap-stacktrace-level": "see --log-level",
    "zap-time-encoding": "see --log-format",
    "v": "see --log-level",
}


_BY_PREFIX = {
    "moriio-": "there is no MoRI-IO connector here",
}
"""Families of theirs that mean nothing here."""

_ENVIRONMENT = {
    "ENABLE_PREFILLER_SAMPLING": "enable-prefiller-sampling",
    "INFERENCE_POOL": "inference-pool",
    "MOONCAKE_BOOTSTRAP_PORT": "mooncake-bootstrap-port",
    "P2P_CONNECTOR_PORT": "p2p-connector-port",
}
"""Variables that they read where the flag is not given."""

_CONFIGURATION = ("configuration", "configuration-file")
"""YAML of flags, in the flag itself or in a file; flags come before it."""


def translated(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Our flags for what may be theirs, and one line for each that means nothing here. Ours pass unchanged."""
    flags: list[str] = []
    notes: list[str] = []
    rest = [*_from_environ(argv, environ), *_configured(argv), *argv]
    while rest:
        argument = rest.pop(0)
        name, value = _parts(argument)
        if not name:
            flags.append(argument)
            continue
        name = RENAMED.get(name, name) if RENAMED.get(name) in _NAMES else name
        if name in _CONFIGURATION:
            if value is None and rest:
                rest.pop(0)  # read already
        elif name in _TLS:
            if value is None or value.lower() in _TRUE:
                flags.append(_TLS[name])
        elif name in _REWRITTEN:
            text = value if value is not None or not rest else rest.pop(0)
            flags += [f"--{name}"] if text is None else _REWRITTEN[name](name, text, argv, notes)
        elif name in _BOOLEANS:
            _boolean(name, value, notes)
        elif name in _VALUES or name.startswith(tuple(_BY_PREFIX)):
            if value is None and rest and not rest[0].startswith("-"):
                rest.pop(0)
            notes.append(f"--{name} means nothing here: {_why(name)}")
        elif name in _SWITCHES:
            flags += _switch(name, value, rest)
        else:
            flags.append(f"--{name}" + ("" if value is None else f"={value}"))
    return flags, notes


def _why(name: str) -> str:
    return _VALUES.get(name) or next(why for prefix, why in _BY_PREFIX.items() if name.startswith(prefix))


def _given(argv: Sequence[str]) -> set[str]:
    return {_parts(argument)[0] for argument in argv}


def _from_environ(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    given = _given(argv)
    found = {name: environ[variable] for variable, name in _ENVIRONMENT.items() if environ.get(variable)}
    if "enable-ssrf-protection" not in given:
        found.pop("inference-pool", None)  # they look at the pool for its protection only
    return [f"--{name}={value}" for name, value in found.items() if name not in given]


def _configured(argv: Sequence[str]) -> list[str]:
    """The flags that `--configuration` and `--configuration-file` hold; what cannot be read stays a flag, so that
    it is a mistake."""
    found: list[str] = []
    for index, argument in enumerate(argv):
        name, value = _parts(argument)
        if name not in _CONFIGURATION:
            continue
        import yaml  # as in config.py

        text = value if value is not None else "".join(argv[index + 1 : index + 2])
        try:
            content = yaml.safe_load(text if name == "configuration" else Path(text).read_text(encoding="utf-8"))
            members: dict[Any, Any] = content if isinstance(content, dict) else {"": content} if content else {}
        except (OSError, ValueError, yaml.YAMLError):
            members = {f"{name}-that-can-be-read": text}
        for key, entry in members.items():
            entries = entry if isinstance(entry, list) else [entry]
            found += [f"--{key}={str(one).lower() if isinstance(one, bool) else one}" for one in entries]
    return found


def _stages(name: str, value: str, _argv: Sequence[str], notes: list[str]) -> list[str]:
    """Their stages are three; an encoder is nothing that we talk to."""
    stages = value.split(",")
    if "encoder" in stages:
        notes.append(f"--{name}=encoder means nothing here: there is no encoder stage here")
    kept = [stage for stage in stages if stage != "encoder"]
    return [f"--{name}={','.join(kept)}"] if kept else []


def _pool(_name: str, value: str, argv: Sequence[str], _notes: list[str]) -> list[str]:
    """`NAMESPACE/NAME` or `NAME`. They watch a pool wherever they are told of one; here discovery does."""
    namespace, slash, pool = value.partition("/")
    flags = [f"--inference-pool={pool if slash else value}"]
    if slash:
        flags.append(f"--discovery-namespace={namespace}")
    return flags if "discovery" in _given(argv) else [*flags, "--discovery=kubernetes"]


def _admin_port(name: str, value: str, _argv: Sequence[str], notes: list[str]) -> list[str]:
    if value != "0":
        return [f"--{name}={value}"]
    notes.append("--metrics-port=0 means nothing here: probes and the switch are on that port")
    return []


def _attempts(_name: str, value: str, _argv: Sequence[str], _notes: list[str]) -> list[str]:
    return [f"--prefill-attempts={int(value) + 1 if value.isdecimal() else value}"]


_REWRITTEN: dict[str, Callable[[str, str, Sequence[str], list[str]], list[str]]] = {
    "enable-tls": _stages,
    "tls-insecure-skip-verify": _stages,
    "inference-pool": _pool,
    "metrics-port": _admin_port,
    "prefill-max-retries": _attempts,
}
"""Theirs whose values need a second look."""


def markdown() -> str:
    """Their flags and what becomes of each, as a table."""
    rows = {name: f"the same (`--{ALIASES[name]}`)" if name in ALIASES else "the same" for name in SAME}
    rows |= {name: f"`--{ours}`" for name, ours in RENAMED.items()}
    rows |= {name: f"`{ours}`" for name, ours in _TLS.items()}
    rows["inference-pool"] = "`--discovery kubernetes` with this pool; `NAMESPACE/NAME` too"
    rows["prefill-max-retries"] = "`--prefill-attempts`, one more: each at another endpoint where there are several"
    rows["configuration"] = rows["configuration-file"] = "read: its flags, behind those of the command line"
    rows["enable-ssrf-protection"] = f"always on; `=false` is a warning: {_BOOLEANS['enable-ssrf-protection']}"
    lines = ["| llm-d's flag | here |", "|---|---|"]
    lines += [f"| `--{name}` | {rows[name]} |" for name in sorted(rows)]
    nothing = {**_BOOLEANS, **_VALUES, **{f"{prefix}*": why for prefix, why in _BY_PREFIX.items()}}
    lines += [f"| `--{name}` | a warning: {nothing[name]} |" for name in sorted(nothing.keys() - rows.keys())]
    return "\n".join(lines) + "\n"


def _parts(argument: str) -> tuple[str, str | None]:
    """Name and value of `-name`, `--name`, `--name=value`; "" for what is no flag."""
    name, equals, value = argument.partition("=")
    bare = name.lstrip("-")
    if not name.startswith("-") or not bare[:1].isalpha() or name.startswith("---") or bare in ("h", "help"):
        return "", None
    return bare, value if equals else None


def _boolean(name: str, value: str | None, notes: list[str]) -> None:
    wants = value is None or value.lower() in _TRUE
    # Protection is what there is; of the others there is nothing to switch on.
    if wants is not (name == "enable-ssrf-protection"):
        notes.append(f"--{name}{'' if value is None else f'={value}'} means nothing here: {_BOOLEANS[name]}")


def _switch(name: str, value: str | None, rest: list[str]) -> list[str]:
    """One of our on/off settings, which Go would take as a truth value, with or without one."""
    if value is None and rest and rest[0] in ("on", "off"):
        value = rest.pop(0)
    if value is None or value.lower() in _TRUE:
        return [f"--{name}=on"]
    return [f"--{name}={'off' if value.lower() in _FALSE else value}"]
