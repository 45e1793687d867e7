"""The guards: their order, every reason, and the values at their edges."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from sidecar.connectors import CONNECTORS
from sidecar.connectors.connector import EngineFacts
from sidecar.decision.cost import Costs
from sidecar.decision.guards import Decision, Kind, Mode, decide
from sidecar.decision.rules import Rules
from sidecar.decision.signals import Load
from sidecar.exchange.apis import APIS, CHAT, COMPLETIONS, RESPONSES, Api
from sidecar.exchange.splice import fields
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.served import Served
from transport.prefix_index import PrefixIndex

LISTED = b"10.0.0.5:8000"
ALLOWED = b"10.1.0.1:8000"
FOREIGN = b"10.9.9.9:80"
BLOCK = 16


class World:
    """A sidecar's endpoints and settings, and one request to decide on."""

    def __init__(self, *listed: bytes, allow: tuple[str, ...] = ("10.1.0.0/16",), minimum: int = 256) -> None:
        addresses = [Address(host, int(port)) for host, _, port in (one.decode().partition(":") for one in listed)]
        self.endpoints = Endpoints(addresses, AllowList(list(allow)), lambda: 0.0)
        self.minimum = minimum
        self.rules = Rules(minimum, lambda: 100.0)

    def hold(self, tokens: int) -> None:
        """From now on the decode engine holds so many tokens of every prompt."""
        self.rules = Rules(self.minimum, lambda: 100.0, index=Held(tokens))

    def decide(
        self,
        *header: bytes,
        mode: Mode = Mode.AUTO,
        api: Api | None = COMPLETIONS,
        tokens: int = 1000,
        connector: str = "nixlv2",
        block_size: int = 16,
        rank: int = -1,
        **more: Any,
    ) -> Decision:
        body = {"prompt": [1] * tokens, **more}
        if api is CHAT:
            body = {"messages": [], **more}
        encoded = json.dumps(body).encode()
        members = fields(encoded)
        return decide(
            mode,
            CONNECTORS[connector],
            api,
            encoded,
            members,
            list(header),
            self.endpoints,
            self.rules,
            block_size,
            rank,
        )

    def serve(self, own: tuple[str, ...], *there: tuple[str, ...]) -> None:
        """Adapters of the decode engine, and of each endpoint in turn."""
        self.rules.models.tell(Served(frozenset({"base"}), frozenset(own), loads=False), 1000.0)
        for endpoint, adapters in zip(self.endpoints, there, strict=False):
            endpoint.models.tell(Served(frozenset({"base"}), frozenset(adapters), loads=False), 1000.0)
        self.endpoints.adapters = frozenset().union(*there)

    def open_all(self) -> None:
        for endpoint in self.endpoints:
            endpoint.breaker.failed(0.0, at_once=True)


@pytest.fixture
def world() -> World:
    return World(LISTED)


def outcome(decision: Decision) -> tuple[str, str]:
    return str(decision.kind), decision.reason


# -- order: each guard beats all that come after it ------------------------------------------------------------


def test_order(world: World) -> None:
    """One request that offends against everything; what offends first is taken away step by step."""
    bad: dict[str, Any] = {"mode": Mode.OFF, "api": None, "n": 2, "tokens": 1}
    header = (FOREIGN,)
    assert outcome(world.decide(*header, **bad)) == ("local", "disabled")
    bad["mode"] = Mode.AUTO
    assert outcome(world.decide(*header, connector="none", **bad)) == ("local", "disabled")
    assert outcome(world.decide(*header, **bad)) == ("local", "path")
    bad["api"] = COMPLETIONS
    assert outcome(world.decide(*header, **bad)) == ("local", "shape")
    del bad["n"]
    assert outcome(World().decide(**bad)) == ("local", "no_target")
    assert outcome(world.decide(*header, **bad)) == ("refused", "not_allowed")
    world.serve(("french",), ())
    world.open_all()
    assert outcome(world.decide(model="french", **bad)) == ("local", "model")
    assert outcome(world.decide(model="base", **bad)) == ("local", "no_usable_prefill")
    assert outcome(World(LISTED).decide(**bad)) == ("local", "short")
    bad["tokens"] = 256
    assert outcome(World(LISTED).decide(**bad)) == ("remote", "long")
    bad |= {"tokens": 1, "mode": Mode.ON}
    assert outcome(World(LISTED).decide(**bad)) == ("remote", "on")


