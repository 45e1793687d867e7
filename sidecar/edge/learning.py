"""What a finished request teaches the decision rules: only what can be told apart from queueing and generating."""

import re

from sidecar.decision.guards import Kind
from sidecar.decision.rules import Rules
from sidecar.decision.turns import LATE_S, Turn
from sidecar.edge.service import Service, Times
from sidecar.exchange.apis import Api
from sidecar.exchange.life import Exchange


def learn(rules: Rules, api: Api, exchange: Exchange, times: Times, status: int, ahead: int) -> None:
    """`ahead`: prompt tokens that a locally computed prompt found before it."""
    decision, tokens = exchange.decision, exchange.prompt_tokens
    if not decision.is_exact:
        rules.learn_length(api, decision.prompt_bytes, tokens)
    costs = rules.costs
    if costs is None or status != 200:
        return
    if tokens and not exchange.prefill_ahead and not exchange.faults:
        seconds = times.prefill_done - times.prefill_sent
        costs.computed_there(tokens - exchange.prefill_cached_tokens, seconds, times.prefill_done)
    # A whole answer's first byte is its last: it tells nothing of the prompt.
    if not (exchange.is_event_stream and api.streams_from_first_token and times.first_byte):
        return
    cached = decision.inputs.cached if decision.inputs is not None else 0
    seconds = times.first_byte - times.decode_sent
    if exchange.what is Kind.REMOTE:
        costs.pulled(tokens - cached, seconds, times.first_byte)
    elif decision.estimated_tokens and not ahead:
        costs.computed_here(decision.estimated_tokens - cached, cached, seconds, times.first_byte)


def end_turn(service: Service, turn: Turn, tail: bytes, status: int, *, is_stream: bool) -> None:
    """Its answer has ended. `tail`: the last bytes of it; a whole answer counts its prompt there."""
    counted = None if is_stream else _PROMPT_TOKENS.search(tail, max(len(tail) - _USAGE_BYTES, 0))
    turn.ended(int(counted.group(1)) if counted is not None else 0, ok=status == 200)
    service.loop.call_later(LATE_S, service.rules.close_turn, turn)


_USAGE_BYTES = 4096
"""At an answer's end, in which usage stands."""
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?([0-9]{1,9})')
"""Within a string its quotes would be escaped."""
