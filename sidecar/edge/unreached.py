"""What it means that no connection to an engine was made. Knows no requests."""

import errno
import ssl

from sidecar.tls import describe
from transport.descriptors import shortage

OWN_SHORTAGE = "own_shortage"
"""In place of a fault: this process may open no connection at present, to whomever. No engine's fault."""

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN}


def connect_fault(error: OSError, label: str) -> tuple[str, str]:
    """The fault (refused, unreachable or `OWN_SHORTAGE`) and its detail. `label`: who was to be reached."""
    if isinstance(error, ssl.SSLError):
        return "refused", f"{label}: TLS: {describe(error)}"
    if problem := shortage(error):
        return OWN_SHORTAGE, f"{label}: {problem}"
    if error.errno in _UNREACHABLE:
        return "unreachable", f"{label}: {error.strerror}"
    return "refused", f"{label}: {error.strerror or type(error).__name__}"
