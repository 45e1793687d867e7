"""The failure table: what can go wrong at which stage, and what then happens. Data, and nothing but data.

The machine (life.py) looks every fault up here, the edge takes status and wording of our own answers from here,
`docs/failures.md` is written from here (`make docs`) and the tests walk it row by row. A behaviour that is not
in this table does not exist. This file knows nothing of HTTP connections, JSON or connectors.
"""

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where a request is. `pull` is a decode leg that carries a handoff and of which the client has nothing yet."""

    READING = "reading"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    PULL = "pull"
    DECODE = "decode"
    STREAMING = "streaming"


class Then(StrEnum):
    """What happens after a fault."""

    ANSWER = "our own error answer"
    RELAY = "the engine's answer, unchanged"
    NEXT = "the next prefill endpoint, then the policy"
    POLICY = "the policy"
    NEXT_OR_HERE = "the next prefill endpoint, then the local engine, as if it had been decided so"
    BREAK_OFF = "an SSE error event, or a cut body where it is no SSE"
    RELEASE = "the handoff is given back at once"
    TO_FIRST_BYTE = "the engine is let to its first byte, then closed"
    CLOSE = "the engine connection is closed at once"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a fault at a stage and its consequence.

    `status` is that of our own answer: always for `ANSWER`; for `NEXT` and `POLICY` under
    `--on-prefill-failure fail`. `blames` says whether the prefill endpoint's breaker counts it.
    """

    stage: Stage
    fault: str
    then: Then
    status: int
    message: str
    blames: bool = False
    retry_after_s: int = 0

    @property
    def reason(self) -> str:
        """Label value: `<stage>_<fault>`."""
        return f"{self.stage}_{self.fault}"


_R, _P, _H, _U, _D, _S = (
    Stage.READING,
    Stage.PREFILL,
    Stage.HANDOFF,
    Stage.PULL,
    Stage.DECODE,
    Stage.STREAMING,
)

