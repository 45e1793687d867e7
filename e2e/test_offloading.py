"""Offloading with a P2P tier on real engines, alone and beside NIXL: blocks are fetched, faults are survived.

The engines' connector is vLLM's own but for the copy between "GPU" and tier, see `e2e/cpu_tier.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from e2e.asking import (
    COMPLETIONS,
    GENERATE,
    Questions,
    ask,
    eventually,
    local_text,
    prompt,
    request_body,
    text_of,
    token_ids,
)
from e2e.engines import HOST, Engine
from e2e.named import Named
from e2e.pair import BLOCK_TOKENS, LEASE_S, TOKEN_BYTES, Pair, free, idle, paired
from e2e.rig import Rig
from tests.ports import free_ports

if TYPE_CHECKING:
    from tests.integration.sidecar import Sidecar

UNFETCHED_S = 3
"""How long the prefill engine keeps blocks that nobody fetches; vLLM's own default is 60."""
TIER = {
    "spec_name": "CpuTieringSpec",
    "spec_module_path": "cpu_tier",
    "cpu_bytes_to_use": 32 << 20,
    "secondary_tiers": [{"type": "p2p", "num_threads": 0, "unbound_store_timeout_s": UNFETCHED_S}],
}
NIXL: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": LEASE_S},
}
BESIDE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": TIER}
GREETS_WITHIN_S = 3
"""It takes a millisecond, on a machine that has nothing else to do."""
# The one that is written to must run NIXL's progress thread: nothing else drives it there.
WRITTEN_TO = "decode"


@pytest.fixture(scope="module")
def tier_rig() -> Iterator[Rig]:
    with Rig("tiny", kv_connector="OffloadingConnector", connector_config=TIER, prog_thread=WRITTEN_TO) as rig:
        yield rig


@pytest.fixture
def tier(tier_rig: Rig) -> Iterator[Named]:
    with paired(tier_rig.prefill[0], tier_rig.decode[0]) as pair:
        yield named(pair)


def named(pair: Pair) -> Named:
    def at_rest() -> None:
        eventually(lambda: not kept(pair.prefill))
        free(pair.prefill, pair.decode, within_s=20)

    return Named(pair, "offloading", pair.fetched_tokens, at_rest)


def in_tier(engine: Engine) -> int:
    """Tokens whose KV the engine has put into its tier since its start."""
    return int(engine.metrics().total("vllm:kv_offload_store_bytes_total")) // TOKEN_BYTES


def has_in_tier(engine: Engine, tokens: int) -> None:
    """Until so many are there: the engine copies them with its next steps."""
    try:
        eventually(lambda: in_tier(engine) >= tokens)
    except AssertionError:
        raise AssertionError(f"{engine.name}: KV of {in_tier(engine)} tokens in the tier, not {tokens}") from None


def kept(engine: Engine) -> float:
    """Share of the tier that waits to be fetched."""
    return engine.metrics().total("vllm:kv_offload_cpu_cache_read_usage_perc")


def test_fetched(tier: Named) -> None:
    tier.is_fetched()
    eventually(lambda: not kept(tier.pair.prefill))  # all of it was fetched, none waits for its time to be over


def test_prefill_killed_between_the_legs(tier: Named) -> None:
    """Decode is never told to dial a peer that is gone: it would lose its P2P tier for good."""
    tier.is_recomputed_when_prefill_dies_between_the_legs()


def test_prefill_frozen_between_the_legs(tier: Named) -> None:
    tier.is_recomputed_when_prefill_freezes_between_the_legs()
    assert greets(tier.pair.decode)


def test_prefill_killed_at_any_moment(tier: Named) -> None:
    tier.is_answered_when_prefill_dies_while_decode_waits()


def test_a_decode_engine_that_has_lost_its_tier(tier: Named) -> None:
    """What the check before each decode leg is for, on the engine itself; and the sidecar knows such an engine."""
    decode = tier.pair.decode
    questions = Questions(decode)
    sidecar = tier.serve()
    assert questions.next().ask(sidecar).decision.startswith("remote")
    tier.pair.closing(decode.kill)
    nobody = {"kv_request_id": "x", "remote_host": HOST, "remote_port": free_ports()}
    body = request_body(COMPLETIONS, prompt(300), kv_transfer_params={"remote_prefiller": nobody})
    assert ask(decode, COMPLETIONS, body).status == 200
    eventually(lambda: not greets(decode))
    assert questions.next().ask(sidecar).decision.startswith("recompute; reason=handoff_own_channel_dead")
    assert "restart the engine" in sidecar.log


def greets(engine: Engine) -> bool:
    """Whether the thread that does the engine's P2P is alive."""
    with socket.create_connection((HOST, engine.p2p_port), GREETS_WITHIN_S) as line:
        try:
            return line.recv(1) == b"\xff"
        except TimeoutError:
            return False


