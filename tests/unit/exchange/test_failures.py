"""The failure table: every row has a play, every play ends as its row says, and the documentation is the table."""

import re
from collections import Counter
from http import HTTPStatus
from pathlib import Path

import pytest

import sidecar
from sidecar.connectors.connector import Rejection
from sidecar.decision.guards import Decision, Kind
from sidecar.edge import errors
from sidecar.edge.encoding import Undecodable
from sidecar.edge.encoding import decoded as without_encoding
from sidecar.edge.request import Request
from sidecar.exchange import failures
from sidecar.exchange.commands import (
    CLOSE,
    PEEK,
    RELAY,
    TO_FIRST_BYTE,
    Answer,
    BreakOff,
    Check,
    Command,
    Decode,
    Prefill,
)
from sidecar.exchange.failures import ROWS, TABLE, Row, Stage, Then
from sidecar.prefill.breaker import State
from tests.unit.exchange.playbook import (
    Play,
    World,
    checked,
    connected,
    decoded,
    fault,
    first_event,
    handed_over,
    left,
    prefilled,
    pulling,
    sent,
    start,
    wait,
)
from tests.unit.handoffs import answer, params

SOURCES = Path(sidecar.__file__).parent
REPOSITORY = SOURCES.parent

# -- plays: each ends with the fault of its row, whose command is still due ------------------------------------


def _prefilling(world: World) -> Play:
    return world.remote() >> start << Prefill(world.a)


def _checking(world: World) -> Play:
    play = _prefilling(world) >> prefilled()
    return play << Check(play.handoff)


def _prefilling_with_adapter(world: World) -> Play:
    decision = Decision(Kind.REMOTE, "long", "", 40, (world.a, world.b), ordered=True, adapter="french")
    return world.play(decision) >> start << Prefill(world.a)


def _decoding(world: World) -> Play:
    return world.local() >> start << Decode(None) >> connected << None >> sent << None


def _streaming(world: World) -> Play:
    return _decoding(world) >> decoded() << RELAY


