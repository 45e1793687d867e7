"""What a finished request teaches the decision rules: only what can be told apart from queueing and generating."""

from sidecar.connectors.connector import Handoff
from sidecar.decision.guards import Kind
from sidecar.decision.rules import Rules
from sidecar.edge.service import Service, Times
from sidecar.exchange.apis import Api
from sidecar.exchange.life import Exchange
from sidecar.exchange.splice import Fields


def learn(rules: Rules, api: Api, exchange: Exchange, times: Times, status: int, ahead: int) -> None:
    """`ahead`: prompt tokens that a locally computed prompt found before it."""
    decision, tokens = exchange.decision, exchange.prompt_tokens
    if not decision.is_exact:
        rules.learn_length(api, decision.prompt_bytes, tokens)
    costs = rules.costs
    if costs is None or status != 200:
        return
    if tokens and not exchange.prefill_ahead and not exchange.faults:
        costs.computed_there(tokens - exchange.prefill_cached_tokens, times.prefill_done - times.prefill_sent)
    # A whole answer's first byte is its last: it tells nothing of the prompt.
    if not (exchange.is_event_stream and api.streams_from_first_token and times.first_byte):
        return
    cached = decision.inputs.cached if decision.inputs is not None else 0
    seconds = times.first_byte - times.decode_sent
    if exchange.what is Kind.REMOTE:
        costs.pulled(tokens - cached, seconds)
    elif decision.estimated_tokens and not ahead:
        costs.computed_here(decision.estimated_tokens - cached, cached, seconds)


def learn_text(service: Service, api: Api, exchange: Exchange, handoff: Handoff | None, members: Fields) -> None:
    """The decode engine has the prompt's KV: what its text was is worth remembering if `auto` has asked what is
    cached, and will again. Done after the first token has gone out."""
    if handoff is not None and handoff.token_ids and exchange.decision.inputs is not None:
        service.loop.call_soon(service.rules.learn_text, api, members, handoff.token_ids)
