"""The P2P tier over sockets: what the legs of each API carry, and when decode is told nothing.

The simulated engines compute for themselves what they are told to fetch; the channels are sockets that greet.
Real transfers: e2e/test_offloading.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from tests.engine import Fault, ThreadedEngine
from tests.integration.apis import APIS, COMPLETIONS
from tests.integration.sidecar import Rig, Sidecar, completion, eventually
from tests.ports import free_ports


class Channel:
    """A P2P control channel: ZMQ's own thread greets whoever connects."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = port or free_ports()
        self._socket.bind(f"tcp://{host}:{self.port}")

    def close(self) -> None:
        if not self._context.closed:
            self._context.destroy(linger=0)


class World:
    def __init__(self, stack: ExitStack, *flags: str, ranks: int = 1) -> None:
        self.own, self.theirs = Channel(), Channel(free_ports(ranks))
        self.ranks = [Channel(self.theirs.port + rank) for rank in range(1, ranks)]
        for one in (self.own, self.theirs, *self.ranks):
            stack.callback(one.close)
        prefill = stack.enter_context(ThreadedEngine(data_parallel_size=ranks))
        decode = stack.enter_context(ThreadedEngine())
        sidecar = Sidecar(
            *("--disagg", "on", "--prefill", prefill.address, "--model-server-port", str(decode.port)),
            *("--p2p-connector-port", str(self.theirs.port), "--local-p2p", f"127.0.0.1:{self.own.port}"),
            *("--recompute-max-concurrent", "100", *flags),
        )
        stack.callback(sidecar.stop)
        self.rig = Rig(sidecar, prefill, decode)
        self.rig.target = ""

    def params(self) -> tuple[list[Any], list[Any]]:
        """`kv_transfer_params` of all prefill and all decode legs so far."""
        legs = (self.rig.prefilled(), self.rig.decoded())
        prefill, decode = ([json.loads(leg.body).get("kv_transfer_params") for leg in one] for one in legs)
        return prefill, decode


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


OFFLOADING = ("--kv-connector", "offloading")


def test_the_legs_of_every_api(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING)
    for path, request in APIS.items():
        answer = world.rig.post(path, request())
        assert answer.status == 200
        assert answer.decision.startswith("remote")
    names = set()
    for prefill, decode in zip(*world.params(), strict=True):
        name = prefill["remote_decoder"]["kv_request_id"]
        assert prefill == {"remote_decoder": {"kv_request_id": name}}
        decode.pop("prompt_token_ids", None)
        source = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": world.theirs.port}
        assert decode == {"remote_prefiller": source}
        names.add(name)
    assert len(names) == len(APIS)


def test_a_peer_that_does_not_greet_is_never_named(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING)
    world.theirs.close()
    answer = world.rig.post(COMPLETIONS, completion())
    assert (answer.status, answer.decision) == (200, "recompute; reason=handoff_side_channel_dead")
    assert world.params()[1] == [None]


def test_an_engine_without_its_channel_is_given_nothing(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING)
    world.own.close()
    for _ in range(5):  # more than a breaker would bear: the prefill endpoint is not to blame
        answer = world.rig.post(COMPLETIONS, completion())
        assert (answer.status, answer.decision) == (200, "recompute; reason=handoff_own_channel_dead")
    assert world.params()[1] == [None] * 5
    assert world.rig.sidecar.metrics()("effective") == 0
    assert "restart the engine" in world.rig.sidecar.log


def test_each_rank_in_turn_and_its_own_channel(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING, ranks=3)
    eventually(lambda: ranks_of(world, 3) == {0, 1, 2})


def ranks_of(world: World, count: int) -> set[int]:
    """The ranks that the next legs were pinned to; each must be the one whose channel decode is told."""
    begin = len(world.rig.prefilled())
    for _ in range(count):
        assert world.rig.post(COMPLETIONS, completion()).status == 200
    pinned = [int(leg.header("x-data-parallel-rank") or -1) for leg in world.rig.prefilled()[begin:]]
    told = [one["remote_prefiller"]["remote_port"] - world.theirs.port for one in world.params()[1][begin:]]
    assert [max(rank, 0) for rank in pinned] == told
    return set(pinned)


def test_ranks_that_nobody_has_told_of(stack: ExitStack) -> None:
    """An endpoint that a header has just brought: decode is told of the first, so that is where prefill goes."""
    world = World(stack, *OFFLOADING, "--prefill-allow", "127.0.0.0/8")
    prefill = stack.enter_context(ThreadedEngine(data_parallel_size=2))
    prefill.fault(Fault(status=500), path="/metrics")
    for _ in range(2):
        assert world.rig.post(COMPLETIONS, completion(), [("x-prefiller-host-port", prefill.address)]).status == 200
    pinned = [leg.header("x-data-parallel-rank") for leg in prefill.requests if leg.path == COMPLETIONS]
    assert pinned == ["0", "0"]
    assert {one["remote_prefiller"]["remote_port"] for one in world.params()[1]} == {world.theirs.port}


def test_a_rank_that_the_client_asks_for(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING, ranks=2)
    answer = world.rig.post(COMPLETIONS, completion(), [("x-data-parallel-rank", "1")])
    assert answer.status in (200, 400)  # the decode engine has one rank
    (prefill,), (decode,) = world.rig.prefilled(), world.params()[1]
    assert prefill.header("x-data-parallel-rank") == "1"
    assert decode["remote_prefiller"]["remote_port"] == world.theirs.port + 1


