"""Whether a port can be had before several processes share it: they would share it with strangers too."""

import errno
import os
import socket


def check_free(name: str, host: str, port: int) -> None:
    """Raises `OSError` if somebody listens there. `name`: what the port is called; `host` "": every address."""
    wanted = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")] if not host else _resolved(name, host, port)  # noqa: S104
    for family, address in wanted:
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and not host:
                continue  # a machine without IPv6
            raise OSError(error.errno, f"{name} {port}: {os.strerror(error.errno or 0)}") from None


def _resolved(name: str, host: str, port: int) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(error.errno, f"{name} {port}: {error.strerror or error}") from None
    return [(family, str(where[0])) for family, _, _, _, where in found]