# -- every reason ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [(), (LISTED,), (FOREIGN,), (b"nonsense",)])
def test_disabled_whatever_the_header(world: World, header: tuple[bytes, ...]) -> None:
    assert outcome(world.decide(*header, mode=Mode.OFF)) == ("local", "disabled")
    assert outcome(world.decide(*header, connector="none")) == ("local", "disabled")


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
def test_shape_names_the_field(world: World, mode: Mode) -> None:
    decision = world.decide(mode=mode, best_of=4)
    assert (outcome(decision), decision.detail) == (("local", "shape"), "best_of")


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
@pytest.mark.parametrize("header", [(), (b"",), (b" ",), (b",",), (b"", b"")])
def test_no_target(mode: Mode, header: tuple[bytes, ...]) -> None:
    assert outcome(World().decide(*header, mode=mode)) == ("local", "no_target")


def test_nothing_is_allowed_unless_it_is_said() -> None:
    """Closed by default."""
    closed = World(allow=())
    decision = closed.decide(ALLOWED)
    assert (outcome(decision), decision.detail) == (("refused", "not_allowed"), "10.1.0.1:8000")
    assert outcome(World(LISTED, allow=()).decide(LISTED)) == ("remote", "long")


@pytest.mark.parametrize("header", [b"nonsense", b"10.0.0.5", b"10.0.0.5:0", b"\xff:1", b"127.1:8000", b"a b:80"])
def test_bad_target(world: World, header: bytes) -> None:
    assert outcome(world.decide(header)) == ("refused", "bad_target")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ((), ["10.0.0.5:8000"]),
        ((b"",), ["10.0.0.5:8000"]),
        ((LISTED,), ["10.0.0.5:8000"]),
        ((ALLOWED,), ["10.1.0.1:8000"]),
        ((b"10.1.0.2:1,10.1.0.1:1",), ["10.1.0.2:1", "10.1.0.1:1"]),
        ((b"10.1.0.2:1", b"10.1.0.1:1"), ["10.1.0.2:1", "10.1.0.1:1"]),
        ((b" 10.1.0.2:1 ,, 10.1.0.2:01 ,",), ["10.1.0.2:1"]),
        ((FOREIGN + b"," + ALLOWED,), ["10.1.0.1:8000"]),
        ((b"http://10.1.0.1:8000",), ["10.1.0.1:8000"]),
    ],
)
def test_candidates(world: World, header: tuple[bytes, ...], expected: list[str]) -> None:
    decision = world.decide(*header)
    assert [endpoint.label for endpoint in decision.candidates] == expected
    assert decision.ordered is any(value.strip() for value in header)


def test_one_malformed_target_spoils_the_list(world: World) -> None:
    assert outcome(world.decide(ALLOWED + b",nonsense")) == ("refused", "bad_target")


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
def test_no_usable_prefill_counts_as_a_recompute_if_it_would_have_gone_remote(mode: Mode) -> None:
    world = World(LISTED)
    world.open_all()
    assert world.decide(mode=mode, tokens=256).budgeted
    assert world.decide(mode=mode, tokens=255).budgeted is (mode is Mode.ON)


def test_one_usable_endpoint_is_enough() -> None:
    world = World(LISTED, b"10.0.0.6:8000")
    next(iter(world.endpoints)).breaker.failed(0.0, at_once=True)
    assert outcome(world.decide()) == ("remote", "long")
    decision = world.decide(LISTED)
    assert outcome(decision) == ("local", "no_usable_prefill"), "the header's word counts"
    assert decision.detail == "10.0.0.5:8000: breaker open", "whoever reads the log looks there"


