"""KV that is on its way and does not arrive."""

from sidecar.prefill.stall import UNSEEN_S, Fetching, Stall, parse_fetching

METRICS = """\
# HELP vllm:num_requests_kv_fetch_by_stage Simulated.
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="waiting_to_start"} 7.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="in_progress"} 2.0
vllm:num_requests_kv_fetch_by_stage{engine="1",model_name="m",stage="in_progress"} 1.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="completed_waiting"} 9.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1.024e+03
"""


def test_what_the_metrics_tell() -> None:
    assert parse_fetching(METRICS) == Fetching(3, 1024)
    assert parse_fetching("") is None
    assert parse_fetching(METRICS.replace("in_progress", "another")) is None
    assert parse_fetching(METRICS.replace("external_kv_transfer", "another")) is None
    assert parse_fetching(METRICS.replace("2.0", "two")) is None


def test_nothing_under_way_is_no_stall() -> None:
    stall = Stall()
    for now in range(60):
        stall.seen(Fetching(0, 5), now)
        assert stall.seconds == 0


def test_under_way_and_nothing_arrives() -> None:
    stall = Stall()
    for now in range(60):
        stall.seen(Fetching(1, 5), now)
        assert stall.seconds == now


def test_what_arrives_begins_anew() -> None:
    stall = Stall()
    for now in range(60):
        stall.seen(Fetching(1, now // 10), now)
        assert stall.seconds == now % 10


def test_a_look_that_failed_says_nothing() -> None:
    stall = Stall()
    stall.seen(None, 0)
    assert stall.seconds == 0
    stall.seen(Fetching(1, 5), 1)
    stall.seen(None, 3)
    assert stall.seconds == 0, "nothing is known beyond the last look"
    stall.seen(Fetching(1, 5), 5)
    assert stall.seconds == 4
    stall.seen(Fetching(1, 6), 6)
    assert stall.seconds == 0


def test_what_was_not_looked_at_for_long_does_not_count() -> None:
    stall = Stall()
    stall.seen(Fetching(1, 5), 0)
    stall.seen(Fetching(1, 5), UNSEEN_S + 1)
    assert stall.seconds == 0
