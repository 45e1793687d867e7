"""The command line of llm-d's routing sidecar, in our terms: its image can be replaced, its manifest kept.

Go's spelling (`-flag`, `--flag=false`), its old and new names, and flags that mean nothing here. Each of the last
is said in one line, so that nobody believes in a setting that does nothing. Knows flags, not what they do.
"""

from collections.abc import Sequence

from sidecar.config import FIELDS

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

_BOOLEANS = {
    "enable-ssrf-protection": "it cannot be switched off here; --prefill-allow any admits every target",
    "enable-prefiller-sampling": "the prefill leg always generates one token, by greedy sampling or not",
    "enable-p2p-pull": "there is no P2P tier here; x-kv-cache-source-host-port is read and not used",
}
"""Theirs that are either true or false, and what is said if they ask for what there is not."""

_VALUES = {
    "prefill-retry-backoff": "the next prefill endpoint is tried at once, a failing one left alone by its breaker",
    "max-idle-conns-per-host": "connections are pooled without a limit and closed after --engine-idle-timeout",
    "mooncake-bootstrap-port": "there is no mooncake connector here",
    "p2p-connector-port": "there is no P2P tier here",
    "decode-chunk-size": "an answer is streamed as the engine streams it",
    "zap-log-level": "see --log-level",
    "zap-encoder": "see --log-format",
    "zap-devel": "see --log-level",
    "zap-stacktrace-level": "see --log-level",
    "zap-time-encoding": "see --log-format",
    "v": "see --log-level",
}


def translated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags for what may be theirs, and one line for each that means nothing here. Ours pass unchanged."""
    flags: list[str] = []
    notes: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, value = _parts(argument)
        if not name:
            flags.append(argument)
            continue
        name = RENAMED.get(name, name) if RENAMED.get(name) in _NAMES else name
        if name in _TLS:
            if value is None or value.lower() in _TRUE:
                flags.append(_TLS[name])
        elif name in _BOOLEANS:
            _boolean(name, value, notes)
        elif name in _VALUES:
            if value is None and rest and not rest[0].startswith("-"):
                rest.pop(0)
            notes.append(f"--{name} means nothing here: {_VALUES[name]}")
        elif name == "prefill-max-retries":
            text = value if value is not None or not rest else rest.pop(0)
            flags.append(f"--prefill-attempts={int(text) + 1 if text and text.isdecimal() else text}")
        elif name in _SWITCHES:
            flags += _switch(name, value, rest)
        else:
            flags.append(f"--{name}" + ("" if value is None else f"={value}"))
    return flags, notes


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
