"""The mixed load has all four kinds, and is the same for all ways of a round."""

from __future__ import annotations

from collections import Counter

from e2e.decide.__main__ import plan
from e2e.decide.trace import BURST, CHAT, DOCUMENT, FIRST_TURN, LATER_TURN, WINDOW_S, mixed
from e2e.decide.ways import MAIN, SIDE


def test_it_is_seeded() -> None:
    assert mixed(3) == mixed(3)
    assert mixed(3) != mixed(4)


def test_all_kinds_are_there_and_within_the_window() -> None:
    for seed in range(20):
        clients = mixed(seed)
        counts = Counter(client.kind for client in clients)
        assert counts == {CHAT: 9, DOCUMENT: 3, FIRST_TURN: 3, BURST: 10}
        assert all(0 <= client.at_s < WINDOW_S for client in clients)
        talks = [client for client in clients if client.kind == FIRST_TURN]
        assert all(one.remembers and one.later_kind == LATER_TURN and len(one.turns) == 3 for one in talks)
        assert all(len(turn.ids) <= 40 for one in talks for turn in one.turns[1:])
        together = Counter(client.at_s for client in clients if client.kind == BURST)
        assert sorted(together.values()) == [5, 5]


def test_no_two_prompts_begin_alike() -> None:
    prompts = [client.turns[0].ids[:32] for seed in range(4) for client in mixed(seed)]
    assert len(set(prompts)) == len(prompts)


def test_main_ways_come_in_every_round_and_the_others_once() -> None:
    rounds = plan(None, 4)
    assert all(set(MAIN) <= set(order) for order in rounds)
    assert Counter(name for order in rounds for name in order if name in SIDE) == dict.fromkeys(SIDE, 1)
    assert plan(["auto", "local"], 2) == [["auto", "local"], ["auto"]]
    assert plan(["local"], 1) == [["local"]]