def test_a_rank_that_brings_nothing_is_not_asked_and_the_others_are(world: World) -> None:
    (endpoint,) = world.endpoints
    world.endpoints.failed(endpoint, at_once=True, trial=0, rank=1)
    decision = world.decide(rank=1)
    assert outcome(decision) == ("local", "no_usable_prefill")
    assert decision.detail == "rank 1 brings no KV"
    assert decision.budgeted
    assert outcome(world.decide(rank=0)) == outcome(world.decide()) == ("remote", "long")
    assert world.decide(rank=0).rank == 0
    two = World(LISTED, b"10.0.0.6:8000")
    first, second = two.endpoints
    two.endpoints.failed(first, at_once=True, trial=0, rank=1)
    decision = two.decide(LISTED + b",10.0.0.6:8000", rank=1)
    assert decision.candidates == (second,)
    assert decision.ordered


def test_blocked_endpoint_is_not_usable(world: World) -> None:
    for endpoint in world.endpoints:
        endpoint.blocked = "incompatible"
    decision = world.decide()
    assert outcome(decision) == ("local", "incompatible")
    assert not decision.budgeted, "what never fitted is no fallback"
    endpoint.blocked = "side_channel_dead"
    decision = world.decide()
    assert outcome(decision) == ("local", "no_usable_prefill")
    assert decision.budgeted


@pytest.mark.parametrize(
    ("minimum", "tokens", "reason"),
    [
        *[(256, 255, "short"), (256, 256, "long"), (256, 257, "long")],
        *[(0, 1, "long"), (1, 1, "long"), (2, 1, "short"), (10**9, 1000, "short")],
    ],
)
def test_min_remote_tokens(minimum: int, tokens: int, reason: str) -> None:
    world = World(LISTED, minimum=minimum)
    assert world.decide(tokens=tokens).reason == reason
    assert world.decide(tokens=tokens, mode=Mode.ON).reason == "on"


def test_zero_means_every_prompt() -> None:
    world = World(LISTED, minimum=0)
    assert outcome(world.decide(api=CHAT)) == ("remote", "long")


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("api", [None, *APIS.values()], ids=lambda api: api.name if api else "other")
def test_every_combination_has_a_reason(mode: Mode, api: Api | None) -> None:
    prompts: dict[str, Any] = {"messages": [], "input": "x", "token_ids": [1] * 999, "sampling_params": {}}
    for header, listed, connector in itertools.product([(), (ALLOWED,), (FOREIGN,)], [(), (LISTED,)], CONNECTORS):
        decision = World(*listed).decide(*header, mode=mode, api=api, connector=connector, **prompts)
        assert decision.reason
        assert (decision.kind is Kind.REMOTE) is bool(decision.candidates)
        if decision.kind is Kind.REMOTE:
            assert mode is not Mode.OFF
            assert all(isinstance(one, Endpoint) for one in decision.candidates)


def test_tokens_are_told_for_the_budget(world: World) -> None:
    assert world.decide(tokens=777).estimated_tokens == 777
    world.open_all()
    assert world.decide(tokens=777).estimated_tokens == 777


def test_no_prefill_is_paid_for_while_no_handoff_could_be_checked(world: World) -> None:
    decision = world.decide(block_size=0)
    assert outcome(decision) == ("local", "no_usable_prefill")
    assert "block size" in decision.detail
    assert decision.budgeted
    assert not world.decide(block_size=0, tokens=1).budgeted
    next(iter(world.endpoints)).facts = EngineFacts(16, 100)
    assert outcome(world.decide(block_size=0)) == ("remote", "long")


# -- the rules behind the guards -------------------------------------------------------------------------------


