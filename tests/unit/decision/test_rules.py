"""What the rules know of the local engine, and for how long."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from sidecar.decision.cost import Costs
from sidecar.decision.rules import FIRST_IDS, Rules
from sidecar.decision.shape import BYTES_PER_TOKEN
from sidecar.decision.signals import STALE_AFTER_S, Load, Signals, parse_load
from sidecar.exchange.apis import CHAT, COMPLETIONS, GENERATE, Api
from sidecar.exchange.splice import Fields, fields
from transport.prefix_index import BlockRemoved, BlockStored, PrefixIndex

BASE = Load(2, 0, frozenset({"base"}))

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_running{engine="1",model_name="base"} 1.0
vllm:num_requests_waiting{engine="0",model_name="base"} 2.0
vllm:num_requests_waiting{engine="1",model_name="base"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="base"} 0.75
vllm:generation_tokens_total{engine="0",model_name="base"} 1200.0
vllm:generation_tokens_total{engine="1",model_name="base"} 34.0
"""


def test_load_of_all_ranks() -> None:
    assert parse_load(METRICS) == Load(4, 2, frozenset({"base"}), 1234)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "vllm:num_requests_waiting 1.0\n",
        # No count, though Prometheus has them: whoever asks once a second must not end of one.
        *(f"vllm:num_requests_running {value}\n" for value in ("x", "NaN", "+Inf", "-1.0", "1e300")),
        METRICS.replace("34.0", "+Inf"),
    ],
)
def test_no_load(text: str) -> None:
    assert parse_load(text) is None


def test_signals_go_stale() -> None:
    signals = Signals()
    assert signals.fresh(0.0) is None
    signals.tell(BASE, 10.0)
    assert signals.fresh(10.0 + STALE_AFTER_S - 0.01) == BASE
    signals.tell(None, 11.0)
    assert signals.fresh(10.0 + STALE_AFTER_S) is None, "a failed scrape is no news"


def test_streams_by_whoever_sees_most_and_for_a_while() -> None:
    signals = Signals()
    assert signals.streams(0) == 0
    assert signals.streams(5) == 5
    for second in range(60):
        signals.tell(BASE, float(second))
    assert signals.streams(0) == 2
    signals.tell(Load(0, 0), 61.0)
    assert 1 < signals.streams(0) < 2, "a short pause is not idleness"
    for second in range(60):
        signals.tell(Load(0, 0), 62.0 + second)
    assert signals.streams(0) < 0.5


