"""A worker's copy of what the hub knows of prefill endpoints: requests use it as if it were the only one.

Outcomes count here at once and are told to the hub, whose count is the one that holds: it answers with the state
that follows, for this worker and the others. What is on its way is not undone by an answer that is older. Decides
nothing that `Endpoints` does not.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

import msgspec

from sidecar.connectors.connector import Handoff, Rejection
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.gate import moved
from sidecar.workers import messages
from sidecar.workers.messages import Place
from transport.side_channels import Address as RelayAddress

ANSWER_WITHIN_S = 5.0
"""A hub that does not turn its loop for so long is as good as gone."""

MAX_ENGINES = 256
"""Behind one endpoint whose addresses are kept: its data-parallel ranks."""

Send = Callable[[msgspec.Struct], None]

_NOWHERE = Place("", 0)
_HUB_SILENT = f"the hub process has not answered within {ANSWER_WITHIN_S:g} s"


class Replica(Endpoints):
    """Those of worker `number`. `used` hears of every endpoint whose legs or users have changed."""

    def __init__(
        self,
        configured: Iterable[Address],
        allow: AllowList,
        now: Callable[[], float],
        *,
        samples: bool,
        salt: int,
        number: int,
        send: Send,
        used: Callable[[Endpoint], None],
        forgotten: Callable[[Endpoint], None],
    ) -> None:
        super().__init__(configured, allow, now, samples=samples, learned=self._tell_learned, forgotten=forgotten)
        self._salt = salt
        self._worker = number
        self._send = send
        self._used = used
        self._hears = False
        """The hub tells of an endpoint: it need not be told."""
        self._outcomes = 0
        self._last_kv = 0
        """The last of them that counts for `effective`."""
        self._last_said: dict[Address, int] = {}
        """Endpoint -> number of the last outcome that the hub has not confirmed."""
        self._elsewhere: dict[Endpoint, tuple[int, int]] = {}
        """What is part of an endpoint's legs and tokens and is not ours."""

    # -- what the hub tells --

    def told(self, news: messages.News) -> None:
        endpoint = self.known(news.place) or (self._hear_of(news.place) if news.is_brought else None)
        if endpoint is None:
            return
        endpoint.blocked, endpoint.facts, endpoint.joined_at = news.blocked, news.facts, news.joined_at
        if news.heard < self._last_said.get(endpoint.address, 0):
            return  # it will be told again, with what we have said since
        self._last_said.pop(endpoint.address, None)
        endpoint.failures = news.failures
        own = news.trial_of == self._worker
        endpoint.breaker.take_over(news.breaker, trial=news.trial_of > 0, own=own)
        endpoint.ranks.take_over(news.ranks)

    def discovered(self, present: Mapping[Address, bool]) -> tuple[list[Address], list[Address]]:
        self._hears = True
        try:
            return super().discovered(present)
        finally:
            self._hears = False

    def _hear_of(self, place: Place) -> Endpoint | None:
        """Another worker's requests have been sent to it by their header, and ours will be."""
        address = Address(place.host, place.port)
        if self._has_departed(address):
            return None
        self._hears = True
        try:
            return self._learn(address)
        finally:
            self._hears = False

    def told_no_kv(self, news: messages.NoKv) -> None:
        if news.heard >= self._last_kv:
            self._no_kv = news.count

    def told_elsewhere(self, news: messages.Elsewhere) -> None:
        """The others' legs count like ours in every choice."""
        endpoint = self.known(news.place)
        if endpoint is None:
            return
        in_flight, tokens = self._elsewhere.get(endpoint, (0, 0))
        endpoint.in_flight += news.in_flight - in_flight
        endpoint.tokens_in_flight += news.tokens - tokens
        if news.in_flight or news.tokens:
            self._elsewhere[endpoint] = (news.in_flight, news.tokens)
        else:
            self._elsewhere.pop(endpoint, None)

    def told_models_of(self, told: messages.Models) -> None:
        endpoint = self.known(told.place)
        if endpoint is not None:
            self.told_models(endpoint, told.served, told.until)
            endpoint.slots, endpoint.slots_until = told.slots, told.slots_until

    def known(self, place: Place) -> Endpoint | None:
        address = Address(place.host, place.port)
        return self._known.get(address) or self._leaving.get(address)

    def use_of(self, endpoint: Endpoint) -> messages.Use:
        """What is ours."""
        in_flight, tokens = self._elsewhere.get(endpoint, (0, 0))
        return messages.Use(
            _place(endpoint), endpoint.in_flight - in_flight, endpoint.tokens_in_flight - tokens, endpoint.users
        )

    # -- what requests tell --

    def begin(self, endpoint: Endpoint, tokens: int) -> int:
        trial = super().begin(endpoint, tokens)
        if trial:
            self._tell("trial", endpoint)
        self._used(endpoint)
        return trial

    def end(self, endpoint: Endpoint, tokens: int) -> None:
        super().end(endpoint, tokens)
        self._used(endpoint)

    def hold(self, endpoint: Endpoint) -> None:
        super().hold(endpoint)
        self._used(endpoint)

    def let_go(self, endpoint: Endpoint) -> None:
        super().let_go(endpoint)
        self._used(endpoint)

    def failed(self, endpoint: Endpoint, *, at_once: bool, trial: int, rank: int = -1) -> None:
        super().failed(endpoint, at_once=at_once, trial=trial, rank=rank)
        self._tell("failed", endpoint, trial=trial > 0, at_once=at_once, rank=rank)

    def abandoned(self, endpoint: Endpoint, trial: int) -> None:
        super().abandoned(endpoint, trial)
        self._tell("abandoned", endpoint, trial=trial > 0)

    def succeeded(self, endpoint: Endpoint) -> None:
        is_news = not endpoint.breaker.is_clean
        super().succeeded(endpoint)
        if is_news:
            self._tell("succeeded", endpoint)

    def brought_kv(self, endpoint: Endpoint, rank: int = -1) -> None:
        is_news = self._no_kv > 0 or not endpoint.breaker.is_clean or bool(endpoint.ranks.standing)
        super().brought_kv(endpoint, rank)
        if is_news:
            self._tell("brought_kv", endpoint, rank=rank)
            self._last_kv = self._outcomes

    def brought_no_kv(self) -> None:
        super().brought_no_kv()
        self._outcomes += 1
        self._last_kv = self._outcomes
        self._send(messages.Outcome(self._outcomes, _NOWHERE, "brought_no_kv"))

    def _tell(
        self,
        event: messages.Event,
        endpoint: Endpoint,
        *,
        trial: bool = False,
        at_once: bool = False,
        rank: int = -1,
    ) -> None:
        self._outcomes += 1
        if not endpoint.forgotten:
            self._last_said[endpoint.address] = self._outcomes
        place = _place(endpoint)
        self._send(messages.Outcome(self._outcomes, place, event, trial=trial, at_once=at_once, rank=rank))

    def _tell_learned(self, endpoint: Endpoint) -> None:
        if not self._hears:
            self._send(messages.Learned(_place(endpoint)))

    def _forget(self, endpoint: Endpoint) -> None:
        self._last_said.pop(endpoint.address, None)
        self._elsewhere.pop(endpoint, None)
        super()._forget(endpoint)


