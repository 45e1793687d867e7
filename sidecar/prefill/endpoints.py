"""The known prefill endpoints and the choice among them. Decides, and does no I/O.

An endpoint is known because it is configured, because discovery tells of it, or because an allowed header named it;
the last are forgotten when they are idle and their number grows beyond a bound. One that leaves gets no new request
from that moment on; what was kept for it is given back when the requests that it has are through with it.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.connectors.connector import EngineFacts
from sidecar.prefill.address import Address, AllowList, BadAddress, parse
from sidecar.prefill.breaker import Breaker
from sidecar.prefill.homes import MASK, MIX, Homes
from sidecar.prefill.ranks import Ranks
from sidecar.prefill.served import Served, Serving, Told, serving
from sidecar.prefill.slots import Slots
from transport.prober import Endpoint as SideChannel

MAX_ENDPOINTS = 512
"""Endpoints that headers brought, kept at once: bounds memory and label sets."""

MAX_DISCOVERED = 1024
"""Endpoints that discovery brings, kept at once: the same reason, and as many side channels can be watched."""

WARM_IN_S = 10.0
"""An endpoint that joins others gets its full share after this time. Every sidecar of the fleet sees it join in the
same moment, with nothing in flight."""
FIRST_SHARE = 0.1
"""Of a full share, from the first moment on: enough to find out that it does not work."""

DRAWS = 8

MANY = 64
"""Members of whom a look at each costs more than `Homes`: 50 µs against 6 for a conversation's home among 512."""

DEPARTED_FOR_S = 60.0
"""A gateway that names an endpoint may know of its end a moment later than we do."""

NO_KV_TO_BE_INEFFECTIVE = 5
"""Prefill answers in a row without a usable handoff until `effective` reads 0."""


class NotAllowed(ValueError):
    """A header names endpoints of which none may be contacted."""