ROWS: tuple[Row, ...] = (
    # -- reading: no engine is called --
    Row(_R, "malformed", Then.ANSWER, 400, "the request is not valid HTTP/1.1"),
    Row(_R, "two_framings", Then.ANSWER, 400, "the request states its length in two ways"),
    Row(_R, "bad_json", Then.ANSWER, 400, "the body is not a JSON object"),
    Row(_R, "bad_encoding", Then.ANSWER, 400, "the body cannot be decompressed"),
    Row(_R, "too_slow", Then.ANSWER, 408, "the request did not arrive in time"),
    Row(_R, "too_large", Then.ANSWER, 413, "the body is larger than --max-body-bytes"),
    Row(_R, "unknown_encoding", Then.ANSWER, 415, "use gzip, deflate, zstd or no Content-Encoding"),
    Row(_R, "unknown_expectation", Then.ANSWER, 417, "only Expect: 100-continue is known"),
    Row(_R, "head_too_large", Then.ANSWER, 431, "the request head is larger than 64 KiB or 256 fields"),
    Row(_R, "unknown_version", Then.ANSWER, 505, "speak HTTP/1.1 or HTTP/1.0"),
    Row(
        _R,
        "not_allowed",
        Then.ANSWER,
        403,
        "the header names a prefill endpoint that neither --prefill nor --prefill-allow admits",
    ),
    Row(_R, "bad_target", Then.ANSWER, 400, "x-prefiller-host-port wants HOST:PORT"),
    Row(_R, "unknown_rank", Then.ANSWER, 400, "x-data-parallel-host-port names the port of no local rank"),
    Row(_R, "client_left", Then.CLOSE, 0, "the client left before its request was complete"),
    # -- prefill --
    Row(_P, "rejected", Then.RELAY, 0, "400 401 403 404 405 413 415 422: the client's own mistake"),
    Row(
        _P,
        "refused",
        Then.NEXT,
        502,
        "the prefill endpoint refuses connections, or its certificate is not accepted",
        blames=True,
    ),
    Row(_P, "unreachable", Then.NEXT, 504, "no connection within --prefill-connect-timeout", blames=True),
    Row(_P, "reset", Then.NEXT, 502, "the prefill endpoint broke the connection off", blames=True),
    Row(_P, "timeout", Then.POLICY, 504, "no answer within --prefill-timeout", blames=True),
    Row(
        _P,
        "peer_silent",
        Then.NEXT,
        504,
        "the prefill endpoint has answered no probe for --pull-timeout while it owes an answer",
        blames=True,
    ),
    Row(
        _P,
        "no_adapter",
        Then.NEXT_OR_HERE,
        0,
        "404 for an adapter that the decode engine may have: no mistake of the client's",
    ),
    Row(_P, "busy", Then.NEXT, 503, "the prefill endpoint answered 429", retry_after_s=1),
    Row(_P, "server_error", Then.NEXT, 502, "the prefill endpoint answered 5xx", blames=True),
    Row(_P, "unexpected", Then.NEXT, 502, "the prefill endpoint answered with another status", blames=True),
    Row(_P, "garbage", Then.POLICY, 502, "the prefill endpoint's answer is not valid HTTP", blames=True),
    Row(_P, "too_large", Then.POLICY, 502, "the prefill answer is larger than --max-body-bytes", blames=True),
    Row(_P, "none_usable", Then.POLICY, 503, "no prefill endpoint can be used", retry_after_s=1),
    Row(_P, "client_left", Then.CLOSE, 0, "the client left while its prompt was prefilled"),
    # -- handoff: the prefill endpoint answered 200; decode has not been asked --
    Row(
        _H,
        "missing",
        Then.POLICY,
        502,
        "the prefill answer holds no handoff: is --kv-transfer-config set there?",
        blames=True,
    ),
    Row(_H, "invalid", Then.POLICY, 502, "the prefill answer's handoff would harm the engine", blames=True),
    Row(
        _H,
        "wrong_host",
        Then.POLICY,
        502,
        "the handoff names another host: set VLLM_NIXL_SIDE_CHANNEL_HOST to the prefill pod's IP",
        blames=True,
    ),
    Row(_H, "unverifiable", Then.POLICY, 502, "the handoff cannot be checked"),
    Row(_H, "expired", Then.NEXT, 504, "the handoff is as old as the lease of its blocks"),
    Row(_H, "side_channel_dead", Then.NEXT, 502, "the prefill engine's side channel is silent", blames=True),
    Row(
        _H,
        "own_channel_dead",
        Then.POLICY,
        502,
        "the decode engine's own P2P control channel is silent: it has to be restarted",
    ),
    Row(_H, "incompatible", Then.NEXT, 502, "the two engines can never transfer KV", blames=True),
    Row(_H, "refused", Then.ANSWER, 503, "the decode engine is not there", retry_after_s=2),
    Row(_H, "unreachable", Then.ANSWER, 503, "there is no connection to the decode engine", retry_after_s=2),
    Row(_H, "client_left", Then.RELEASE, 0, "the client left before decode was asked"),
    # -- pull: decode was asked with a handoff, the client has nothing yet --
    Row(_U, "rejected", Then.RELAY, 0, "4xx: the client's own mistake; the handoff is given back"),
    Row(_U, "reset", Then.POLICY, 502, "the decode engine broke off with a handoff attached", blames=True),
    Row(_U, "server_error", Then.POLICY, 502, "the decode engine answered 5xx to a handoff", blames=True),
    Row(_U, "error_event", Then.POLICY, 502, "the stream began with an error: the KV load failed", blames=True),
    Row(
        _U,
        "peer_silent",
        Then.POLICY,
        504,
        "for --pull-timeout the prefill peer has answered no probe, or for three of them brought no KV",
        blames=True,
    ),
    Row(_U, "garbage", Then.ANSWER, 502, "the decode engine's answer is not valid HTTP"),
    Row(_U, "client_left", Then.TO_FIRST_BYTE, 0, "the client left while KV was on its way"),
    # -- decode: no handoff is attached, the client has nothing yet --
    Row(_D, "rejected", Then.RELAY, 0, "4xx"),
    Row(_D, "server_error", Then.RELAY, 0, "5xx"),
    Row(_D, "refused", Then.ANSWER, 503, "the decode engine is not there", retry_after_s=2),
    Row(_D, "unreachable", Then.ANSWER, 503, "there is no connection to the decode engine", retry_after_s=2),
    Row(_D, "reset", Then.ANSWER, 502, "the decode engine broke the connection off"),
    Row(_D, "garbage", Then.ANSWER, 502, "the decode engine's answer is not valid HTTP"),
    Row(
        _D,
        "over_budget",
        Then.ANSWER,
        503,
        "remote prefill failed and --recompute-max-concurrent or --recompute-max-tokens is used up",
        retry_after_s=1,
    ),
    Row(_D, "client_left", Then.CLOSE, 0, "the client left before the first byte"),
    # -- streaming: the client has the first byte --
    Row(_S, "reset", Then.BREAK_OFF, 0, "the decode engine broke off in mid-answer"),
    Row(_S, "garbage", Then.BREAK_OFF, 0, "the decode engine's answer stopped being valid HTTP"),
    Row(_S, "client_left", Then.CLOSE, 0, "the client left in mid-answer"),
)

TABLE: dict[tuple[Stage, str], Row] = {(row.stage, row.fault): row for row in ROWS}

PREFILL_STATUS_RELAYED = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Prefill statuses that are the client's own mistake: every engine would say the same."""


def prefill_fault(status: int) -> str:
    """The fault of a prefill answer whose status is not 200."""
    if status in PREFILL_STATUS_RELAYED:
        return "rejected"
    if status == 429:
        return "busy"
    return "server_error" if status >= 500 else "unexpected"


def markdown() -> str:
    """The table as documentation."""
    lines = [
        "# What fails how",
        "",
        "Written by `make docs` from `sidecar/exchange/failures.py`; do not edit.",
        "",
        "*The policy* is `--on-prefill-failure`: `recompute` sends the request to the local engine without a",
        "handoff, within `--recompute-max-concurrent` and `--recompute-max-tokens`; `fail` answers with the status",
        "in the last column. The reason in metrics, logs, error bodies and `x-pd-decision` is `<stage>_<fault>`;",
        "only refusals by a guard (`not_allowed`, `bad_target`) keep that short name as the decision's reason,",
        "and an answer of the decode engine's that is relayed leaves the request the reason that it had.",
        "*Breaker* marks what counts against the prefill endpoint.",
        "",
        "| stage | fault | what it means | what happens | breaker | our status |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        status = str(row.status) if row.status else ""
        if row.status and row.then in (Then.NEXT, Then.POLICY):
            status += " (`fail`)"
        if row.retry_after_s:
            status += f", `Retry-After: {row.retry_after_s}`"
        mark = "yes" if row.blames else ""
        lines.append(f"| {row.stage} | `{row.fault}` | {row.message} | {row.then} | {mark} | {status} |")
    return "\n".join(lines) + "\n"
