"""The gate: every rule with a pair that it refuses and the nearest pair that it must not refuse."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.compatibility import check, check_engine_id
from transport.handshake import Description, Geometry

GEOMETRY = Geometry(
    num_blocks=100,
    block_size=16,
    physical_per_logical=1,
    block_lens=(4096, 4096),
    block_strides=(4096, 4096),
    regions=2,
    layout="LBHNC",
    attention_backend="FLASH_ATTN",
    ssm_sizes=(0, 0),
    dcp_size=1,
    pcp_size=1,
)
HERE = Description("h", "decode", GEOMETRY, "14")
THERE = replace(HERE, engine_id="prefill")


def shaped(description: Description = THERE, **geometry: Any) -> Description:
    return replace(description, geometry=replace(GEOMETRY, **geometry))


def reason(*remote: Description, local: Description | None = HERE) -> str | None:
    found = check(local, remote)
    if found is None:
        return None
    assert found.cause
    assert found.change
    return found.reason


def test_equal_engines_fit() -> None:
    assert reason(THERE) is None
    assert reason(THERE, local=None) is None


def test_the_hash_decides() -> None:
    other = replace(THERE, compatibility_hash="g")
    assert reason(other) == "hash"
    assert reason(other, local=None) is None


@pytest.mark.parametrize(
    ("geometry", "said"),
    [
        ({"attention_backend": "TRITON_ATTN"}, "TRITON_ATTN"),
        ({"regions": 1, "block_lens": (4096,), "block_strides": (4096,)}, "model"),
        ({"block_lens": (2048, 4096)}, "--kv-cache-dtype"),
        ({}, "--model"),
    ],
)
def test_the_likely_cause_of_a_hash_mismatch_is_named(geometry: dict[str, Any], said: str) -> None:
    found = check(HERE, [shaped(replace(THERE, compatibility_hash="g"), **geometry)])
    assert found is not None
    assert said in found.cause + found.change


def test_other_fields_with_another_hash_mean_another_version() -> None:
    older = Description("g", "prefill", None, "unknown", missing_fields=("dcp_size",))
    found = check(HERE, [older])
    assert found is not None
    assert found.reason == "hash"
    assert "two vLLM versions" in found.cause
    newer = replace(THERE, compatibility_hash="g", schema="unknown")
    found = check(HERE, [newer])
    assert found is not None
    assert "two vLLM versions" in found.cause


def test_metadata_that_cannot_be_read_is_not_held_against_an_engine_of_the_same_hash() -> None:
    assert reason(Description("h", "prefill", None, "unknown")) is None


def test_the_local_engine_itself_is_found_out() -> None:
    found = check(HERE, [HERE])
    assert found is not None
    assert found.reason == "same_engine"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in found.change


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # reason, what differs there, what differs here
    ("block_size", {"block_size": 32}, {}),
    ("block_size", {"block_size": 16}, {"block_size": 24}),
    ("block_size", {"block_size": 8, "block_lens": (2048, 2048)}, {}),
    ("layout", {"layout": "LBNHC"}, {}),
    ("metadata", {"block_strides": (2048, 4096)}, {}),
    ("metadata", {"block_strides": (4096,)}, {}),
    ("metadata", {"regions": 3}, {}),
    ("context_parallel", {"pcp_size": 4, "dcp_size": 2}, {}),
    ("context_parallel", {"dcp_size": 2}, {"pcp_size": 2}),
    ("context_parallel", {"pcp_size": 2}, {"dcp_size": 2}),
    ("context_parallel", {"dcp_size": 2}, {"dcp_size": 3}),
    ("context_parallel", {"dcp_size": 2, "ssm_sizes": (8, 8)}, {"ssm_sizes": (8, 8)}),
]
ALLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layout": "LBHNC"}, {"layout": "LBNHC"}),
    ({"layout": "BLHNC", "attention_backend": "FLASHMLA"}, {"attention_backend": "FLASHMLA"}),
    ({"block_strides": (8192, 4096)}, {}),
    ({"num_blocks": 7}, {}),
    ({"block_lens": (2048, 2048)}, {}),
    ({"regions": 1, "block_lens": (4096,), "block_strides": (4096,)}, {}),
    ({"dcp_size": 4}, {"dcp_size": 2}),
    ({"pcp_size": 2, "dcp_size": 2}, {}),
    ({"dcp_size": 2}, {}),
    ({"dcp_size": 2}, {"pcp_size": 2, "dcp_size": 2}),
    ({"pcp_size": 2}, {"pcp_size": 2}),
    ({"block_lens": (1024, 4096), "ssm_sizes": (8, 8)}, {"ssm_sizes": (8, 8)}),
]


@pytest.mark.parametrize(("expected", "there", "here"), REFUSED)
def test_what_the_engine_is_certain_to_refuse_is_refused(
    expected: str, there: dict[str, Any], here: dict[str, Any]
) -> None:
    assert reason(shaped(**there), local=shaped(HERE, **here)) == expected


@pytest.mark.parametrize(("there", "here"), ALLOWED)
def test_what_the_engine_may_accept_is_left_to_it(there: dict[str, Any], here: dict[str, Any]) -> None:
    assert reason(shaped(**there), local=shaped(HERE, **here)) is None


def test_ranks_of_one_engine_belong_together() -> None:
    assert reason(THERE, THERE) is None
    assert reason(THERE, replace(THERE, engine_id="another")) == "ranks_differ"
    assert reason(THERE, shaped(num_blocks=99)) is None  # whether a local rank reads from both is not told
    assert reason(THERE, shaped(regions=3)) == "metadata"


def test_the_engine_that_a_handoff_names() -> None:
    assert check_engine_id(THERE, "prefill") is None
    assert check_engine_id(replace(THERE, engine_id=None), "prefill") is None
    found = check_engine_id(THERE, "another")
    assert found is not None
    assert found.reason == "engine_id"


sizes = st.integers(1, 4)
geometries = st.builds(
    lambda bs, dcp, pcp, lens, layout, ssm: replace(
        GEOMETRY,
        block_size=bs,
        dcp_size=dcp,
        pcp_size=pcp,
        block_lens=lens,
        block_strides=lens,
        regions=len(lens),
        layout=layout,
        ssm_sizes=ssm,
    ),
    sizes,
    sizes,
    sizes,
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.sampled_from(["LBHNC", "LBNHC", "BLHNC"]),
    st.sampled_from([(0, 0), (1, 1)]),
)


@given(geometries, geometries)
def test_no_pair_of_engines_confuses_the_gate(here: Geometry, there: Geometry) -> None:
    local = replace(HERE, geometry=here)
    reason(replace(THERE, geometry=there), local=local)
    # An engine fits its own twin, whatever it is, save where vLLM refuses the combination as such.
    twin = reason(replace(THERE, geometry=here), local=local)
    assert twin in (None, "context_parallel")
