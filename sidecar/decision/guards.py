"""The decision for one request: guards in a fixed order, the first that matches wins. No I/O, microseconds."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from sidecar.connectors.connector import Connector
from sidecar.decision.cost import Inputs, Verdict
from sidecar.decision.rules import Rules
from sidecar.decision.shape import (
    conversation,
    exact_tokens,
    is_text,
    is_token_ids,
    keeps_local,
    media_in,
    prompt_bytes,
)
from sidecar.decision.turns import Known
from sidecar.exchange.apis import Api
from sidecar.exchange.splice import Fields
from sidecar.prefill.address import BadAddress
from sidecar.prefill.endpoints import Endpoint, Endpoints, NotAllowed
from sidecar.prefill.served import named


class Mode(StrEnum):
    """`--disagg`."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


class Kind(StrEnum):
    """What became of a request; label value `decision`."""

    LOCAL = "local"
    REMOTE = "remote"
    RECOMPUTE = "recompute"
    REFUSED = "refused"


class Decision(msgspec.Struct, frozen=True):
    """The decision and what it rested on; what `/decisions` shows."""

    kind: Kind
    reason: str
    detail: str = ""
    estimated_tokens: int = 0
    candidates: tuple[Endpoint, ...] = ()
    ordered: bool = False
    """The candidates are in the order that the header gave."""
    budgeted: bool = False
    """Local only because no prefill endpoint is usable: counts as a fallback, so that a dying prefill side cannot
    land every long prompt on the decode engine at once."""
    rank: int = -1
    """Data-parallel rank that the request is pinned to."""
    is_exact: bool = False
    """The prompt is a list of token ids: the estimate is its length."""
    prompt_bytes: int = 0
    """Of a prompt whose tokens are estimated."""
    is_text: bool = False
    """Of a prompt that goes remote its token ids are all that there is."""
    adapter: str = ""
    """The LoRA adapter that it names, if the decode engine lists it or may load it."""
    conversation: int = 0
    """Prompts with the same number begin alike, so that one endpoint may hold their KV; 0 where none is chosen by
    us."""
    known: Known | None = None
    """What is known of a prompt of text, where `auto` has asked."""
    inputs: Inputs | None = None
    verdict: Verdict | None = None
    """Of the rule, where no guard had decided."""


NAMED_MAX = 3
"""Of many endpoints that can't be used, those that the log and the client's error name."""

DISABLED = Decision(Kind.LOCAL, "disabled")
PATH = Decision(Kind.LOCAL, "path")
NO_TARGET = Decision(Kind.LOCAL, "no_target")


def _unusable(candidates: Sequence[Endpoint], tokens: int, is_short: bool, why: str = "") -> Decision:
    """None of the candidates can be used. A pair that never fitted is no fallback."""
    why = why or ", ".join([f"{one.label}: {one.blocked or 'breaker open'}" for one in candidates[:NAMED_MAX]])
    if all(endpoint.blocked == "incompatible" for endpoint in candidates):
        return Decision(Kind.LOCAL, "incompatible", estimated_tokens=tokens)
    return Decision(Kind.LOCAL, "no_usable_prefill", why, tokens, budgeted=not is_short)


def decide(
    mode: Mode,
    connector: Connector,
    api: Api | None,
    body: bytes | bytearray | memoryview,
    members: Fields,
    header: list[bytes],
    endpoints: Endpoints,
    rules: Rules,
    block_size: int,
    rank: int = -1,
) -> Decision:
    """Local, remote or refused. `members` are those of `body`, `header` the values of `x-prefiller-host-port`;
    `block_size` is the local engine's, 0 if unknown; `rank` is the data-parallel rank that the request is pinned
    to, -1 for none."""
    if mode is Mode.OFF or not connector.splits:
        return DISABLED
    if api is None:
        return PATH
    if api.name in connector.never:
        return Decision(Kind.LOCAL, "shape", f"{api.name} with {connector.name}")
    media = media_in(api, body)
    if why := keeps_local(api, members, media, remote_media=rules.remote_media):
        return Decision(Kind.LOCAL, "shape", why)
    try:
        candidates = endpoints.candidates(header)
    except NotAllowed as error:
        return Decision(Kind.REFUSED, "not_allowed", str(error))
    except BadAddress as error:
        return Decision(Kind.REFUSED, "bad_target", str(error))
    if not candidates:
        return NO_TARGET
    is_exact = is_token_ids(api, members)
    size_bytes = 0 if is_exact else prompt_bytes(api, members)
    tokens = exact_tokens(api, members) if is_exact else int(size_bytes / rules.bytes_per_token(api))
    is_short = mode is Mode.AUTO and tokens < rules.min_remote_tokens
    ordered = candidates is not endpoints.members and not endpoints.samples
    candidates, adapter, problem = endpoints.serving(named(members.get("model")), rules.models, candidates)
    if problem:
        return Decision(Kind.LOCAL, "model", problem, tokens)
    of_rank = endpoints.of_rank(candidates, rank)
    if not endpoints.any_usable(of_rank):
        return _unusable(of_rank or candidates, tokens, is_short, "" if of_rank else f"rank {rank} brings no KV")
    candidates = of_rank
    if connector.hands_off and not block_size and not any(endpoint.facts.block_size for endpoint in candidates):
        # Every handoff would be refused as unverifiable, each prompt computed twice.
        asked = ", ".join(["the decode engine", *[one.label for one in candidates[:NAMED_MAX]]])
        why = f"no block size is known: /metrics tells none at {asked}; are they up, and vLLM?"
        return Decision(Kind.LOCAL, "no_usable_prefill", why, tokens, budgeted=not is_short)
    decision = Decision(
        Kind.REMOTE,
        "on",
        estimated_tokens=tokens,
        is_exact=is_exact,
        prompt_bytes=size_bytes,
        candidates=tuple(candidates),
        ordered=ordered,
        adapter=adapter,
        is_text=is_text(api, members, media),
        conversation=0 if ordered or len(candidates) == 1 else conversation(api, members),
        rank=rank,
    )
    return decision if mode is Mode.ON else _auto(decision, api, members, endpoints, rules)


def _auto(decision: Decision, api: Api, members: Fields, endpoints: Endpoints, rules: Rules) -> Decision:
    """What `auto` makes of a prompt that may go remote."""
    if decision.estimated_tokens < rules.min_remote_tokens:
        return _kept(decision, "short")
    cached = 0
    # Ranks behind one port publish on ports of their own, and the first one's is heard: no other is known.
    if decision.rank <= 0:
        if decision.is_exact:
            cached = rules.cached_tokens(api, members)
        elif (known := rules.known(api, members)) is not None:
            cached = known.cached
            # What was counted need not be estimated: its error alone could be more than what is new.
            decision = msgspec.structs.replace(decision, estimated_tokens=known.tokens, known=known)
    tokens = decision.estimated_tokens
    if tokens - cached < rules.min_remote_tokens:
        return _kept(decision, "cached" if cached else "short", inputs=Inputs(tokens, cached))
    inputs, verdict = rules.weigh(tokens, cached, endpoints.least_tokens_in_flight(decision.candidates))
    if verdict.remote:
        return msgspec.structs.replace(decision, reason=verdict.reason, inputs=inputs, verdict=verdict)
    return _kept(decision, verdict.reason, inputs=inputs, verdict=verdict)


def _kept(decision: Decision, reason: str, **more: Any) -> Decision:
    """The same prompt, computed here."""
    return msgspec.structs.replace(decision, kind=Kind.LOCAL, reason=reason, candidates=(), ordered=False, **more)