class Held:
    """A prefix index that holds so many tokens of every prompt."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.index = PrefixIndex()
        self.index.block_size = BLOCK
        self.asked = 0

    def cached_tokens(self, token_ids: Sequence[int], **_: object) -> int:
        return min(self.tokens, len(token_ids))

    def first_held(self, blocks: Sequence[int]) -> int:
        self.asked += 1
        return 0 if self.tokens else -1


@pytest.mark.parametrize(
    ("tokens", "cached", "expected"),
    [
        (1000, 0, ("remote", "long")),
        (1000, 744, ("remote", "long")),  # 256 are left
        (1000, 745, ("local", "cached")),
        (1000, 999, ("local", "cached")),
        (255, 255, ("local", "short")),
        (256, 1, ("local", "cached")),
    ],
)
def test_what_decode_holds_is_not_computed_elsewhere(
    world: World, tokens: int, cached: int, expected: tuple[str, str]
) -> None:
    world.hold(cached)
    decision = world.decide(tokens=tokens)
    assert outcome(decision) == expected
    assert not decision.candidates or decision.kind is Kind.REMOTE
    assert outcome(world.decide(tokens=tokens, mode=Mode.ON)) == ("remote", "on")


def turns(*words: str) -> dict[str, Any]:
    """The messages of a chat, each said by the user."""
    return {"messages": [{"role": "user", "content": each} for each in words]}


FIRST = "word " * 1000
"""A first turn that the prefill engine has counted: 1500 tokens, unlike what its bytes tell."""


@pytest.fixture
def talked(world: World) -> World:
    world.hold(1)
    remembers(world, turns(FIRST))
    return world


def remembers(world: World, body: dict[str, Any]) -> None:
    ids = json.dumps([7] * 1500).encode()
    assert world.rules.begin_turn(CHAT, fields(json.dumps(body).encode()), None, ids) is not None


CACHED = (1500 - 16) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("new_bytes", "expected"),
    [
        (100, ("local", "cached")),
        (800, ("local", "cached")),
        (1100, ("remote", "long")),
        (9000, ("remote", "long")),
    ],
)
def test_what_decode_holds_of_a_chat_is_not_computed_elsewhere(
    talked: World, new_bytes: int, expected: tuple[str, str]
) -> None:
    decision = talked.decide(api=CHAT, **turns(FIRST, "x" * new_bytes))
    assert outcome(decision) == expected
    assert decision.inputs is not None
    assert decision.inputs.cached == CACHED
    assert decision.inputs.tokens == decision.estimated_tokens
    assert 1500 + new_bytes // 4 <= decision.inputs.tokens <= 1500 + (new_bytes + 50) // 4, "counted, not estimated"
    assert outcome(talked.decide(api=CHAT, mode=Mode.ON, **turns(FIRST, "x" * new_bytes))) == ("remote", "on")


def test_a_chat_that_decode_has_evicted_is_new_and_its_length_known(talked: World) -> None:
    assert isinstance(talked.rules.index, Held)
    talked.rules.index.tokens = 0
    decision = talked.decide(api=CHAT, **turns(FIRST, "and?"))
    assert outcome(decision) == ("remote", "long")
    assert decision.inputs is not None
    assert decision.inputs.cached == 0
    assert 1500 < decision.estimated_tokens < 1520


def test_a_chat_that_is_short_once_it_is_counted(world: World) -> None:
    """Not cached: nothing of it is held."""
    world = World(LISTED, minimum=2000)
    world.hold(0)
    remembers(world, turns("word " * 3000))
    assert outcome(world.decide(api=CHAT, **turns("word " * 3000))) == ("local", "short")


def test_another_chat_is_not_looked_up(talked: World) -> None:
    assert outcome(talked.decide(api=CHAT, **turns("other " * 1000, "and?"))) == ("remote", "long")
    assert isinstance(talked.rules.index, Held)
    assert not talked.rules.index.asked


def test_what_another_rank_holds_of_a_chat_is_not_known(talked: World) -> None:
    assert outcome(talked.decide(api=CHAT, rank=1, **turns(FIRST, "and?"))) == ("remote", "long")


def test_what_a_rank_holds_is_not_known_of_the_others(world: World) -> None:
    """Where ranks share a port, the events of the first one are heard: they say nothing of another's cache."""
    world.hold(10_000)
    assert outcome(world.decide(tokens=1000, rank=0)) == ("local", "cached")
    assert outcome(world.decide(tokens=1000, rank=1)) == ("remote", "long")