def test_client_leaves_between_the_legs(tier: Named) -> None:
    tier.is_given_back_when_the_client_leaves_between_the_legs()


def test_client_leaves_while_blocks_are_fetched(tier: Named) -> None:
    tier.is_given_back_when_the_client_leaves_while_it_is_fetched()


# -- a peer that has the prefix --------------------------------------------------------------------------------


def from_peer(pair: Pair, sidecar: Sidecar, source: str) -> int:
    """Tokens that the decode engine fetches for a prompt that the prefill engine has; the text must be right."""
    body = request_body(COMPLETIONS, prompt(600))
    earlier = in_tier(pair.prefill)
    computed = ask(pair.prefill, COMPLETIONS, {**body, "max_tokens": 1}).json["usage"]["prompt_tokens"]
    has_in_tier(pair.prefill, earlier + computed // BLOCK_TOKENS * BLOCK_TOKENS)
    before = pair.fetched_tokens()
    answer = ask(sidecar, COMPLETIONS, body, 20, x_kv_cache_source_host_port=source)
    assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
    return pair.fetched_tokens() - before


def test_a_prefix_of_a_peer(tier: Named) -> None:
    """Whatever the decision is; the header names the pod, the flag its P2P port."""
    pair, peer = tier.pair, tier.pair.prefill.address
    sidecar = tier.serve("--enable-p2p-pull", "on", disagg="off")
    assert from_peer(pair, sidecar, peer) > 300
    assert from_peer(pair, sidecar, "127.0.0.9:8000") == 0  # nobody allows it
    assert from_peer(pair, tier.serve(disagg="off"), peer) == 0
    elsewhere = tier.serve("--enable-p2p-pull", "on", "--p2p-connector-port", str(free_ports()), disagg="off")
    assert from_peer(pair, elsewhere, peer) == 0  # there is nobody
    assert greets(pair.decode)
    idle(sidecar)


def test_prefill_fetches_what_decode_has(both_ways_rig: Rig) -> None:
    """The conversation so far, answer and all, by the hash of its tokens; another prompt's never."""
    with paired(both_ways_rig.prefill[0], both_ways_rig.decode[0]) as pair:
        sidecar = named(pair).serve("--prefill-from-decode", "on")
        first = token_ids(600)
        turn = request_body(GENERATE, first, 80)
        turn["sampling_params"]["ignore_eos"] = True
        earlier = in_tier(pair.decode)
        said = ask(pair.decode, GENERATE, turn).json["choices"][0]["token_ids"]
        computed = 600 + len(said) - 1  # the last token's KV is of no use to anyone
        has_in_tier(pair.decode, earlier + computed // BLOCK_TOKENS * BLOCK_TOKENS)

        def fetched() -> int:
            read_bytes = pair.prefill.metrics().total("vllm:kv_offload_tiering_read_bytes_total", tier="1:p2p")
            return int(read_bytes) // TOKEN_BYTES

        before = fetched()
        body = request_body(GENERATE, [*first, *said, *token_ids(60)])
        answer = ask(sidecar, GENERATE, body)
        assert answer.decision.startswith("remote")
        assert text_of(answer) == local_text(pair.decode, GENERATE, body)
        assert 600 < fetched() - before <= 600 + 80
        before = fetched()
        assert ask(sidecar, GENERATE, request_body(GENERATE, token_ids(600))).decision.startswith("remote")
        assert fetched() == before
        idle(sidecar)


@pytest.fixture(scope="module")
def both_ways_rig() -> Iterator[Rig]:
    config = {**TIER, "offload_prompt_only": False}
    with Rig("tiny", kv_connector="OffloadingConnector", connector_config=config, prog_thread=True) as rig:
        yield rig


@pytest.fixture(scope="module")
def both_rig() -> Iterator[Rig]:
    config = {"connectors": [NIXL, BESIDE]}
    with Rig("tiny", kv_connector="MultiConnector", connector_config=config, prog_thread=WRITTEN_TO) as rig:
        yield rig


def test_beside_nixl(both_rig: Rig) -> None:
    """A MultiConnector: prompts are handed over by NIXL, prefixes fetched over the P2P tier."""
    with paired(both_rig.prefill[0], both_rig.decode[0]) as pair:
        questions = Questions(pair.decode)
        sidecar = pair.serve("--enable-p2p-pull", "on")
        before, fetched = pair.pulled_tokens(), pair.fetched_tokens()
        for _ in range(8):
            assert questions.next().ask(sidecar).decision.startswith("remote")
        assert pair.pulled_tokens() - before > 8 * 200
        assert pair.fetched_tokens() == fetched
        local = pair.serve("--enable-p2p-pull", "on", disagg="off")
        assert from_peer(pair, local, pair.prefill.address) > 300
        idle(sidecar)