class Index:
    """A prefix lookup that holds every prompt to two thirds."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.asked: list[tuple[str | None, str | None]] = []
        self.lengths: list[int] = []
        self.known = True

    def cached_tokens(
        self, token_ids: Sequence[int], *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> int | None:
        self.asked.append((lora_name, cache_salt))
        self.lengths.append(len(token_ids))
        return len(token_ids) * 2 // 3 if self.known else None

    def first_held(self, blocks: Sequence[int]) -> int:
        return next((place for place, block in enumerate(blocks) if self.index.holds(block)), -1)


def rules(index: Index | None = None, costs: Costs | None = None) -> Rules:
    made = Rules(256, lambda: 100.0, index=index, costs=costs)
    made.signals.tell(BASE, 99.0)
    return made


@pytest.mark.parametrize(
    ("api", "body", "asked"),
    [
        (COMPLETIONS, {"prompt": [1] * 30}, (None, None)),
        (COMPLETIONS, {"prompt": [1] * 30, "model": "base"}, (None, None)),
        (COMPLETIONS, {"prompt": [1] * 30, "model": "adapter"}, ("adapter", None)),
        (COMPLETIONS, {"prompt": [1] * 30, "model": None, "cache_salt": None}, (None, None)),
        (COMPLETIONS, {"prompt": [1] * 30, "cache_salt": "s\u00e4lt"}, (None, "s\u00e4lt")),
        (GENERATE, {"token_ids": [1] * 30, "model": "adapter"}, ("adapter", None)),
    ],
)
def test_the_index_is_asked_with_what_tells_prompts_apart(
    api: Api, body: dict[str, Any], asked: tuple[str | None, str | None]
) -> None:
    index = Index()
    assert rules(index).cached_tokens(api, fields(json.dumps(body).encode())) == 20
    assert index.asked == [asked] * 2, "its beginning, then all of it"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, "x"]},
        {"prompt": [1.5]},
        {"prompt": [1], "cache_salt": 7},
        {"prompt": [1], "model": ["base"]},
    ],
)
def test_what_the_engine_will_refuse_is_not_looked_up(body: dict[str, Any]) -> None:
    index = Index()
    assert rules(index).cached_tokens(COMPLETIONS, fields(json.dumps(body).encode())) == 0
    assert not index.asked


@pytest.mark.parametrize("count", [1, FIRST_IDS - 1, FIRST_IDS, FIRST_IDS + 1, 5000])
def test_a_new_prompt_is_not_read_to_its_end(count: int) -> None:
    index = Index()
    index.known = False
    members = fields(json.dumps({"prompt": list(range(count))}).encode())
    assert rules(index).cached_tokens(COMPLETIONS, members) == 0
    assert len(index.asked) == 1
    assert index.lengths == [min(count, FIRST_IDS)]
    index.known = True
    assert rules(index).cached_tokens(COMPLETIONS, members) == count * 2 // 3
    assert index.lengths[-1] == count or count == 1


def test_what_is_broken_behind_its_beginning_is_the_engines_to_refuse() -> None:
    prompt = [*range(FIRST_IDS), "x"]
    assert rules(Index()).cached_tokens(COMPLETIONS, fields(json.dumps({"prompt": prompt}).encode())) == 0


# -- prompts of text -----------------------------------------------------------------------------------------

BLOCK = 16


def stored(index: Index, ids: list[int], *, hashes: int = 1, lora_id: int | None = None, salt: str = "") -> None:
    """The engine's event for a prompt's whole blocks, whose hashes count up from `hashes`."""
    count = len(ids) // BLOCK
    lora = "adapter" if lora_id is not None else None
    keys: list[list[Any] | None] = [
        [*([lora] if lora else []), *([salt] if salt and not n else [])] for n in range(count)
    ]
    index.index.apply(
        BlockStored(
            list(range(hashes, hashes + count)),
            None,
            ids[: count * BLOCK],
            BLOCK,
            lora_id=lora_id,
            lora_name=lora,
            extra_keys=[key or None for key in keys],
            medium="GPU",
            kv_cache_spec_kind="full_attention",
        )
    )


def said(*words: str, **more: Any) -> Fields:
    messages = [{"role": "user", "content": each} for each in words]
    return fields(json.dumps({"messages": messages, **more}).encode())


LONG = "word " * 400


def begin(made: Rules, members: Fields, ids: list[int]) -> None:
    made.begin_turn(CHAT, members, None, json.dumps(ids).encode())


def cached(made: Rules, members: Fields) -> int:
    known = made.known(CHAT, members)
    return known.cached if known is not None else -1


def test_a_chat_is_cached_as_far_as_its_blocks_are_held() -> None:
    index, ids = Index(), list(range(1000, 1400))
    made = rules(index)
    stored(index, ids)
    begin(made, said(LONG), ids)
    found = made.known(CHAT, said(LONG, "and?"))
    assert found is not None
    assert found.cached == 24 * BLOCK, "of 25 blocks the last may be the template's"
    assert found.tokens == 400 + len(b', {"role": "user", "content": "and?"}]') // 4
    for held in range(24, -1, -1):
        index.index.apply(BlockRemoved([held + 1], "GPU"))  # as the engine does it: from behind
        assert cached(made, said(LONG, "and?")) == held // 6 * 6 * BLOCK, "never more than is held"


def test_a_prompt_of_one_block_is_not_worth_it() -> None:
    index, ids = Index(), list(range(1000, 1030))
    made = rules(index)
    stored(index, ids)
    begin(made, said("word " * 30), ids)
    assert made.known(CHAT, said("word " * 30, "and?")) is None


def test_salt_and_adapter_tell_texts_apart() -> None:
    index, ids = Index(), list(range(1000, 1400))
    made = rules(index)
    stored(index, ids, salt="s")
    begin(made, said(LONG, cache_salt="s"), ids)
    assert cached(made, said(LONG, "and?", cache_salt="s")) == 24 * BLOCK
    assert made.known(CHAT, said(LONG, "and?", cache_salt="t")) is None
    assert made.known(CHAT, said(LONG, "and?")) is None
    assert made.known(CHAT, said(LONG, "and?", cache_salt="s", model="adapter")) is None


def test_an_adapter_that_is_loaded_anew_has_computed_nothing() -> None:
    index, ids = Index(), list(range(1000, 1400))
    made = rules(index)
    begin(made, said(LONG, model="adapter"), ids)
    assert made.known(CHAT, said(LONG, model="adapter")) is None, "nobody has told which adapter this is"
    stored(index, ids, lora_id=1)
    begin(made, said(LONG, model="adapter"), ids)
    assert cached(made, said(LONG, "and?", model="adapter")) == 24 * BLOCK
    stored(index, [5] * 16, hashes=500, lora_id=2)
    assert made.known(CHAT, said(LONG, "and?", model="adapter")) is None


def test_texts_without_an_index_are_not_remembered() -> None:
    made = rules()
    begin(made, said(LONG), [1, 2, 3])
    assert made.known(CHAT, said(LONG)) is None
    early = rules(Index())
    begin(early, said(LONG), list(range(400)))
    assert early.known(CHAT, said(LONG)) is None, "nobody has told how long a block is"
    assert early.known(CHAT, said(LONG, model=7)) is None


def test_unknown_is_not_cached() -> None:
    index = Index()
    index.known = False
    members = fields(b'{"prompt":[1,2,3]}')
    assert rules(index).cached_tokens(COMPLETIONS, members) == 0
    assert rules().cached_tokens(COMPLETIONS, members) == 0
    untold = Rules(256, lambda: 100.0, index=Index())
    assert untold.cached_tokens(COMPLETIONS, fields(b'{"prompt":[1],"model":"base"}')) == 0, "or an adapter?"


def test_stale_signals_bring_the_static_rule() -> None:
    made = Rules(256, lambda: 100.0, costs=Costs.make(1.0))
    made.signals.tell(BASE, 100.0 - STALE_AFTER_S)
    assert made.weigh(1000, 0, 0)[1].static == "stale"
    made.signals.tell(BASE, 99.5)
    assert made.weigh(1000, 0, 0)[1].static == "unfitted"
    assert rules().weigh(1000, 0, 0)[1].static == "off"


def test_length_of_text_is_learnt() -> None:
    made = rules()
    assert made.bytes_per_token(CHAT) == BYTES_PER_TOKEN
    for _ in range(200):
        made.learn_length(CHAT, 2500, 1000)
        made.learn_length(CHAT, 1_000_000, 100)  # an image
        made.learn_length(CHAT, 100, 0)
    assert made.bytes_per_token(CHAT) == pytest.approx(2.5, rel=0.01)
    assert made.bytes_per_token(COMPLETIONS) == BYTES_PER_TOKEN


def test_what_is_ahead() -> None:
    made = rules()
    assert made.began_here(100) == 0
    assert made.began_here(50) == 100
    made.ended_here(100)
    assert made.weigh(1000, 0, 77)[0].local_ahead == 50
    assert made.weigh(1000, 0, 77)[0].prefill_ahead == 77
    made.ended_here(50)
    assert made.local_ahead == 0


def test_a_prompt_that_is_computed_here_uses_up_what_the_streams_bear() -> None:
    costs = Costs.make(30.0)
    for tokens in (100, 200, 400, 800) * 3:
        costs.computed_here(tokens, 0, tokens / 1000)
        costs.computed_there(tokens, tokens / 1000)
        costs.pulled(tokens, 0.05)
    rules = Rules(0, lambda: 3.0, costs=costs)
    for second, generated in enumerate((0, 2000, 4000)):
        rules.signals.tell(Load(4, 0, generated=generated), float(second + 1))
    ways = [rules.weigh(100, 0, 1000)[1].remote for _ in range(12)]
    assert ways == sorted(ways), "once it is used up, prompts go remote"
    assert 1 < ways.count(False) < 12
    rules.signals.tell(Load(4, 0, generated=20_000), 3.0)
    assert not rules.weigh(100, 0, 1000)[1].remote
