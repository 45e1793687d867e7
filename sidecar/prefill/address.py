"""Addresses of prefill endpoints in one canonical form, and the list of those that may be contacted.

Every address that a header, a flag or a handoff names passes through `parse`: an address that can be written in
two ways must not be allowed in one and refused in the other. This file does no look-ups: a host name is allowed
only by name.
"""

import ipaddress
import re
from dataclasses import dataclass

_NAME = re.compile(r"^(?=.{1,253}$)(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*$")
_LAST_LABEL_NUMERIC = re.compile(r"(^|\.)(0x[0-9a-f]*|[0-9]+)$")


class BadAddress(ValueError):
    """Not a HOST:PORT; the message says what is wrong with it."""


def canonical_host(host: str) -> str:
    """`host` in the one form used everywhere: IP addresses compressed and unmapped, names in lower case.

    Raises `BadAddress`, also for the spellings (`127.1`, `0x7f000001`) that resolvers turn into addresses.
    """
    text = host.strip().lower()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if "%" in text:
        raise BadAddress(f"{host!r} has a scope id")
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        name = text.rstrip(".")
        if not _NAME.match(name) or _LAST_LABEL_NUMERIC.search(name):
            raise BadAddress(f"{host!r} is neither an IP address nor a host name") from None
        return name
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def is_loopback_or_unspecified(host: str) -> bool:
    """Whether a canonical host means "this machine" to whoever dials it."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Host (canonical) and port of an endpoint."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """`HOST:PORT`, with an IPv6 host in brackets; a leading `http://` is tolerated. Raises `BadAddress`."""
    if len(text) > 300:
        raise BadAddress(f"{text[:60]!r}... is too long for HOST:PORT")
    bare = text.strip().removeprefix("http://").removesuffix("/")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or (":" in host and not host.startswith("[")):
        raise BadAddress(f"{text!r} is not HOST:PORT (IPv6 hosts go in brackets)")
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or not 1 <= int(port) <= 65535:
        raise BadAddress(f"{text!r} has no port between 1 and 65535")
    return Address(canonical_host(host), int(port))


class AllowList:
    """Which addresses a header may name: networks (any port), exact HOST:PORT, or any."""

    def __init__(self, entries: list[str]) -> None:
        self._any = False
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._addresses: set[Address] = set()
        for entry in entries:
            self._add(entry.strip())

    def _add(self, entry: str) -> None:
        if entry == "any":
            self._any = True
            return
        if "/" in entry:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                raise BadAddress(f"{entry!r} is no CIDR network: {error}") from None
            return
        self._addresses.add(parse(entry))

    def admits(self, address: Address) -> bool:
        if self._any or address in self._addresses:
            return True
        if not self._networks:
            return False
        try:
            ip = ipaddress.ip_address(address.host)
        except ValueError:
            return False
        return any(ip.version == network.version and ip in network for network in self._networks)

    def __bool__(self) -> bool:
        return self._any or bool(self._networks) or bool(self._addresses)