PLAYS = {
    (Stage.READING, "not_allowed"): lambda w: w.refused("not_allowed") >> start,
    (Stage.READING, "bad_target"): lambda w: w.refused("bad_target") >> start,
    (Stage.READING, "client_left"): lambda w: w.local() >> left,
    (Stage.PREFILL, "rejected"): lambda w: _prefilling(w) >> prefilled(400, b"{}"),
    (Stage.PREFILL, "refused"): lambda w: _prefilling(w) >> fault("refused"),
    (Stage.PREFILL, "unreachable"): lambda w: _prefilling(w) >> fault("unreachable"),
    (Stage.PREFILL, "reset"): lambda w: _prefilling(w) >> fault("reset"),
    (Stage.PREFILL, "timeout"): lambda w: _prefilling(w) >> fault("timeout"),
    (Stage.PREFILL, "peer_silent"): lambda w: _prefilling(w) >> fault("peer_silent"),
    (Stage.PREFILL, "no_adapter"): lambda w: _prefilling_with_adapter(w) >> prefilled(404, b"{}"),
    (Stage.PREFILL, "busy"): lambda w: _prefilling(w) >> prefilled(429, b"{}"),
    (Stage.PREFILL, "server_error"): lambda w: _prefilling(w) >> prefilled(500, b"{}"),
    (Stage.PREFILL, "unexpected"): lambda w: _prefilling(w) >> prefilled(302, b""),
    (Stage.PREFILL, "garbage"): lambda w: _prefilling(w) >> fault("garbage"),
    (Stage.PREFILL, "too_large"): lambda w: _prefilling(w) >> fault("too_large"),
    (Stage.PREFILL, "none_usable"): lambda w: _all_open(w) >> start,
    (Stage.PREFILL, "client_left"): lambda w: _prefilling(w) >> left,
    (Stage.HANDOFF, "missing"): lambda w: _prefilling(w) >> prefilled(200, answer(...)),
    (Stage.HANDOFF, "invalid"): lambda w: _prefilling(w) >> prefilled(200, answer({"do_remote_prefill": True})),
    (Stage.HANDOFF, "wrong_host"): lambda w: (
        _prefilling(w) >> prefilled(200, answer(params(remote_host="localhost")))
    ),
    (Stage.HANDOFF, "unverifiable"): lambda w: _without_facts(w) >> prefilled(),
    (Stage.HANDOFF, "expired"): lambda w: handed_over(w) >> wait(w.lease_s) << None >> connected,
    (Stage.HANDOFF, "side_channel_dead"): lambda w: (
        _checking(w) >> checked(Rejection("side_channel_dead", "10.0.0.5:5600"))
    ),
    (Stage.HANDOFF, "own_channel_dead"): lambda w: (
        _checking(w) >> checked(Rejection("own_channel_dead", "127.0.0.1:7777"))
    ),
    (Stage.HANDOFF, "incompatible"): lambda w: _checking(w) >> checked(Rejection("incompatible", "10.0.0.5:5600")),
    (Stage.HANDOFF, "refused"): lambda w: handed_over(w) >> fault("refused"),
    (Stage.HANDOFF, "unreachable"): lambda w: handed_over(w) >> fault("unreachable"),
    (Stage.HANDOFF, "client_left"): lambda w: handed_over(w) >> left,
    (Stage.PULL, "rejected"): lambda w: pulling(w) >> decoded(404),
    (Stage.PULL, "reset"): lambda w: pulling(w) >> fault("reset"),
    (Stage.PULL, "server_error"): lambda w: pulling(w) >> decoded(500),
    (Stage.PULL, "error_event"): lambda w: pulling(w) >> decoded(stream=True) << PEEK >> first_event(error=True),
    (Stage.PULL, "peer_silent"): lambda w: pulling(w) >> fault("peer_silent"),
    (Stage.PULL, "garbage"): lambda w: pulling(w) >> fault("garbage"),
    (Stage.PULL, "client_left"): lambda w: pulling(w) >> left,
    (Stage.DECODE, "rejected"): lambda w: _decoding(w) >> decoded(400),
    (Stage.DECODE, "server_error"): lambda w: _decoding(w) >> decoded(503),
    (Stage.DECODE, "refused"): lambda w: w.local() >> start << Decode(None) >> fault("refused"),
    (Stage.DECODE, "unreachable"): lambda w: w.local() >> start << Decode(None) >> fault("unreachable"),
    (Stage.DECODE, "reset"): lambda w: _decoding(w) >> fault("reset"),
    (Stage.DECODE, "garbage"): lambda w: _decoding(w) >> fault("garbage"),
    (Stage.DECODE, "over_budget"): lambda w: _over_budget(w) >> fault("timeout"),
    (Stage.DECODE, "client_left"): lambda w: _decoding(w) >> left,
    (Stage.STREAMING, "reset"): lambda w: _streaming(w) >> fault("reset"),
    (Stage.STREAMING, "garbage"): lambda w: _streaming(w) >> fault("garbage"),
    (Stage.STREAMING, "client_left"): lambda w: _streaming(w) >> left,
}


def _all_open(world: World) -> Play:
    for endpoint in (world.a, world.b):
        world.broken(endpoint)
    return world.remote()


def _without_facts(world: World) -> Play:
    world.a.facts = type(world.a.facts)()
    return _prefilling(world)


def _over_budget(world: World) -> Play:
    world.budget.max_concurrent = 0
    return _prefilling(world)


def _request(*headers: tuple[bytes, bytes], method: bytes = b"POST") -> Request:
    return Request(method, b"/v1/completions", list(headers), http_1_0=False, started_at=0.0)


def _refusal(*headers: tuple[bytes, bytes]) -> Row:
    refusal = _request(*headers).refusal(1024)
    assert refusal is not None
    return refusal[0]


def _undecodable(body: bytes, encoding: bytes) -> Row:
    with pytest.raises(Undecodable) as caught:
        list(without_encoding(body, encoding, 1024))
    return caught.value.row


