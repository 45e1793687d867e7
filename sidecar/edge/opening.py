"""What a request becomes once its body can be read: a decision, and the exchange that follows from it."""

import time

from sidecar.connectors.connector import Connector
from sidecar.decision.guards import Decision, Kind, decide
from sidecar.edge.engine import Buffer
from sidecar.edge.request import Request
from sidecar.edge.service import Service
from sidecar.exchange.apis import Api
from sidecar.exchange.life import Exchange
from sidecar.exchange.splice import Fields
from sidecar.prefill.ranks import rank_of_header


def decided(service: Service, request: Request, api: Api | None, body: Buffer, members: Fields) -> Decision:
    """Where the prompt is computed. `members`: of `body`, as far as they were to be known. Raises `NotAnObject` for
    what inside the body is not what it should be."""
    return decide(
        service.live.mode,
        service.connector,
        api,
        body,
        members,
        request.read.get(b"x-prefiller-host-port", []),
        service.endpoints,
        service.rules,
        service.live.engine_facts.block_size,
        rank_of_header(request.read.get(b"x-data-parallel-rank", [])),
    )


def opened(service: Service, api: Api | None, decision: Decision) -> Exchange:
    """The exchange, not begun."""
    settings = service.settings
    is_text = decision.is_text and decision.kind is Kind.REMOTE
    return Exchange(
        decision,
        connector=service.connector,
        endpoints=service.endpoints,
        budget=service.budget,
        now=time.monotonic,
        attempts=settings.prefill_attempts,
        recompute=settings.on_prefill_failure == "recompute",
        lease_s=settings.handoff_max_age,
        on_attempt=service.observer.prefill_attempt,
        wants_token_ids=is_text and _passes_token_ids(api, service.connector, settings.tokenize_once),
        channel_port=settings.channel_port,
    )


def _passes_token_ids(api: Api | None, connector: Connector, tokenize_once: str) -> bool:
    """Whether the decode leg may have the prompt as the prefill leg tokenised it."""
    return api is not None and api.passes_token_ids and tokenize_once != "off" and connector.hands_off
