"""The life of one request: its states, the events that move it, the commands that come out. No I/O.

The edge tells the machine what happened (a method call) and carries out the one command that it returns. What a
fault leads to is looked up in the failure table; the machine adds only bookkeeping: which endpoints were tried,
what is reserved, and that a handoff is used once. `close` gives back whatever is still held, however it ended.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from sidecar.connectors.connector import Channel, Connector, Handoff, PrefillAnswer, Rejection, Source
from sidecar.decision.guards import Decision, Kind
from sidecar.exchange.budget import Recomputes
from sidecar.exchange.commands import (
    CLOSE,
    PEEK,
    RELAY,
    TO_FIRST_BYTE,
    WAIT,
    Answer,
    BreakOff,
    Check,
    Command,
    Decode,
    Prefill,
)
from sidecar.exchange.failures import TABLE, Row, Stage, Then, prefill_fault
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.ranks import rank_of_engine

# -- what happened, for metrics, logs and /decisions ---------------------------------------------------------


@dataclass(slots=True)
class Fault:
    """One fault that a request met. `detail` names addresses and types, never what a client sent."""

    row: Row
    endpoint: str
    detail: str


_decode_answer = msgspec.json.Decoder(PrefillAnswer).decode
_decode_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]).decode


def _token_ids(raw: msgspec.Raw, count: int) -> bytes | Rejection:
    """The prompt's token ids as the decode engine may have them; b"" if the prefill engine gave none."""
    given = bytes(raw)
    if given in (b"", b"null"):
        return b""
    try:
        ids = _decode_ids(given)
    except msgspec.MsgspecError as error:
        return Rejection("invalid", f"prompt_token_ids: {str(error).splitlines()[0][:200]}")
    if len(ids) != count:
        return Rejection("invalid", f"{len(ids)} prompt_token_ids for {count} prompt tokens")
    return given