HOST = (b"host", b"x")
READ = {
    "malformed": lambda: _refusal(),
    "two_framings": lambda: _refusal(HOST, (b"content-length", b"1"), (b"transfer-encoding", b"chunked")),
    "unknown_expectation": lambda: _refusal(HOST, (b"expect", b"200-ok")),
    "head_too_large": lambda: _refusal(HOST, *[(b"x-%d" % n, b"") for n in range(300)]),
    "too_large": lambda: _refusal(HOST, (b"content-length", b"1025")),
    "bad_encoding": lambda: _undecodable(b"no gzip", b"gzip"),
    "unknown_encoding": lambda: _undecodable(b"", b"br"),
}
"""Rows of stage reading that a function without I/O finds; the others are found by the client connection."""


def test_no_row_is_without_a_play() -> None:
    without = [row.reason for row in ROWS if (row.stage, row.fault) not in PLAYS and row.stage is not Stage.READING]
    assert not without
    assert not [key for key in PLAYS if key not in TABLE]


CASES = [
    pytest.param(row, recompute, id=f"{row.reason}-{'recompute' if recompute else 'fail'}")
    for row in ROWS
    if (row.stage, row.fault) in PLAYS
    for recompute in (True, False)
    if recompute or row.fault != "over_budget"  # without recomputes there is no budget to exceed
]


@pytest.mark.parametrize(("row", "recompute"), CASES)
def test_every_row_ends_as_it_says(row: Row, recompute: bool) -> None:
    world = World(recompute=recompute)
    play = PLAYS[row.stage, row.fault](world)
    exchange = play.exchange
    command = _due(play)
    _check(row, command, play, recompute=recompute)
    if row.blames:
        assert world.a.breaker._failures == 1
    elif row.fault not in ("none_usable", "over_budget"):
        assert world.a.breaker._failures == 0
        assert world.a.breaker.state is State.CLOSED
    if row.then is Then.RELAY and row.stage is not Stage.PREFILL:
        assert not exchange.faults, "an answer that is passed on is no fault of ours"
    elif row.fault != "over_budget":
        assert exchange.faults[-1].row is row
    assert play


def _due(play: Play) -> Command | None:
    command, play._due = play._due, None
    return command


def _check(row: Row, command: Command | None, play: Play, *, recompute: bool) -> None:
    world, exchange = play.world, play.exchange
    match row.then:
        case Then.ANSWER:
            assert isinstance(command, Answer)
            assert command.row is row
            assert exchange.what is Kind.REFUSED
            # A refusal of the guards keeps the name that the guard gave it.
            assert exchange.reason == (row.fault if row.stage is Stage.READING else row.reason)
        case Then.RELAY:
            assert command == RELAY
        case Then.NEXT | Then.NEXT_OR_HERE:
            assert command == Prefill(world.b)
        case Then.POLICY if recompute:
            assert command == Decode(None)
            assert exchange.what is Kind.RECOMPUTE
            assert exchange.reason == row.reason
            assert world.budget.in_flight == 1
        case Then.POLICY:
            assert isinstance(command, Answer)
            assert command.row is row
            assert exchange.what is Kind.REFUSED
            assert exchange.reason == row.reason
        case Then.BREAK_OFF:
            assert command == BreakOff(row)
        case Then.RELEASE:
            assert command == CLOSE
            assert exchange.handoff is None
            assert exchange.take_release() is not None
        case Then.TO_FIRST_BYTE:
            assert command == TO_FIRST_BYTE
        case Then.CLOSE:
            assert command == CLOSE


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.then is Then.NEXT],
    ids=lambda row: row.reason,
)
def test_the_next_endpoint_failing_likewise_brings_the_policy(row: Row, recompute: bool) -> None:
    world = World(recompute=recompute, attempts=1)
    play = PLAYS[row.stage, row.fault](world)
    command = _due(play)
    if recompute:
        assert command == Decode(None)
        assert play.exchange.what is Kind.RECOMPUTE
    else:
        assert isinstance(command, Answer)
        assert command.row is row
    assert play.exchange.reason == row.reason
    assert play


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "fail"])
def test_an_adapter_that_no_endpoint_has_after_all(recompute: bool) -> None:
    """Whatever the policy, without its budget: nothing has failed. No endpoint is blamed, each is known for it."""
    world = World(recompute=recompute)
    play = _prefilling_with_adapter(world) >> prefilled(404, b"{}") << Prefill(world.b)
    assert play >> prefilled(404, b"{}") << Decode(None)
    assert (play.exchange.what, play.exchange.reason, play.exchange.fell_back) == (Kind.LOCAL, "model", None)
    assert world.budget.in_flight == 0
    assert world.outcomes == ["no_adapter", "no_adapter"]
    for endpoint in (world.a, world.b):
        assert endpoint.breaker.state is State.CLOSED
        assert endpoint.models.has_refused("french", world.clock)


