"""The hub's prefill endpoints, and what its workers' requests do with them. The count that holds is here.

Takes what workers tell and answers with what follows; does no I/O but through `send`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.workers import messages
from sidecar.workers.messages import Place

LINGER_S = 1.0
"""A worker may have begun to use an endpoint just before discovery took it away; what is kept for it waits so long
for that to be told."""


class Later(Protocol):
    """`loop.call_later`."""

    def __call__(self, delay_s: float, call: Callable[[Endpoint], None], endpoint: Endpoint, /) -> object: ...


class HubEndpoints(Endpoints):
    """`announce` hears of each whole set that discovery tells, and of those that have joined with it."""

    def __init__(
        self,
        configured: Iterable[Address],
        allow: AllowList,
        now: Callable[[], float],
        *,
        samples: bool,
        learned: Callable[[Endpoint], None],
        forgotten: Callable[[Endpoint], None],
        announce: Callable[[messages.Discovered, list[Endpoint]], None],
        later: Later,
    ) -> None:
        super().__init__(configured, allow, now, samples=samples, learned=learned, forgotten=forgotten)
        self._announce = announce
        self._later = later
        self.in_discovery = False
        """While discovery's word is taken over: workers hear of who joins afterwards, in one go."""
        self.present = messages.Discovered([])
        """What discovery told last."""

    @property
    def salt(self) -> int:
        return self._salt

    @property
    def no_kv(self) -> int:
        return self._no_kv

    def discovered(self, present: Mapping[Address, bool]) -> tuple[list[Address], list[Address]]:
        self.in_discovery = True
        try:
            joined, left = super().discovered(present)
        finally:
            self.in_discovery = False
        members = [(Place(address.host, address.port), usable) for address, usable in present.items()]
        if members != self.present.members:
            self.present = messages.Discovered(members)
            self._announce(self.present, [self._known[address] for address in joined])
        return joined, left

    def _depart(self, address: Address, now: float) -> None:
        endpoint = self._known.get(address)
        if endpoint is not None and not endpoint.configured:
            self.hold(endpoint)
            self._later(LINGER_S, self.let_go, endpoint)
        super()._depart(address, now)

    def at(self, place: Place) -> Endpoint | None:
        """The endpoint there, if it is known."""
        address = Address(place.host, place.port)
        return self._known.get(address) or self._leaving.get(address)

    def learn(self, place: Place) -> Endpoint | None:
        """The endpoint there, from now on if it was not known; None if it has just left."""
        address = Address(place.host, place.port)
        return self.at(place) or (None if self._has_departed(address) else self._learn(address))

    def changed_users(self, endpoint: Endpoint, by: int) -> None:
        """So many users more, or fewer."""
        endpoint.users += by
        if by < 0:
            self.hold(endpoint)
            self.let_go(endpoint)  # the last one may have gone


@dataclass(slots=True)
class _Account:
    """One worker's."""

    uses: dict[Place, messages.Use] = field(default_factory=dict)
    decode: list[messages.RankUse] = field(default_factory=list)
    heard: int = 0


