"""One worker: serves requests and asks the hub for everything that a pod has one of.

`python -m sidecar.workers FD` is how the hub starts it; its first message is what there is to know. It ends when
the hub says so, and when there is no hub any more: answers that are open are brought to their end first.
"""

import asyncio
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from sidecar import log, process, tls
from sidecar.admin.observer import Observer
from sidecar.background import Background
from sidecar.calls import Calls
from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import Channel
from sidecar.decision.guards import Mode
from sidecar.edge.service import Live
from sidecar.prefill.address import Address, AllowList, parse
from sidecar.prefill.endpoints import Endpoint
from sidecar.serving import Serving, Shared, make_tracer
from sidecar.workers import messages
from sidecar.workers.budget import SharedBudget
from sidecar.workers.link import Link
from sidecar.workers.replica import RemoteGate, Replica
from sidecar.workers.totals import totals_of

_log = logging.getLogger("sidecar")

TELL_EVERY_S = 0.02
"""What requests have open is told so late at most, once for all that changed. A prefill leg takes longer."""

_DECODER = msgspec.msgpack.Decoder(messages.ToWorker)


def _nothing() -> None:
    return None


class WorkerObserver(Observer):
    """Says when legs change; what has changed of endpoints the hub says, once."""

    def __init__(self, endpoints: Replica, budget: SharedBudget) -> None:
        super().__init__(endpoints, budget)
        self.legs_changed: Callable[[], None] = _nothing

    def leg_started(self, leg: str) -> None:
        super().leg_started(leg)
        self.legs_changed()

    def leg_ended(self, leg: str) -> None:
        super().leg_ended(leg)
        self.legs_changed()

    def tell_changes(self, endpoint: Endpoint | None) -> None:
        """The hub's business."""