def test_minimum_zero_means_every_prompt(world: World) -> None:
    """Also one that decode holds entirely."""
    world = World(LISTED, minimum=0)
    world.hold(10_000)
    assert outcome(world.decide(tokens=1)) == ("remote", "long")


def test_cost_rule_decides_and_is_explained(world: World) -> None:
    world.rules.costs = Costs.make(1.0)
    world.rules.signals.tell(Load(0, 0), 100.0)
    first, second = world.decide(), world.decide()
    assert (outcome(first), outcome(second)) == (("remote", "long"), ("local", "decode_idle"))
    for decision in (first, second):
        assert decision.inputs is not None
        assert decision.inputs.tokens == 1000
        assert decision.verdict is not None
        assert decision.verdict.static == "unfitted"
    assert first.candidates
    assert not second.candidates


def test_requests_that_a_connector_cannot_split(world: World) -> None:
    decision = world.decide(api=RESPONSES, connector="nixl-push", input="x" * 5000, prompt=None)
    assert outcome(decision) == ("local", "shape")
    assert "nixl-push" in decision.detail
    assert world.decide(api=RESPONSES, input="x" * 5000, prompt=None).kind is Kind.REMOTE
    assert world.decide(connector="nixl-push").kind is Kind.REMOTE


def test_a_store_needs_no_block_size(world: World) -> None:
    assert world.decide(connector="shared-storage", block_size=0).kind is Kind.REMOTE


# -- models and adapters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
@pytest.mark.parametrize("header", [(), (LISTED + b"," + ALLOWED,)])
def test_an_adapter_is_prefilled_only_where_it_is(mode: Mode, header: tuple[bytes, ...]) -> None:
    """Also where the header names others: its word counts for the order alone."""
    world = World(LISTED, ALLOWED)
    world.serve(("french", "german"), (), ("french",))
    decision = world.decide(*header, mode=mode, model="french")
    assert decision.kind is Kind.REMOTE
    assert [one.label for one in decision.candidates] == [ALLOWED.decode()]
    assert decision.adapter == "french"
    assert decision.ordered is bool(header)
    only_here = world.decide(*header, mode=mode, model="german")
    assert outcome(only_here) == ("local", "model")
    assert "german" in only_here.detail
    assert not only_here.budgeted


def test_an_adapter_that_decode_lacks_is_prefilled_nowhere(world: World) -> None:
    world.serve((), ("french",))
    decision = world.decide(LISTED, model="french")
    assert outcome(decision) == ("local", "model")
    assert "french" not in decision.detail
    assert outcome(world.decide(model="nobodys")) == ("remote", "long")
    assert outcome(world.decide(model="base")) == ("remote", "long")
    assert outcome(world.decide()) == ("remote", "long")


def test_usable_endpoints_without_the_adapter_do_not_help() -> None:
    world = World(LISTED, ALLOWED)
    world.serve(("french",), ("french",), ())
    next(iter(world.endpoints)).breaker.failed(0.0, at_once=True)
    decision = world.decide(model="french")
    assert outcome(decision) == ("local", "no_usable_prefill")
    assert decision.budgeted


def test_as_long_as_nobody_has_told_models_mean_nothing(world: World) -> None:
    assert outcome(world.decide(model="french")) == ("remote", "long")
    world.serve(("french",))
    assert outcome(world.decide(model="french")) == ("remote", "long")