class Ledger:
    """`send(worker, message)`. `changed` hears of each outcome, and of its endpoint if it has one."""

    def __init__(
        self,
        endpoints: HubEndpoints,
        send: Callable[[int, msgspec.Struct], None],
        now: Callable[[], float],
        ranks: int,
        changed: Callable[[Endpoint | None], None],
    ) -> None:
        self._endpoints = endpoints
        self._send = send
        self._now = now
        self._ranks = ranks
        self._changed = changed
        self._accounts: dict[int, _Account] = {}
        self._trials: dict[Endpoint, tuple[int, int]] = {}
        """Endpoints whose breaker has a trial -> the worker, and the trial's number here."""

    # -- workers come and go --

    def opened(self, worker: int) -> None:
        """A worker has been welcomed: it is told everything."""
        self._accounts[worker] = _Account()
        self._send(worker, self._endpoints.present)
        for endpoint in self._endpoints:
            self._tell(worker, endpoint)
        self._send(worker, messages.NoKv(self._endpoints.no_kv, 0))

    def serves(self, worker: int) -> None:
        """It can take what others have open."""
        for place in {place for account in self._accounts.values() for place in account.uses}:
            self._tell_elsewhere(place)
        self._tell_decode()

    def closed(self, worker: int) -> None:
        """It is gone, and with it everything that it had open."""
        account = self._accounts.pop(worker, None)
        if account is None:
            return
        for endpoint, (owner, trial) in list(self._trials.items()):
            if owner == worker:
                del self._trials[endpoint]
                endpoint.breaker.abandoned(trial)
                self.tell(endpoint)
        for place in account.uses:
            self._take_over(worker, account.uses[place], messages.Use(place, 0, 0, 0))
        self._tell_decode()

    # -- what the hub finds out --

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing is kept for the endpoint any more."""
        self._trials.pop(endpoint, None)

    def tell(self, endpoint: Endpoint) -> None:
        """Everyone hears how the endpoint stands."""
        for worker in self._accounts:
            self._tell(worker, endpoint)

    def _tell(self, worker: int, endpoint: Endpoint) -> None:
        self._send(
            worker,
            messages.News(
                _place(endpoint),
                not (endpoint.configured or endpoint.discovered or endpoint.leaving),
                endpoint.blocked,
                endpoint.facts,
                endpoint.joined_at,
                endpoint.failures,
                endpoint.breaker.standing,
                self._trials.get(endpoint, (0, 0))[0],
                endpoint.ranks.standing,
                self._accounts[worker].heard,
            ),
        )

    # -- what workers tell --

    def learned(self, message: messages.Learned) -> None:
        endpoint = self._endpoints.learn(message.place)
        if endpoint is not None:
            self.tell(endpoint)
            self._tell_elsewhere(message.place)

    def outcome(self, worker: int, outcome: messages.Outcome) -> None:
        self._accounts[worker].heard = outcome.number
        if outcome.event == "brought_no_kv":
            self._endpoints.brought_no_kv()
            self._tell_no_kv()
            self._changed(None)
            return
        endpoint = self._endpoints.learn(outcome.place)
        if endpoint is None:
            return
        self._count(worker, endpoint, outcome)
        self.tell(endpoint)
        if outcome.event != "trial":  # what comes of it is news
            self._changed(endpoint)

    def _count(self, worker: int, endpoint: Endpoint, outcome: messages.Outcome) -> None:
        owner, trial = self._trials.get(endpoint, (0, 0))
        own_trial = trial if outcome.trial and owner == worker else 0
        match outcome.event:
            case "trial":  # two workers may begin one in the same millisecond: the first is the one that counts
                if endpoint.breaker.admits(self._now()) and (number := endpoint.breaker.begin()):
                    self._trials[endpoint] = (worker, number)
                return
            case "abandoned":
                if own_trial:
                    self._endpoints.abandoned(endpoint, own_trial)
            case "failed":
                self._endpoints.failed(endpoint, at_once=outcome.at_once, trial=own_trial, rank=outcome.rank)
            case "succeeded":
                self._endpoints.succeeded(endpoint)
            case "brought_kv":
                self._endpoints.brought_kv(endpoint, outcome.rank)
                self._tell_no_kv()
        if own_trial or outcome.event in ("succeeded", "brought_kv"):
            self._trials.pop(endpoint, None)

    def _tell_no_kv(self) -> None:
        for worker, account in self._accounts.items():
            self._send(worker, messages.NoKv(self._endpoints.no_kv, account.heard))

    def used(self, worker: int, use: messages.Use) -> None:
        uses = self._accounts[worker].uses
        before = uses.pop(use.place, messages.Use(use.place, 0, 0, 0))
        if use.in_flight or use.tokens or use.users:
            if self._endpoints.learn(use.place) is None:
                return
            uses[use.place] = use
        self._take_over(worker, before, use)

    def _take_over(self, worker: int, before: messages.Use, use: messages.Use) -> None:
        endpoint = self._endpoints.at(use.place)
        if endpoint is None:
            return
        endpoint.in_flight += use.in_flight - before.in_flight
        endpoint.tokens_in_flight += use.tokens - before.tokens
        self._endpoints.changed_users(endpoint, use.users - before.users)
        self._tell_elsewhere(use.place, but=worker)

    def _tell_elsewhere(self, place: Place, *, but: int = 0) -> None:
        nothing = messages.Use(place, 0, 0, 0)
        uses = {worker: account.uses.get(place, nothing) for worker, account in self._accounts.items()}
        in_flight, tokens = sum(one.in_flight for one in uses.values()), sum(one.tokens for one in uses.values())
        for worker, own in uses.items():
            if worker == but:  # the others' have not changed
                continue
            self._send(worker, messages.Elsewhere(place, in_flight - own.in_flight, tokens - own.tokens))

    def decode_used(self, worker: int, use: messages.DecodeUse) -> None:
        not_open = self._ranks - len(use.ranks)
        self._accounts[worker].decode = [*use.ranks, *[messages.RankUse()] * not_open]
        self._tell_decode(but=worker)

    def _tell_decode(self, *, but: int = 0) -> None:
        for worker in self._accounts:
            if worker == but:
                continue
            others = [one.decode for number, one in self._accounts.items() if number != worker and one.decode]
            sums = [
                messages.RankUse(
                    sum(one[rank].in_flight for one in others),
                    sum(one[rank].tokens for one in others),
                    sum(one[rank].long_gaps for one in others),
                )
                for rank in range(self._ranks)
            ]
            self._send(worker, messages.DecodeElsewhere(sums))


def _place(endpoint: Endpoint) -> Place:
    return Place(endpoint.address.host, endpoint.address.port)