class Worker:
    """All the parts of one worker process. Made on the running loop."""

    def __init__(self, welcome: messages.Welcome, link: Link[messages.ToWorker]) -> None:
        """Raises `tls.BadTls`."""
        settings = self._settings = welcome.settings
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._background = Background()
        self._live = Live(Mode(settings.disagg))
        rows = settings.workers
        self._budget = SharedBudget(
            welcome.lock,
            rows,
            welcome.number - 1,
            settings.recompute_max_concurrent,
            settings.recompute_max_tokens,
        )
        self._endpoints = Replica(
            [parse(text) for text in settings.prefill],
            AllowList(settings.prefill_allow),
            time.monotonic,
            samples=settings.enable_prefiller_sampling == "on",
            salt=welcome.salt,
            number=welcome.number,
            send=link.send,
            used=self._used,
            forgotten=self._forget,
        )
        self._gate: RemoteGate | None = None
        if settings.nixl_relay == "on" and CONNECTORS[settings.kv_connector].channel is Channel.NIXL:
            self._gate = RemoteGate(link.send)
        self._observer = WorkerObserver(self._endpoints, self._budget)
        self._observer.legs_changed = self._tell_soon
        self._tls = tls.Tls(settings, self._observer.tls_handshake)
        self._calls = Calls(settings, self._tls)
        self._tracer = make_tracer(settings, self._observer.traced)
        self._elsewhere: list[messages.RankUse] | None = None
        """What others do at each rank of the decode engine; None: nobody has told yet."""
        self._told_decode = [messages.RankUse()] * settings.data_parallel_size
        shared = Shared(
            self._live,
            self._endpoints,
            self._budget,
            self._observer,
            self._gate,
            busy_elsewhere=lambda rank: self._elsewhere[rank].in_flight if self._elsewhere is not None else 0,
        )
        self._serving = Serving(settings, shared, self._tls, self._calls, self._tracer, self._background)
        self._told_uses: dict[messages.Place, messages.Use] = {}
        self._changed: set[Endpoint] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._serves = False
        self.over: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Raises `OSError` if a port cannot be had."""
        settings = self._settings
        process.raise_descriptor_limit()
        if self._tls.in_use:
            process.give_large_blocks_back()
        self._calls.open()
        self._serving.start()
        for rank in range(settings.data_parallel_size):
            await self._serving.listen(rank)
            self._serving.rules[rank].models.doubted = partial(self._link.send, messages.Reloaded(rank))
        self._background.keep("tidying memory", process.Tidying(self._observer.pauses.observe).run)
        self._background.keep("watch over descriptors", process.watch_descriptors)
        if self._tls.reads_files:
            self._background.keep("watch over certificates and keys", self._tls.watch)
        self._loop.add_signal_handler(signal.SIGTERM, self.drain)
        process.settle()
        self._serves = True

    # -- what the hub tells --------------------------------------------------------------------------------

    def heard(self, message: messages.ToWorker) -> None:
        match message:
            case messages.News():
                self._endpoints.told(message)
                if self._gate is not None:
                    self._gate.news(message.place)
            case messages.NoKv():
                self._endpoints.told_no_kv(message)
            case messages.Elsewhere():
                self._endpoints.told_elsewhere(message)
            case messages.DecodeElsewhere():
                self._decode_elsewhere(message.ranks)
            case messages.Located():
                assert self._gate is not None
                self._gate.located(message)
            case messages.Answered():
                assert self._gate is not None
                self._gate.answered(message)
            case messages.Load() | messages.OwnModels() | messages.Models():
                self._engines_told(message)
            case messages.Tell():
                self._report(message.question, decisions=message.decisions)
            case messages.Discovered():
                self._endpoints.discovered(
                    {Address(place.host, place.port): usable for place, usable in message.members}
                )
            case messages.State():
                self._live.mode, self._live.engine_facts = Mode(message.mode), message.engine_facts
                if message.draining:
                    self.drain()

    def _engines_told(self, told: messages.Load | messages.OwnModels | messages.Models) -> None:
        if isinstance(told, messages.Models):
            self._endpoints.told_models_of(told)
            return
        if told.rank >= len(self._serving.rules):
            return
        rules = self._serving.rules[told.rank]
        if isinstance(told, messages.OwnModels):
            rules.models.tell(told.served, told.until)
        else:
            rules.signals.tell(told.load, told.at)

    def _decode_elsewhere(self, ranks: list[messages.RankUse]) -> None:
        """The others' prompts count like ours; long gaps from before our time have been forgotten, or nearly."""
        if len(self._serving.rules) < len(ranks):
            return  # not yet
        for rules, new, old in zip(self._serving.rules, ranks, self._elsewhere or ranks, strict=True):
            rules.local_ahead += new.tokens - (old.tokens if self._elsewhere is not None else 0)
            rules.signals.allowance.take_elsewhere(max(0.0, new.long_gaps - old.long_gaps))
        self._elsewhere = ranks

    def _report(self, question: int, *, decisions: bool) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        totals = totals_of(self._observer.collection, usage.ru_utime + usage.ru_stime, process.resident_bytes())
        told = msgspec.json.encode(self._observer.decisions()) if decisions else b""
        self._link.send(messages.Report(question, totals, told))

    # -- what requests do ----------------------------------------------------------------------------------

    def _used(self, endpoint: Endpoint) -> None:
        self._changed.add(endpoint)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = self._loop.call_later(TELL_EVERY_S, self._tell_use)

    def _tell_use(self) -> None:
        self._telling = None
        changed, self._changed = self._changed, set()
        for endpoint in changed:
            use = self._endpoints.use_of(endpoint)
            if use != self._told_uses.get(use.place, messages.Use(use.place, 0, 0, 0)):
                self._told_uses[use.place] = use
                self._link.send(use)
            if not use.users:
                self._told_uses.pop(use.place, None)
        decode = [self._use_of(rank) for rank in range(len(self._serving.rules))]
        if decode != self._told_decode:
            self._told_decode = decode
            self._link.send(messages.DecodeUse(decode))
        if any(one.tokens for one in decode):  # the end of a prompt that is computed here changes no leg
            self._tell_soon()

    def _use_of(self, rank: int) -> messages.RankUse:
        rules = self._serving.rules[rank]
        elsewhere = self._elsewhere[rank].tokens if self._elsewhere is not None else 0
        long_gaps = rules.signals.allowance.taken
        return messages.RankUse(self._serving.busy(rank), rules.local_ahead - elsewhere, long_gaps)

    def _forget(self, endpoint: Endpoint) -> None:
        self._observer.forget(endpoint)
        self._serving.forget(endpoint)
        if self._gate is not None:
            self._gate.news(messages.Place(endpoint.address.host, endpoint.address.port))

    # -- the end -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no new connection; `over` is done when no answer is open any more."""
        if self._live.draining:
            return
        self._live.draining = True
        if self._serves:
            self._background.start("drain", self._drain())
        else:
            self.over.set_result(None)

    async def _drain(self) -> None:
        try:
            await self._serving.drain()
        finally:
            self.over.set_result(None)

    async def close(self) -> None:
        self._serving.close()
        if self._telling is not None:
            self._telling.cancel()
        await self._background.close()
        if self._tracer is not None:
            await self._tracer.close()
        self._report(0, decisions=False)
        await self._calls.close()
        self._budget.close()


class _Life:
    """From the first message to the end of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: Link[messages.ToWorker] = Link(_DECODER, self._heard, self._lost)
        self._welcomed: asyncio.Future[Worker] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def _heard(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Welcome):
            settings = message.settings
            log.configure(settings.log_format, settings.log_level, worker=message.number)
            try:
                self._welcomed.set_result(Worker(message, self._link))
            except tls.BadTls as error:  # a file has changed since it was checked
                self._link.send(messages.Serves(str(error)))
                self._link.close()
        elif self._welcomed.done():
            self._welcomed.result().heard(message)

    def _lost(self) -> None:
        """The hub is gone, or has closed."""
        if not self._gone.done():
            self._gone.set_result(None)
        if not self._welcomed.done():
            self._welcomed.cancel()
        elif not self._welcomed.cancelled():
            self._welcomed.result().drain()

    async def run(self, descriptor: int) -> int:
        sock = socket.socket(fileno=descriptor)
        await self._loop.create_unix_connection(lambda: self._link, sock=sock)
        try:
            worker = await self._welcomed
        except asyncio.CancelledError:
            return 1
        try:
            await worker.start()
        except OSError as error:
            self._link.send(messages.Serves(error.strerror or str(error)))
            await worker.close()
            self._link.close()
            await self._gone
            return 1
        self._link.send(messages.Serves(""))
        await worker.over
        await worker.close()
        self._link.close()
        await self._gone
        return 0


async def _run(descriptor: int) -> int:
    return await _Life().run(descriptor)


def main() -> int:
    """Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the hub's business
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(int(sys.argv[1])))
