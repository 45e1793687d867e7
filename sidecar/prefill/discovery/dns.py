"""Endpoints from the A and AAAA records of a name, a headless Service; asked for again when their TTL is over.

dnspython, and not loop.getaddrinfo, which tells no TTL and leaves a thread of the executor stuck with each lookup
that hangs; nor c-ares (aiodns), which tells no TTL of a chain or of an absence, and is two C extensions for a query
now and then. It costs 3.4 MB, so this file is imported only where it is needed.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
from dns.nameserver import Do53Nameserver

from sidecar.prefill.address import Address
from sidecar.prefill.discovery.backoff import Backoff
from sidecar.prefill.discovery.discovery import Member, Report
from sidecar.prefill.discovery.dns_sockets import Backend

LEAST_TTL_S = 1.0
LONGEST_TTL_S = 3600.0
LIFETIME_S = 5.0
"""Of one lookup, over all servers of resolv.conf."""
NXDOMAIN_BELIEVED_AFTER_S = 30.0
"""A DNS server that has just started says of every name that there is no such one."""

_FAMILIES = ("A", "AAAA")


class DnsSource:
    """Two lookups, each with its own time to live. `servers`: asked in place of those of /etc/resolv.conf, whose
    search list and `ndots` hold for names without a final dot either way."""

    def __init__(
        self, host: str, port: int, servers: Sequence[Address], now: Callable[[], float] | None = None
    ) -> None:
        """`now`: a monotonic clock in seconds, the loop's if none is given."""
        self.name = f"dns:{host}:{port}"
        self._host = host
        self._port = port
        self._servers = servers
        self._now = now
        self._found: dict[str, frozenset[Address]] = {}

    async def run(self, report: Report) -> None:
        async with asyncio.TaskGroup() as tasks:
            for family in _FAMILIES:
                tasks.create_task(self._keep(family, report), name=f"{self.name} {family}")

    async def _keep(self, family: str, report: Report) -> None:
        backoff = Backoff()
        now = self._now or asyncio.get_running_loop().time
        absent_since: float | None = None
        while True:
            try:
                addresses, ttl_s = await self._look_up(family)
            except dns.resolver.NXDOMAIN:
                absent_since = now() if absent_since is None else absent_since
                if now() - absent_since >= NXDOMAIN_BELIEVED_AFTER_S:
                    self._tell(family, frozenset(), report)
                message = f"there is no name {self._host} ({family}); check its spelling and namespace"
                report.failed("nxdomain", message, family)
                await asyncio.sleep(backoff.wait_s())
                continue
            except dns.resolver.NoResolverConfiguration as error:
                report.failed("no_resolver", f"no usable /etc/resolv.conf: {error}", family)
            except dns.exception.Timeout:
                report.failed("timeout", f"no DNS server answers within {LIFETIME_S:g} s ({family})", family)
            except dns.resolver.NoNameservers as error:
                report.failed("refused", f"every DNS server failed ({family}): {_causes(error)}", family)
            except (dns.exception.DNSException, OSError) as error:
                report.failed("error", f"the lookup of {family} failed: {type(error).__name__}", family)
            else:
                backoff.reset()
                absent_since = None
                self._tell(family, addresses, report)
                report.heard(family)
                await asyncio.sleep(min(max(ttl_s, LEAST_TTL_S), LONGEST_TTL_S))
                continue
            absent_since = None
            await asyncio.sleep(backoff.wait_s())

    async def _look_up(self, family: str) -> tuple[frozenset[Address], float]:
        """The addresses, none if the name has no such record, and for how long that may be relied on."""
        resolver = self._resolver()
        answer = await resolver.resolve(
            self._host, family, raise_on_no_answer=False, search=True, lifetime=LIFETIME_S, backend=Backend()
        )
        records = answer.rrset if answer.rrset is not None else ()
        # In their own spelling, or one endpoint would be two.
        hosts = {str(ipaddress.ip_address(record.address)) for record in records}
        return frozenset(Address(host, self._port) for host in hosts), float(answer.chaining_result.minimum_ttl)

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Made anew for every lookup: resolv.conf may have been mended."""
        try:
            resolver = dns.asyncresolver.Resolver()
        except dns.resolver.NoResolverConfiguration:
            if not self._servers:
                raise
            resolver = dns.asyncresolver.Resolver(configure=False)
        if self._servers:
            resolver.nameservers = [Do53Nameserver(server.host, server.port) for server in self._servers]
        return resolver

    def _tell(self, family: str, addresses: frozenset[Address], report: Report) -> None:
        self._found[family] = addresses
        members = {address: Member(detail=one) for one, found in self._found.items() for address in found}
        report.found(members)


def _causes(failure: dns.resolver.NoNameservers) -> str:
    errors: list[tuple[str, bool, int, Exception | str, object]] = failure.kwargs.get("errors", [])
    causes = {
        f"{error[0]} {error[3] if isinstance(error[3], str) else type(error[3]).__name__}" for error in errors
    }
    return ", ".join(sorted(causes)[:4])