READING = [row for row in ROWS if row.stage is Stage.READING and (row.stage, row.fault) not in PLAYS]


@pytest.mark.parametrize("row", READING, ids=lambda row: row.reason)
def test_every_row_of_stage_reading_is_raised_somewhere(row: Row) -> None:
    if row.fault in READ:
        assert READ[row.fault]() is row
    else:
        sources = "".join(path.read_text() for path in (SOURCES / "edge").glob("*.py"))
        assert f'"{row.fault}"' in sources


def test_every_fault_that_the_code_names_is_in_the_table() -> None:
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        for stage, name in re.findall(r'TABLE\[Stage\.(\w+), "(\w+)"\]', text):
            assert (Stage[stage], name) in TABLE, f"{path.name}: {stage} {name}"
        for name in re.findall(r'_row\("(\w+)"\)', text):
            assert (Stage.READING, name) in TABLE, f"{path.name}: {name}"
        for name in re.findall(r'\bfault\("(\w+)"', text):
            assert any(row.fault == name for row in ROWS), f"{path.name}: {name}"


CONNECTION_FAULTS = {
    Stage.PREFILL: ("refused", "unreachable", "reset", "garbage", "too_large", "timeout", "client_left"),
    Stage.HANDOFF: ("refused", "unreachable", "client_left"),
    Stage.PULL: ("reset", "garbage", "peer_silent", "client_left"),
    Stage.DECODE: ("refused", "unreachable", "reset", "garbage", "client_left"),
    Stage.STREAMING: ("reset", "garbage", "client_left"),
}
"""What the legs, timers and the client can report at each stage; none of it may be unknown to the table."""


def test_the_table_knows_what_connections_report() -> None:
    assert not [
        (stage, name)
        for stage in CONNECTION_FAULTS
        for name in CONNECTION_FAULTS[stage]
        if (stage, name) not in TABLE
    ]


# -- the rows themselves ---------------------------------------------------------------------------------------


def test_no_fault_stands_twice() -> None:
    assert max(Counter((row.stage, row.fault) for row in ROWS).values()) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reason)
def test_rows_are_whole(row: Row) -> None:
    assert row.message
    assert re.fullmatch(r"[a-z_]+", row.reason)
    if row.then in (Then.ANSWER, Then.NEXT, Then.POLICY):
        assert HTTPStatus(row.status) >= 400
        assert errors.answer(row, "", None, b"", close=False).startswith(b"HTTP/1.1 %d " % row.status)
    else:
        assert row.status == 0
    if row.status == 503:
        assert row.retry_after_s, "503 without Retry-After"
    if row.blames:
        assert row.stage in (Stage.PREFILL, Stage.HANDOFF, Stage.PULL)
    if row.fault == "client_left":
        assert not row.blames


@pytest.mark.parametrize(
    ("status", "name"),
    [
        *[(status, "rejected") for status in (400, 401, 403, 404, 405, 413, 415, 422)],
        (429, "busy"),
        *[(status, "server_error") for status in (500, 502, 503, 599)],
        *[(status, "unexpected") for status in (100, 204, 206, 301, 402, 408, 409)],
    ],
)
def test_prefill_statuses(status: int, name: str) -> None:
    assert failures.prefill_fault(status) == name
    assert (Stage.PREFILL, name) in TABLE


# -- documentation ---------------------------------------------------------------------------------------------


def test_documentation_holds_every_row() -> None:
    lines = failures.markdown().splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    assert len(table) == len(ROWS)
    for row, line in zip(ROWS, table, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 6, line
        assert cells[:3] == [str(row.stage), f"`{row.fault}`", row.message]
        assert (cells[4] == "yes") is row.blames
        assert str(row.retry_after_s or "") in cells[5]


def test_documentation_is_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "failures.md").read_text(encoding="utf-8")
    assert written == failures.markdown(), "run `make docs`"
