"""Sums of several processes' metrics; counters of the dead are kept, their gauges are not."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from sidecar.admin.observer import Observer
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import AllowList
from sidecar.prefill.endpoints import Endpoints
from sidecar.workers.totals import Summed, Totals, combined, totals_of


def observer() -> Observer:
    return Observer(Endpoints([], AllowList([]), lambda: 0.0), Budget(1, 0))


def told(of: Observer) -> Totals:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(totals_of(of.collection, 1.5, 100)), type=Totals)


def busy() -> Observer:
    one = observer()
    one.attempts.add(("ok",), 3)
    one.ttft.observe(("remote",), 0.02, "a" * 32)
    one.ttft.observe(("local",), 200.0)
    one.leg_started("decode")
    return one


def exposition(own: Observer, others: list[Totals]) -> str:
    registry = CollectorRegistry()
    registry.register(Summed(own.collection, lambda: others, ()))
    return generate_latest(registry).decode()


def test_sums() -> None:
    own = observer()
    own.attempts.add(("ok",), 1)
    own.attempts.add(("timeout",), 1)
    text = exposition(own, [told(busy()), told(busy())])
    assert 'pd_sidecar_prefill_attempts_total{outcome="ok"} 7.0' in text
    assert 'pd_sidecar_prefill_attempts_total{outcome="timeout"} 1.0' in text
    assert 'pd_sidecar_ttft_seconds_bucket{decision="remote",le="0.01"} 0.0' in text
    assert 'pd_sidecar_ttft_seconds_bucket{decision="remote",le="0.025"} 2.0' in text
    assert 'pd_sidecar_ttft_seconds_bucket{decision="local",le="120.0"} 0.0' in text
    assert 'pd_sidecar_ttft_seconds_count{decision="local"} 2.0' in text
    assert 'pd_sidecar_ttft_seconds_sum{decision="local"} 400.0' in text
    assert 'pd_sidecar_inflight{leg="decode"} 2.0' in text
    assert "pd_sidecar_build_info" in text
    assert text.count("pd_sidecar_recompute_inflight 0.0") == 1


def test_the_dead_keep_their_counts() -> None:
    kept = combined(told(busy()), told(busy()))
    assert kept.cpu_seconds == 3.0
    text = exposition(observer(), [kept, told(busy())])
    assert 'pd_sidecar_prefill_attempts_total{outcome="ok"} 9.0' in text
    assert 'pd_sidecar_ttft_seconds_count{decision="remote"} 3.0' in text
    assert 'pd_sidecar_inflight{leg="decode"} 1.0' in text


def test_exemplars() -> None:
    registry = CollectorRegistry()
    registry.register(Summed(observer().collection, lambda: [told(busy())], ()))
    assert f'# {{trace_id="{"a" * 32}"}} 0.02' in generate_openmetrics(registry).decode()
