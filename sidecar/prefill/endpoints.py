"""The known prefill endpoints and the choice among them. Decides, and does no I/O.

An endpoint is known because it is configured or because an allowed header named it; the latter are forgotten
when they are idle and their number grows beyond a bound.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sidecar.connectors.connector import EngineFacts
from sidecar.prefill.address import Address, AllowList, BadAddress, parse
from sidecar.prefill.breaker import Breaker
from transport.prober import Endpoint as SideChannel

MAX_ENDPOINTS = 512
"""Endpoints that headers brought, kept at once: bounds memory and label sets."""

NO_KV_TO_BE_INEFFECTIVE = 5
"""Prefill answers in a row without a usable handoff until `effective` reads 0."""


class NotAllowed(ValueError):
    """A header names endpoints of which none may be contacted."""


@dataclass(eq=False, slots=True)
class Endpoint:
    """One prefill endpoint, shared by all requests that use it."""

    address: Address
    configured: bool
    label: str = ""
    in_flight: int = 0
    tokens_in_flight: int = 0
    """Prompt tokens of the prefill legs that are under way, as estimated."""
    breaker: Breaker = field(default_factory=Breaker)
    facts: EngineFacts = field(default_factory=EngineFacts)
    peer_host: str = ""
    """IP address that last answered here; what a handoff may name besides the configured host."""
    side_channels: dict[SideChannel, bool] = field(default_factory=dict)
    """Side channels of the engines behind the address; whether a handoff has named them (else the usual port)."""
    forgotten: bool = False
    """It made room for others; requests that still hold it are its last."""
    blocked: str = ""
    """Why nothing can be pulled from here at present: `incompatible` or `side_channel_dead`."""

    def __post_init__(self) -> None:
        self.label = str(self.address)

    def admits(self, now: float) -> bool:
        """Whether a prefill may be sent here."""
        return not self.blocked and self.breaker.admits(now)

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset({self.address.host, self.peer_host} - {""})


class Endpoints:
    """All of them. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        configured: Iterable[Address],
        allow: AllowList,
        now: Callable[[], float],
        *,
        learned: Callable[[Endpoint], None] = lambda _endpoint: None,
        forgotten: Callable[[Endpoint], None] = lambda _endpoint: None,
    ) -> None:
        """`learned` and `forgotten` hear of endpoints that headers bring and that make room for others."""
        self._learned = learned
        self._forgotten = forgotten
        self._now = now
        self._allow = allow
        self.configured = [Endpoint(address, configured=True) for address in dict.fromkeys(configured)]
        self._known = {endpoint.address: endpoint for endpoint in self.configured}
        self._header_cache: dict[bytes, tuple[Address, ...]] = {}
        self._no_kv = 0
        self._random = random.Random()  # noqa: S311

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._known.values())

    def candidates(self, header: list[bytes]) -> list[Endpoint]:
        """Who may prefill this request: the header's endpoints in their order, else the configured ones.

        Raises `BadAddress` for a header that is no address, `NotAllowed` if it names only foreign ones.
        """
        value = b",".join(header) if len(header) > 1 else header[0] if header else b""
        if not value.strip(b" ,\t"):  # a gateway may say "none" by an empty field
            return self.configured
        return self._named(value)

    def _named(self, value: bytes) -> list[Endpoint]:
        addresses = self._header_cache.get(value)
        if addresses is None:
            addresses = self._parse_header(value)
            if len(self._header_cache) >= MAX_ENDPOINTS:
                self._header_cache.clear()
            self._header_cache[value] = addresses
        found = []
        for address in addresses:
            endpoint = self._known.get(address)
            if endpoint is None and self._allow.admits(address):
                endpoint = self._learn(address)
            if endpoint is not None:
                found.append(endpoint)
        if not found:
            raise NotAllowed(", ".join(map(str, addresses[:3])) + (", ..." if len(addresses) > 3 else ""))
        return found

    @staticmethod
    def _parse_header(value: bytes) -> tuple[Address, ...]:
        try:
            text = value.decode("ascii")
        except UnicodeDecodeError:
            raise BadAddress("x-prefiller-host-port is not ASCII") from None
        addresses = tuple(dict.fromkeys(parse(part) for part in text.split(",") if part.strip()))
        if not addresses:
            raise BadAddress("x-prefiller-host-port is empty")
        if len(addresses) > 64:
            raise BadAddress("x-prefiller-host-port names more than 64 endpoints")
        return addresses

    def _learn(self, address: Address) -> Endpoint:
        if len(self._known) >= len(self.configured) + MAX_ENDPOINTS:
            for old in list(self._known.values()):
                if not old.configured and not old.in_flight:
                    del self._known[old.address]
                    old.forgotten = True
                    self._forgotten(old)
                    break
        endpoint = self._known[address] = Endpoint(address, configured=False)
        self._learned(endpoint)
        return endpoint

    def choose(
        self, candidates: Sequence[Endpoint], tried: list[Endpoint], *, ordered: bool, may_repeat: bool
    ) -> Endpoint | None:
        """The next endpoint to try, or None. `may_repeat`: one that was tried may come again if it is the only one.

        `ordered` keeps the order of the header; otherwise the least loaded one, ties broken by chance.
        """
        now = self._now()
        if len(candidates) == 1:  # the common case
            only = candidates[0]
            return only if only.admits(now) and (may_repeat or not tried) else None
        usable = [endpoint for endpoint in candidates if endpoint not in tried and endpoint.admits(now)]
        if not usable:
            return None
        if ordered or len(usable) == 1:
            return usable[0]
        least = min(endpoint.in_flight for endpoint in usable)
        return self._random.choice([endpoint for endpoint in usable if endpoint.in_flight == least])

    def any_usable(self, candidates: Sequence[Endpoint]) -> bool:
        now = self._now()
        return any(endpoint.admits(now) for endpoint in candidates)

    # -- what came of it --

    def least_tokens_in_flight(self, candidates: Sequence[Endpoint]) -> int:
        """What a prompt finds before it at the least loaded of those that may be used; 0 if none may."""
        now = self._now()
        return min((one.tokens_in_flight for one in candidates if one.admits(now)), default=0)

    def begin(self, endpoint: Endpoint, tokens: int) -> int:
        """A prefill leg for a prompt of about so many tokens starts; returns its number if it is the breaker's
        trial, else 0."""
        endpoint.in_flight += 1
        endpoint.tokens_in_flight += tokens
        return endpoint.breaker.begin()

    def end(self, endpoint: Endpoint, tokens: int) -> None:
        endpoint.in_flight -= 1
        endpoint.tokens_in_flight -= tokens

    def failed(self, endpoint: Endpoint, *, at_once: bool, trial: int) -> None:
        """Counts a failure against the endpoint."""
        endpoint.breaker.failed(self._now(), at_once=at_once, trial=trial)

    def brought_kv(self, endpoint: Endpoint) -> None:
        """A pull worked."""
        endpoint.breaker.succeeded()
        self._no_kv = 0

    def brought_no_kv(self) -> None:
        """A prefill was paid for and brought nothing."""
        self._no_kv += 1

    @property
    def effective(self) -> bool:
        """False when remote prefills are paid for and bring no KV."""
        return self._no_kv < NO_KV_TO_BE_INEFFECTIVE