def _place(endpoint: Endpoint) -> Place:
    return Place(endpoint.address.host, endpoint.address.port)


class RemoteGate:
    """The way to the hub's `Gate`. An address that it gave is good until there is news of the endpoint: the hub has
    some as soon as anything about a side channel changes, and until they are here its relay answers for it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._questions = 0
        self._open: dict[int, tuple[Callable[[RelayAddress | Rejection], None], asyncio.TimerHandle]] = {}
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._good: dict[Place, dict[tuple[str, int, str, int, int], RelayAddress]] = {}

    def admit(self, endpoint: Endpoint, handoff: Handoff, admitted: Callable[[Handoff | Rejection], None]) -> None:
        """Calls `admitted` with the handoff as the local engine may have it, or with why it may not."""
        place = _place(endpoint)
        named = (handoff.host, handoff.port, handoff.engine_id, handoff.tp_size, handoff.pp_size)
        good = self._good.setdefault(place, {})
        if (known := good.get(named)) is not None and not endpoint.forgotten:
            admitted(moved(handoff, known))
            return
        self._questions += 1
        question = self._questions

        def located(where: RelayAddress | Rejection) -> None:
            if isinstance(where, RelayAddress) and len(good) < MAX_ENGINES:
                good[named] = where
            admitted(moved(handoff, where))

        self._open[question] = (located, self._loop.call_later(ANSWER_WITHIN_S, self._give_up, question))
        self._send(messages.Locate(question, place, *named))

    def news(self, place: Place) -> None:
        """Something about the endpoint may have changed."""
        self._good.pop(place, None)

    def _give_up(self, question: int) -> None:
        located, _ = self._open.pop(question)
        located(Rejection("side_channel_dead", _HUB_SILENT))

    def located(self, answer: messages.Located) -> None:
        asked = self._open.pop(answer.question, None)
        if asked is None:
            return
        asked[1].cancel()
        if answer.fault:
            asked[0](Rejection(answer.fault, answer.detail))
        else:
            asked[0](RelayAddress(answer.host, answer.port))

    async def alive(self, handoff: Handoff, timeout_s: float) -> str:
        """ "" if the side channel that the handoff names answers for its engine."""
        self._questions += 1
        question = self._questions
        asked = self._asked[question] = self._loop.create_future()
        self._send(messages.AskAlive(question, handoff.host, handoff.port, handoff.engine_id, timeout_s))
        try:
            async with asyncio.timeout(timeout_s + ANSWER_WITHIN_S):
                problem: str = await asked
                return problem
        except TimeoutError:
            return _HUB_SILENT
        finally:
            del self._asked[question]

    def answered(self, answer: messages.Answered) -> None:
        asked = self._asked.get(answer.question)
        if asked is not None and not asked.done():
            asked.set_result(answer.problem)