@dataclass(eq=False, slots=True)
class Endpoint:
    """One prefill endpoint, shared by all requests that use it."""

    address: Address
    configured: bool
    discovered: bool = False
    label: str = ""
    last_rank: int = -1
    failures: int = 0
    """How often it has failed: what was known of its engine before may hold no more."""
    in_flight: int = 0
    tokens_in_flight: int = 0
    """Prompt tokens of the prefill legs that are under way, as estimated."""
    users: int = 0
    """Requests that may still need something of it: a prefill leg, its side channel, its breaker."""
    breaker: Breaker = field(default_factory=Breaker)
    ranks: Ranks = field(default_factory=Ranks)
    has_ranks: bool = False
    """Several engines are behind the address; not all of their side channels may be known."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    models: Told = field(default_factory=Told)
    slots: Slots | None = None
    """Which adapters it had at hand when it was last asked; counts until `slots_until`."""
    slots_until: float = float("-inf")
    peer_host: str = ""
    """IP address that last answered here; what a handoff may name besides the configured host."""
    side_channels: dict[SideChannel, bool] = field(default_factory=dict)
    """Side channels of the engines behind the address; whether a handoff has named them (else the usual port)."""
    joined_at: float = float("-inf")
    """When it joined others that were there before it."""
    leaving: bool = False
    """It gets no new request; those that hold it are its last."""
    forgotten: bool = False
    """Nothing is kept for it any more."""
    blocked: str = ""
    """Why nothing can be pulled from here at present: `incompatible` or `side_channel_dead`."""
    point: int = 0
    """64 bits from the address."""

    def __post_init__(self) -> None:
        self.label = str(self.address)
        self.point = int.from_bytes(hashlib.blake2b(self.label.encode(), digest_size=8).digest(), "big")

    def admits(self, now: float) -> bool:
        """Whether a prefill may be sent here."""
        return not self.blocked and not self.leaving and self.breaker.admits(now)

    def next_rank(self, now: float) -> int:
        """The data-parallel rank for a transfer whose handoff must know it; -1 where there is one. Each in turn,
        those that bring nothing at present left out."""
        count = self.facts.ranks
        if count < 2:
            return -1
        turns = [(self.last_rank + 1 + step) % count for step in range(count)]
        self.last_rank = next((rank for rank in turns if self.ranks.admits(rank, now)), turns[0])
        return self.last_rank

    def has_place(self, adapter: str, now: float) -> bool:
        """Whether a prompt for this adapter pushes no other one out there; true as long as it has not told."""
        return self.slots is None or now >= self.slots_until or self.slots.has_place(adapter)

    @property
    def load(self) -> tuple[int, int]:
        """What a prompt that is sent here finds before it: of two endpoints the smaller one is to be preferred."""
        return self.tokens_in_flight, self.in_flight

    def share(self, now: float) -> float:
        """Part of a full share that it should get."""
        return min(1.0, max(FIRST_SHARE, (now - self.joined_at) / WARM_IN_S))

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
        samples: bool = False,
        learned: Callable[[Endpoint], None] = lambda _endpoint: None,
        forgotten: Callable[[Endpoint], None] = lambda _endpoint: None,
    ) -> None:
        """`samples`: the order of a header's targets means nothing. `learned` hears of endpoints that headers or
        discovery bring, `forgotten` of those that nobody needs any more: what was kept for them can be given back.
        """
        self.samples = samples
        self._learned = learned
        self._forgotten = forgotten
        self._now = now
        self._allow = allow
        self.configured = [Endpoint(address, configured=True) for address in dict.fromkeys(configured)]
        self.members: Sequence[Endpoint] = tuple(self.configured)
        """The candidates of a request whose header names none: configured and discovered ones. Replaced as a whole
        when discovery brings news, never changed."""
        self._known = {endpoint.address: endpoint for endpoint in self.configured}
        self._leaving: dict[Address, Endpoint] = {}
        self._departed: dict[Address, float] = {}
        """Addresses that discovery took away, and when."""
        self._unready: frozenset[Address] = frozenset()
        """Addresses that discovery knows and does not let us use."""
        self._header_cache: dict[bytes, tuple[Address, ...]] = {}
        self.adapters: frozenset[str] = frozenset()
        """What any of them listed as an adapter when it was last asked."""
        self._no_kv = 0
        self._random = random.Random()  # noqa: S311
        self._salt = self._random.getrandbits(64)
        self._homes: tuple[Sequence[Endpoint], Homes] | None = None
        """Of many `members`, until they are replaced."""

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._known.values())

    @property
    def leaving(self) -> Iterable[Endpoint]:
        """Those that left and still have requests."""
        return self._leaving.values()

    def candidates(self, header: list[bytes]) -> Sequence[Endpoint]:
        """Who may prefill this request: the header's endpoints in their order, else `members`. Where the header
        names only endpoints that have just left, `members` too: the gateway's news are a moment behind ours.

        Raises `BadAddress` for a header that is no address, `NotAllowed` if it names only foreign ones.
        """
        value = b",".join(header) if len(header) > 1 else header[0] if header else b""
        if not value.strip(b" ,\t"):  # a gateway may say "none" by an empty field
            return self.members
        return self._named(value)

    def _named(self, value: bytes) -> Sequence[Endpoint]:
        addresses = self._header_cache.get(value)
        if addresses is None:
            addresses = self._parse_header(value)
            if len(self._header_cache) >= MAX_ENDPOINTS:
                self._header_cache.clear()
            self._header_cache[value] = addresses
        found = []
        for address in addresses:
            endpoint = self._known.get(address)
            if endpoint is None and self._allow.admits(address) and not self._has_departed(address):
                endpoint = self._learn(address)
            if endpoint is not None:
                found.append(endpoint)
        if not found:
            if any(map(self._has_departed, addresses)):
                return self.members
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
        brought = [one for one in self._known.values() if not one.configured and not one.discovered]
        if len(brought) >= MAX_ENDPOINTS:
            for old in brought:
                if not old.users:
                    del self._known[old.address]
                    self._forget(old)
                    break
        return self._add(address)

    def _add(self, address: Address, joined_at: float = float("-inf")) -> Endpoint:
        endpoint = self._leaving.pop(address, None)
        if endpoint is not None:  # it is back before its last request ended: what is known of it still holds
            endpoint.leaving = False
        else:
            endpoint = Endpoint(address, configured=False, joined_at=joined_at)
            self._learned(endpoint)
        self._known[address] = endpoint
        return endpoint

    # -- what discovery tells --

    def discovered(self, present: Mapping[Address, bool]) -> tuple[list[Address], list[Address]]:
        """The whole set that a source knows: address -> whether it may get requests. Returns who joined, who left.

        Of more than `MAX_DISCOVERED` the first by address are used.
        """
        usable = {address for address, is_usable in present.items() if is_usable}
        if len(usable) > MAX_DISCOVERED:
            usable = set(sorted(usable)[:MAX_DISCOVERED])
        left = [one.address for one in self._known.values() if one.discovered and one.address not in usable]
        joined = []
        now = self._now()
        joined_at = now if self.members else float("-inf")
        for address in sorted(usable):
            endpoint = self._known.get(address) or self._add(address, joined_at)
            if not endpoint.discovered:
                endpoint.discovered = True
                joined.append(address)
        self._unready = frozenset(present) - usable
        for address in {*left, *self._unready}:
            self._depart(address, now)
        for address, since in list(self._departed.items()):
            if address in usable or now - since >= DEPARTED_FOR_S:
                del self._departed[address]
        if joined or left:
            found = [one for one in self._known.values() if one.discovered and not one.configured]
            self.members = (*self.configured, *found)
        return joined, left

    def _depart(self, address: Address, now: float) -> None:
        self._departed.pop(address, None)
        while len(self._departed) >= 4 * MAX_DISCOVERED:
            del self._departed[next(iter(self._departed))]
        self._departed[address] = now
        endpoint = self._known.get(address)
        if endpoint is None:
            return
        endpoint.discovered = False
        if endpoint.configured:  # the flag's word counts for as long as we run
            return
        del self._known[address]
        endpoint.leaving = True
        if endpoint.users:
            self._leaving[address] = endpoint
        else:
            self._forget(endpoint)

    def _has_departed(self, address: Address) -> bool:
        if address in self._unready:
            return True
        since = self._departed.get(address)
        return since is not None and self._now() - since < DEPARTED_FOR_S

    def _forget(self, endpoint: Endpoint) -> None:
        endpoint.leaving = endpoint.forgotten = True
        self._forgotten(endpoint)

    def told_models(self, endpoint: Endpoint, served: Served, until: float) -> None:
        """What the endpoint serves, as it counts until then."""
        endpoint.models.tell(served, until)
        told = [one.models.served.adapters for one in self if one.models.served is not None]
        self.adapters = frozenset().union(*told)

    def serving(self, name: str, own: Told, candidates: Sequence[Endpoint]) -> Serving:
        """Which of the candidates may prefill a request for the model or adapter `name`."""
        return serving(name, own, candidates, self.adapters, self._now())

    def choose(
        self,
        candidates: Sequence[Endpoint],
        tried: list[Endpoint],
        *,
        ordered: bool,
        may_repeat: bool,
        conversation: int = 0,
        tokens: int = 0,
        adapter: str = "",
    ) -> Endpoint | None:
        """The next endpoint to try, or None. `may_repeat`: one that was tried may come again if it is the only one.

        `ordered` keeps the order of the header; otherwise the less loaded of two that chance picks. The least
        loaded of all would be the same one for every sidecar of the fleet: the one that has just joined.

        What belongs to a `conversation` goes to the endpoint that has had it before, for its KV cache, unless more
        waits there than this prompt's `tokens` beyond what waits elsewhere: no cache saves more than those. Another
        sidecar sends it elsewhere: of a beginning that a whole fleet shares we see our own part of the load only.

        Where an `adapter` would have to push another one out, an endpoint that has it, or room for it, is preferred
        within the same bound; a conversation has its endpoint among these then.
        """
        now = self._now()
        if not candidates:
            return None
        if len(candidates) == 1:  # the common case
            only = candidates[0]
            return only if only.admits(now) and (may_repeat or not tried) else None
        if ordered:
            return next((one for one in candidates if one not in tried and one.admits(now)), None)
        best = self._best(candidates, tried, conversation, tokens, now)
        if adapter and best is not None and not best.has_place(adapter, now):
            with_place = [one for one in candidates if one.has_place(adapter, now)]
            other = self._best(with_place, tried, conversation, tokens, now) if with_place else None
            if other is not None and other.tokens_in_flight <= best.tokens_in_flight + tokens:
                return other
        return best

    def _best(
        self, candidates: Sequence[Endpoint], tried: list[Endpoint], conversation: int, tokens: int, now: float
    ) -> Endpoint | None:
        """See `choose`."""
        one = self._draw(candidates, tried, now)
        if one is None:
            return None
        other = self._draw(candidates, [*tried, one], now)
        best = one if other is None or one.load <= other.load else other
        if conversation:
            home = self._home(candidates, tried, conversation, now)
            if home is not None and home.tokens_in_flight <= best.tokens_in_flight + tokens:
                return home
        return best

    def _home(
        self, candidates: Sequence[Endpoint], but: list[Endpoint], conversation: int, now: float
    ) -> Endpoint | None:
        """The endpoint of a conversation (rendezvous hashing, among many by `Homes`: one that leaves or joins moves
        only its own), or None while it is that of one that is still to get little. At least one may be used."""

        def usable(endpoint: Endpoint) -> bool:
            return endpoint.admits(now) and endpoint not in but

        if candidates is self.members and len(candidates) > MANY:
            if self._homes is None or self._homes[0] is not candidates:
                self._homes = candidates, Homes(candidates, self._salt)
            homes = self._homes[1]
            home = homes.of(conversation)
            if not usable(home):
                home = homes.only(usable).of(conversation)
        else:
            ours = conversation ^ self._salt

            def score(endpoint: Endpoint) -> int:
                return (ours ^ endpoint.point) * MIX & MASK

            home = max(candidates, key=score)
            if not usable(home):
                home = max(filter(usable, candidates), key=score)
        return home if self._random.random() < home.share(now) else None

    def _draw(self, candidates: Sequence[Endpoint], but: list[Endpoint], now: float) -> Endpoint | None:
        """One of those that may be used, by their shares; none of `but`."""
        for _ in range(DRAWS):  # of many, nearly all may be used: no need to look at each
            one = self._random.choice(candidates)
            if self._random.random() < one.share(now) and one.admits(now) and one not in but:
                return one
        usable = [one for one in candidates if one not in but and one.admits(now)]
        while usable:  # ends: no share is below FIRST_SHARE
            one = self._random.choice(usable)
            if self._random.random() < one.share(now):
                return one
        return None

    def of_rank(self, candidates: Sequence[Endpoint], rank: int) -> Sequence[Endpoint]:
        """Those of the candidates whose rank `rank` may be used; all of them for a request that pins none (-1)."""
        if rank < 0:
            return candidates
        now = self._now()
        return [one for one in candidates if one.ranks.admits(rank, now)]

    def admits_host(self, host: str, port: int) -> bool:
        """Whether an engine on this host may be contacted: it prefills for us, or the allow list names it."""
        return self._allow.admits(Address(host, port)) or any(one.host == host for one in self._known)

    def any_usable(self, candidates: Sequence[Endpoint]) -> bool:
        now = self._now()
        return any(endpoint.admits(now) for endpoint in candidates)

    # -- what came of it --

    def least_tokens_in_flight(self, candidates: Sequence[Endpoint]) -> int:
        """What a prompt finds before it at the least loaded of those that may be used; 0 if none may. One that has
        just joined counts only where there are no others: it is idle because it gets little."""
        now = self._now()
        least: int | None = None
        least_of_new: int | None = None
        for one in candidates:
            tokens = one.tokens_in_flight
            if (least is not None and tokens >= least) or not one.admits(now):
                continue
            if one.share(now) == 1.0:
                least = tokens
                if not tokens:
                    return 0
            elif least_of_new is None or tokens < least_of_new:
                least_of_new = tokens
        return (least_of_new or 0) if least is None else least

    def begin(self, endpoint: Endpoint, tokens: int) -> int:
        """A prefill leg for a prompt of about so many tokens starts; returns its number if it is the breaker's
        trial, else 0."""
        endpoint.in_flight += 1
        endpoint.tokens_in_flight += tokens
        endpoint.users += 1
        return endpoint.breaker.begin()

    def end(self, endpoint: Endpoint, tokens: int) -> None:
        """The prefill leg is over; what it brought may still need the endpoint."""
        endpoint.in_flight -= 1
        endpoint.tokens_in_flight -= tokens

    def hold(self, endpoint: Endpoint) -> None:
        """Something of a request outlives it and needs the endpoint until it lets go."""
        endpoint.users += 1

    def let_go(self, endpoint: Endpoint) -> None:
        """A request that began needs nothing of the endpoint any more."""
        endpoint.users -= 1
        if endpoint.leaving and not endpoint.users and not endpoint.forgotten:
            del self._leaving[endpoint.address]
            self._forget(endpoint)

    def failed(self, endpoint: Endpoint, *, at_once: bool, trial: int, rank: int = -1) -> None:
        """Counts a failure against the endpoint, or against the one of its ranks that it is about."""
        endpoint.failures += 1
        if rank >= 0:
            endpoint.ranks.failed(rank, self._now(), at_once=at_once)
            endpoint.breaker.abandoned(trial)
        else:
            endpoint.breaker.failed(self._now(), at_once=at_once, trial=trial)

    def abandoned(self, endpoint: Endpoint, trial: int) -> None:
        """The breaker's trial ended without saying anything about the endpoint."""
        endpoint.breaker.abandoned(trial)

    def succeeded(self, endpoint: Endpoint) -> None:
        """A prefill was answered as it should be, and there is nothing to pull."""
        endpoint.breaker.succeeded()

    def brought_kv(self, endpoint: Endpoint, rank: int = -1) -> None:
        """A pull worked."""
        endpoint.breaker.succeeded()
        endpoint.ranks.succeeded(rank)
        self._no_kv = 0

    def brought_no_kv(self) -> None:
        """A prefill was paid for and brought nothing."""
        self._no_kv += 1

    @property
    def effective(self) -> bool:
        """False when remote prefills are paid for and bring no KV."""
        return self._no_kv < NO_KV_TO_BE_INEFFECTIVE