@pytest.mark.parametrize(
    "fields",
    [
        [("x-data-parallel-rank", "x")],  # to the engine, which reads the first, it would mean none
        [("x-data-parallel-rank", "+1")],  # and this 1
        [("x-data-parallel-rank", "1 ")],
        [("x-data-parallel-rank", "1"), ("x-data-parallel-rank", "0")],
        [("x-data-parallel-rank", "1"), ("connection", "x-data-parallel-rank")],
    ],
)
def test_prefill_is_told_one_rank_and_decode_the_same(stack: ExitStack, fields: list[tuple[str, str]]) -> None:
    """Decode would wait for what another rank holds."""
    world = World(stack, *OFFLOADING, ranks=2)
    eventually(lambda: ranks_of(world, 2) == {0, 1})
    for _ in range(2):
        world.rig.post(COMPLETIONS, completion(), fields)
        prefill, told = world.rig.prefilled()[-1], world.params()[1][-1]["remote_prefiller"]["remote_port"]
        pinned = [value for name, value in prefill.headers if name.lower() == b"x-data-parallel-rank"]
        assert pinned == [b"%d" % (told - world.theirs.port)]


# -- a peer that has the prefix --------------------------------------------------------------------------------

PULL = ("--enable-p2p-pull", "on")


def named(source: str) -> list[tuple[str, str]]:
    return [("x-kv-cache-source-host-port", source)]


def test_whichever_leg_computes_gets_the_source(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING, *PULL, "--prefill-allow", "127.0.0.0/8", "--disagg", "auto")
    stack.callback(Channel(world.theirs.port, "127.0.0.9").close)
    assert world.rig.post(COMPLETIONS, completion(40), named("127.0.0.9:8000")).decision == "local; reason=short"
    assert world.rig.post(COMPLETIONS, completion(2000), named("127.0.0.9:8000")).decision.startswith("remote")
    (prefill,), (local, remote) = world.params()
    for found in (prefill, local):
        source = found["remote_kv_source"]
        assert (source["remote_host"], source["remote_port"]) == ("127.0.0.9", world.theirs.port)
    assert local["remote_kv_source"]["kv_request_id"] != prefill["remote_kv_source"]["kv_request_id"]
    assert "remote_decoder" in prefill
    assert "remote_kv_source" not in remote


def test_a_source_is_named_once(stack: ExitStack) -> None:
    """It was asked before the first leg. When that one has failed it may be gone, and must be dialled by nobody."""
    world = World(stack, *OFFLOADING, *PULL, "--prefill-allow", "127.0.0.0/8")
    stack.callback(Channel(world.theirs.port, "127.0.0.9").close)
    world.rig.prefill.fault(Fault(status=500), path=COMPLETIONS)
    assert world.rig.post(COMPLETIONS, completion(), named("127.0.0.9:8000")).decision.startswith("recompute")
    (prefill,), (decode,) = world.params()
    assert "remote_kv_source" in prefill
    assert decode is None


def test_prefill_does_not_fetch_from_itself(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING, *PULL)
    assert world.rig.post(COMPLETIONS, completion(), named("127.0.0.1:8000")).decision.startswith("remote")
    (prefill,), _ = world.params()
    assert prefill.keys() == {"remote_decoder"}


def test_decode_does_not_fetch_from_itself(stack: ExitStack) -> None:
    """A gateway may name the very pod that it sends the request to: that is where the prefix is."""
    own = Channel()
    stack.callback(own.close)
    here = ("--p2p-connector-port", str(own.port), "--local-p2p", f"127.0.0.1:{own.port}")
    world = World(stack, *OFFLOADING, *PULL, "--disagg", "off", *here)
    assert world.rig.post(COMPLETIONS, completion(), named("127.0.0.1:8000")).status == 200
    assert world.params()[1] == [None]


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (PULL, "10.1.2.3:8000"),  # nobody allows it
        (PULL, "no address"),
        (PULL, "127.0.0.1"),
        ((), "127.0.0.1:8000"),  # it is not switched on
        ((*PULL, "--p2p-connector-port", "1"), "127.0.0.1:8000"),  # nobody is there
    ],
)
def test_a_source_that_is_not_used(stack: ExitStack, flags: tuple[str, ...], source: str) -> None:
    world = World(stack, *OFFLOADING, "--disagg", "off", *flags)
    answer = world.rig.post(COMPLETIONS, completion(), named(source))
    assert (answer.status, answer.decision) == (200, "local; reason=disabled")
    assert world.params()[1] == [None]


def test_prefill_may_fetch_from_decode(stack: ExitStack) -> None:
    world = World(stack, *OFFLOADING, "--prefill-from-decode", "on", "--disagg", "auto")
    assert world.rig.post(COMPLETIONS, completion(40)).decision == "local; reason=short"
    for _ in range(2):
        assert world.rig.post(COMPLETIONS, completion(2000)).decision.startswith("remote")
    prefill, decode = world.params()
    names = set()
    for found in prefill:
        source = found["remote_kv_source"]
        assert (source["remote_host"], source["remote_port"]) == ("127.0.0.1", world.own.port)
        names |= {source["kv_request_id"], found["remote_decoder"]["kv_request_id"]}
    assert len(names) == 4
    assert decode[0] is None  # the engine cannot fetch from itself
    world.own.close()
    assert world.rig.post(COMPLETIONS, completion(2000)).decision.startswith("recompute")
    assert "remote_kv_source" not in world.params()[0][-1]


def test_with_nixl_too(stack: ExitStack) -> None:
    """A MultiConnector's engines: `do_remote_decode` and the source, side by side."""
    world = World(stack, *PULL, "--disagg", "off", "--warm-up", "off")
    assert world.rig.post(COMPLETIONS, completion(), named("127.0.0.1:8000")).status == 200
    assert world.params()[1][0].keys() == {"remote_kv_source"}