class Exchange:
    """One request that has been read and decided on."""

    __slots__ = (
        "_attempts_left",
        "_block_size",
        "_budget",
        "_channel_port",
        "_checked",
        "_client_left",
        "_connector",
        "_endpoints",
        "_handoff_born",
        "_held_tokens",
        "_holds_endpoint",
        "_lease_s",
        "_now",
        "_prefilling",
        "_rank",
        "_recompute_on_failure",
        "_spent",
        "_to_release",
        "_trial",
        "_tried",
        "decision",
        "faults",
        "fell_back",
        "handoff",
        "handoff_outcomes",
        "is_event_stream",
        "on_attempt",
        "prefill_ahead",
        "prefill_cached_tokens",
        "prefill_endpoint",
        "prefill_rank",
        "prompt_tokens",
        "reason",
        "stage",
        "transfer_id",
        "wants_token_ids",
        "what",
    )

    def __init__(
        self,
        decision: Decision,
        *,
        connector: Connector,
        endpoints: Endpoints,
        budget: Recomputes,
        now: Callable[[], float],
        attempts: int,
        recompute: bool,
        lease_s: float,
        on_attempt: Callable[[str], None],
        wants_token_ids: bool = False,
        channel_port: int = 0,
    ) -> None:
        """`now` is a monotonic clock; `lease_s` is how old a handoff may get; `on_attempt` hears the outcome of
        each prefill attempt; `wants_token_ids`: the prefill leg asks for the prompt's token ids, for the decode
        leg; `channel_port`: where rank 0 of a prefill engine has its control channel."""
        self.decision = decision
        self.what = decision.kind
        """What became of the request so far."""
        self.reason = decision.reason
        self.stage = Stage.READING
        self.prefill_endpoint: Endpoint | None = None
        self.handoff: Handoff | None = None
        """The one handoff, while it is alive."""
        self.handoff_outcomes: list[str] = []
        """What became of each handoff, or of an answer that should have held one."""
        self.fell_back: Row | None = None
        """Why the prompt was recomputed."""
        self.faults: list[Fault] = []
        self.prompt_tokens = 0
        """As the prefill engine counted them, 0 before."""
        self.prefill_cached_tokens = 0
        """Of which it had the KV, as far as it says."""
        self.prefill_ahead = 0
        """Prompt tokens that were under way at the endpoint when the last prefill leg started."""
        self.transfer_id = ""
        """What the two legs of the present attempt call their transfer, where the connector has them name it."""
        self.prefill_rank = -1
        """The data-parallel rank that the prefill leg has to be pinned to, -1: none."""
        self.is_event_stream = False
        """The decode engine streams its answer."""
        self.on_attempt = on_attempt
        self._connector = connector
        self._endpoints = endpoints
        self._budget = budget
        self._now = now
        self._attempts_left = attempts
        self._recompute_on_failure = recompute
        self._lease_s = lease_s
        self._channel_port = channel_port
        self._tried: list[Endpoint] = []
        self.wants_token_ids = wants_token_ids
        self._prefilling = False
        self._block_size = 0
        self._checked = False
        """The handoff at hand passed the side channel's check."""
        self._spent: Handoff | None = None
        """The handoff that a decode leg carries, until that leg is answered."""
        self._to_release: Handoff | None = None
        self._client_left = False
        self._trial = 0
        """Number of this request as its breaker's trial, while it has not said how it went."""
        self._rank = -1
        """Rank of the prefill endpoint that the handoff is of, as far as there are any and it is known."""
        self._holds_endpoint = False
        self._held_tokens = -1
        self._handoff_born = 0.0

    # -- events --

    def start(self) -> Command:
        """The request is read and decided on."""
        decision = self.decision
        if decision.kind is Kind.REFUSED:
            command = self.fault(decision.reason, decision.detail)
            self.reason = decision.reason
            return command
        if decision.kind is Kind.REMOTE:
            self.stage = Stage.PREFILL
            return self._next_prefill() or self.fault("none_usable")
        if decision.budgeted:
            self.stage = Stage.PREFILL
            return self._policy(TABLE[Stage.PREFILL, "none_usable"], decision.reason, decision.detail)
        self.stage = Stage.DECODE
        return Decode(None)

    def prefill_answered(self, status: int, body: bytes, born: float, block_size: int) -> Command:
        """The prefill endpoint's whole answer is here. `born`: when its head came, from when on the lease is
        counted; `block_size`: the local engine's, 0 if unknown."""
        if status == 404 and self.decision.adapter and self.prefill_endpoint is not None:
            self.prefill_endpoint.models.refused(self.decision.adapter, self._now())
            return self.fault("no_adapter")
        if status != 200:
            return self.fault(prefill_fault(status), f"status {status}")
        endpoint = self._end_prefill("ok")
        self._rank = max(self.decision.rank, self.prefill_rank)
        self._block_size = block_size
        self.stage = Stage.HANDOFF
        try:
            answer = _decode_answer(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return self._no_kv(Rejection("invalid", f"the prefill answer: {str(error).splitlines()[0][:200]}"))
        rank = max(self.decision.rank, self.prefill_rank, 0)
        source = Source(
            endpoint.hosts,
            endpoint.facts,
            block_size,
            self.transfer_id,
            endpoint.peer_host or endpoint.address.host,
            self._channel_port + (rank if self._connector.channel is Channel.P2P else 0),
            rank,
        )
        result = self._connector.read(answer, source)
        if isinstance(result, Rejection):
            return self._no_kv(result)
        if not self._connector.names_transfers:
            self._rank = rank_of_engine(result.engine_id)
        self.prompt_tokens, self.prefill_cached_tokens = result.prompt_tokens, result.prefill_cached_tokens
        if self.decision.is_exact and result.prompt_tokens != self.decision.estimated_tokens:
            # KV of another prompt is wrong text with 200, or the end of the decode engine.
            seen = f"prefill had {result.prompt_tokens} tokens, the request has {self.decision.estimated_tokens}"
            return self._no_kv(Rejection("invalid", seen))
        if result.empty:  # nothing to pull, nothing is wrong, and the decode engine must not be asked to
            self.handoff_outcomes.append("used")
            self._endpoints.succeeded(endpoint)
            self._trial = 0
            self.stage = Stage.DECODE
            return Decode(None)
        if self.wants_token_ids and not result.token_ids:
            ids = _token_ids(answer.prompt_token_ids, result.prompt_tokens)
            if isinstance(ids, Rejection):
                return self._no_kv(ids)
            result = msgspec.structs.replace(result, token_ids=ids)
        self.handoff = result
        self._handoff_born = born
        self._checked = False
        return Check(result)

    def handoff_checked(self, result: Handoff | Rejection) -> Command:
        """The side channel's word on the handoff."""
        self._checked = True
        if isinstance(result, Rejection):
            # What could not be asked says nothing of whether KV comes.
            if not TABLE[Stage.HANDOFF, result.fault].blames and result.fault != "unverifiable":
                self._endpoints.brought_no_kv()
            self._strand()
            return CLOSE if self._client_left else self.fault(result.fault, result.detail)
        endpoint = self.prefill_endpoint
        assert endpoint is not None
        misfit = self._connector.fits(result, endpoint.facts, self._block_size)
        if misfit is not None:
            self.handoff = None
            return CLOSE if self._client_left else self._no_kv(misfit)
        self.handoff = result
        if self._client_left:
            self._release()
            return CLOSE
        return Decode(result)

    def _release(self) -> None:
        if self.handoff is not None and self._connector.releases:
            self._to_release, self.handoff = self.handoff, None
            self.handoff_outcomes.append("released")

    def take_release(self) -> Handoff | None:
        """The handoff whose blocks have to be given back now, once."""
        handoff, self._to_release = self._to_release, None
        return handoff

    def _no_kv(self, rejection: Rejection) -> Command:
        self._endpoints.brought_no_kv()
        self.handoff_outcomes.append("invalid")
        return self.fault(rejection.fault, rejection.detail)

    def decode_connected(self) -> Command | None:
        """A connection to the decode engine is there; None: go ahead and send. The handoff's last check."""
        if self.handoff is not None and self._now() - self._handoff_born >= self._lease_s:
            self.handoff = None
            self.handoff_outcomes.append("expired")
            return self.fault("expired", f"older than {self._lease_s:g} s")
        return None

    def decode_sent(self) -> None:
        """The decode leg is on its way. From here on the handoff is spent, whatever happens."""
        self._spent, self.handoff = self.handoff, None
        if self._spent is None:
            self.stage = Stage.DECODE
            return
        self.stage = Stage.PULL
        self.handoff_outcomes.append("used")

    def decode_status(self, status: int) -> None:
        """The decode engine's status, whoever still waits for it. An engine that refuses a request before its
        scheduler has seen it does not free the blocks (vLLM 0.32: a pydantic 400, errors of inference/v1/generate).
        """
        spent, self._spent = self._spent, None
        if spent is not None and self._connector.releases and 400 <= status < 500:
            self._to_release = spent
            self.handoff_outcomes[-1] = "released"

    def decode_answered(self, status: int, is_event_stream: bool) -> Command:
        """The decode engine's head is here."""
        self.is_event_stream = is_event_stream
        if self.stage is Stage.PULL:
            if status >= 500:
                return self.fault("server_error", f"status {status}")
            if status == 200 and is_event_stream:
                return PEEK
            if status == 200:
                self._pulled()
        self._streaming()
        return RELAY

    def first_event(self, is_error: bool) -> Command:
        """The stream that is held back has shown what it is."""
        if is_error:
            return self.fault("error_event")
        self._pulled()
        self._streaming()
        return RELAY

    def fault(self, name: str, detail: str = "") -> Command:
        """Something went wrong, or the client left (`client_left`). `name` is a fault of the current stage."""
        row = TABLE[self.stage, name]
        endpoint = self.prefill_endpoint
        self.faults.append(Fault(row, endpoint.label if endpoint is not None else "", detail))
        if self._prefilling:
            self._end_prefill(name)
        elif row.blames and endpoint is not None:
            self._blame(endpoint, name)
            if row.stage is Stage.PULL:
                self._endpoints.brought_no_kv()
        match row.then:
            case Then.ANSWER:
                self.what, self.reason = Kind.REFUSED, row.reason
                self._strand()
                return Answer(row, detail)
            case Then.RELAY:
                return RELAY
            case Then.NEXT:
                self._strand()
                self.stage = Stage.PREFILL
                return self._next_prefill() or self._policy(row, row.reason, detail)
            case Then.POLICY:
                return self._policy(row, row.reason, detail)
            case Then.NEXT_OR_HERE:
                return self._next_prefill() or self._here()
            case Then.BREAK_OFF:
                return BreakOff(row)
            case Then.RELEASE:
                self._client_left = True
                if not self._checked:  # it must not reach the engine, not even to be given back
                    return WAIT
                self._release()
                return CLOSE
            case Then.TO_FIRST_BYTE:
                return TO_FIRST_BYTE
            case Then.CLOSE:
                return CLOSE

    def summary(self) -> str:
        """What became of the request, for `x-pd-decision`."""
        if self.what is Kind.REMOTE and self.prefill_endpoint is not None:
            return f"remote; prefill={self.prefill_endpoint.label}"
        return f"{self.what}; reason={self.reason}"

    def close(self) -> None:
        """The request is over, in whatever way: everything reserved is given back. May be called twice."""
        if self._prefilling:
            self._end_prefill("client_left")
        self._leave_endpoint()
        self._strand()
        self._spent = None  # with the prompt's ids in it, and `/decisions` remembers this request
        self._give_back_budget()

    # -- steps --

    def _next_prefill(self) -> Command | None:
        if not self._attempts_left:
            return None
        decision = self.decision
        # An only endpoint is asked again where the connection, not the engine, may have been the trouble.
        may_repeat = bool(self.faults) and self.faults[-1].row.fault == "reset"
        endpoint = self._endpoints.choose(
            decision.candidates,
            self._tried,
            ordered=decision.ordered,
            may_repeat=may_repeat,
            conversation=decision.conversation,
            tokens=decision.estimated_tokens,
            adapter=decision.adapter,
        )
        if endpoint is None:
            return None
        self._leave_endpoint()
        self._rank = -1
        self._attempts_left -= 1
        self._tried.append(endpoint)
        self.prefill_endpoint = endpoint
        self._prefilling = self._holds_endpoint = True
        self.prefill_ahead = endpoint.tokens_in_flight
        self._trial = self._endpoints.begin(endpoint, decision.estimated_tokens)
        if self._connector.names_transfers:
            self.transfer_id = secrets.token_hex(16)  # whoever can guess it could have the blocks
            self.prefill_rank = -1 if decision.rank >= 0 else endpoint.next_rank(self._now())
        return Prefill(endpoint)

    def _end_prefill(self, outcome: str) -> Endpoint:
        endpoint = self.prefill_endpoint
        assert endpoint is not None
        self._prefilling = False
        self._endpoints.end(endpoint, self.decision.estimated_tokens)
        self.on_attempt(outcome)
        row = TABLE.get((Stage.PREFILL, outcome))
        if row is not None and row.blames:
            self._blame(endpoint, outcome)
        return endpoint

    def _leave_endpoint(self) -> None:
        """Nothing more will be heard of the present endpoint; a trial without a verdict is no verdict."""
        endpoint = self.prefill_endpoint
        if not self._holds_endpoint or endpoint is None:
            return
        self._holds_endpoint = False
        if self._trial:
            self._endpoints.abandoned(endpoint, self._trial)
        self._trial = 0
        self._endpoints.let_go(endpoint)

    def _blame(self, endpoint: Endpoint, fault: str) -> None:
        # What costs a timeout, or can be known at once, is not tried again and again.
        at_once = fault in ("refused", "unreachable", "peer_silent", "side_channel_dead")
        self._endpoints.failed(endpoint, at_once=at_once, trial=self._trial, rank=self._rank)
        self._trial = 0

    def _here(self) -> Command:
        """As the guard had decided, had it known that no prefill endpoint serves what the request names."""
        self.what, self.reason = Kind.LOCAL, "model"
        self.stage = Stage.DECODE
        self._leave_endpoint()
        return Decode(None)

    def _policy(self, row: Row, reason: str, detail: str = "") -> Command:
        self._strand()
        if not self._recompute_on_failure:
            self.what, self.reason = Kind.REFUSED, row.reason
            return Answer(row, detail)
        tokens = self.decision.estimated_tokens
        if not self._budget.take(tokens):
            over = TABLE[Stage.DECODE, "over_budget"]
            self.what, self.reason = Kind.REFUSED, over.reason
            return Answer(over, detail)
        self._held_tokens = tokens
        if self.decision.kind is Kind.REMOTE:
            self.what = Kind.RECOMPUTE
            self.fell_back = row
        self.reason = reason
        self.stage = Stage.DECODE
        self._leave_endpoint()
        return Decode(None)

    def _pulled(self) -> None:
        endpoint = self.prefill_endpoint
        assert endpoint is not None
        self._endpoints.brought_kv(endpoint, self._rank)
        self._trial = 0

    def _streaming(self) -> None:
        self.stage = Stage.STREAMING
        self._leave_endpoint()
        self._give_back_budget()  # the prompt is computed; from here on it is a stream like any other

    def _strand(self) -> None:
        """A handoff that will never be used: its blocks stay on the prefill engine until the lease ends."""
        if self.handoff is not None:
            self.handoff = None
            self.handoff_outcomes.append("stranded")

    def _give_back_budget(self) -> None:
        if self._held_tokens >= 0:
            self._budget.give_back(self._held_tokens)
            self._held_tokens = -1
