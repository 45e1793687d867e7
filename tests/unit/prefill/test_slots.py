"""Which adapters an engine has at hand, as its metrics tell; hostile ones too."""

import pytest

from sidecar.prefill.slots import Slots, parse_slots


def row(when: object, running: str, waiting: str = "", most: object = 2) -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{most}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} {when}\n'
    )


def test_the_ones_that_ran_last() -> None:
    """Rows stay for ever; the newest two adapters hold the two slots."""
    metrics = (
        "# TYPE vllm:lora_requests_info gauge\n"
        + row("1.7960079164417717e+09", "a", "a")
        + row("1.796007916929532e+09", "")
        + row("1.796007920e+09", "b,c")
        + row("1.796007910e+09", "d")
    )
    assert parse_slots(metrics) == Slots(2, frozenset({"b", "c"}))


def test_an_adapter_counts_by_its_newest_row() -> None:
    assert parse_slots(row(1, "a") + row(5, "b") + row(9, "c,a")) == Slots(2, frozenset({"a", "c"}))
    assert parse_slots(row(1, "a,b,c", most=1)) == Slots(1, frozenset("abc"))
    assert parse_slots(row(7, "", "a")) == Slots(2, frozenset("a"))
    assert parse_slots(row(7, "")) == Slots(2, frozenset())


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        "vllm:num_requests_waiting 0\n",
        row("x", "a"),
        row("NaN", "a"),
        row("Inf", "a"),
        row(1, "a", most="x"),
        row(1, "a", most=0),
        row(1, "a", most=2**64),
        row(1, "a", most=-3),
        row(1, 'a\\"b'),
        "x" + row(1, "a"),
    ],
    ids=range(11),
)
def test_what_tells_nothing(metrics: str) -> None:
    assert parse_slots(metrics) is None


def test_place() -> None:
    full, room = Slots(2, frozenset({"a", "b"})), Slots(2, frozenset({"a"}))
    assert full.has_place("a")
    assert not full.has_place("c")
    assert room.has_place("c")
