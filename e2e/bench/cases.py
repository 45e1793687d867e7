"""The cases and the targets, as data. It must not know how a case is run or shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Case:
    """One thing that is measured for every proxy in alternating rounds.

    closed: each of `connections` sends its next request `pause_us` after the last answer.
    stream: `streams` open answers of `rate_hz` events a second; `step` sends the events of all streams at once,
    as the steps of one engine do, instead of evenly spread.
    memory: a fresh process; `requests` requests, then its memory.
    """

    name: str
    title: str
    kind: Literal["closed", "stream", "memory"]
    body_bytes: int = 1_000
    gzip: bool = False
    connections: int = 16
    pause_us: int = 0
    streams: int = 0
    rate_hz: int = 0
    step: bool = False
    usage: bool = False
    requests: int = 0
    quick: bool = False


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("body-1k", "1 KB bodies, 16 connections", "closed", quick=True),
        Case("body-16k", "16 KB bodies, 16 connections", "closed", body_bytes=16_000),
        Case("body-100k", "100 KB bodies, 16 connections", "closed", body_bytes=100_000, quick=True),
        Case("body-100k-gzip", "The same, compressed by the client", "closed", body_bytes=100_000, gzip=True),
        Case("body-1m", "1 MB bodies, 16 connections", "closed", body_bytes=1_000_000, quick=True),
        Case("body-8m", "8 MB bodies (an image), 4 connections", "closed", body_bytes=8_000_000, connections=4),
        Case("conns-1", "1 KB bodies, 1 connection", "closed", connections=1, quick=True),
        Case("conns-256", "1 KB bodies, 256 connections", "closed", connections=256),
        Case("paced-16", "1 KB bodies, 16 connections, 10 ms pauses", "closed", pause_us=10_000),
        Case("stream-64x50", "64 streams of 50 events/s", "stream", streams=64, rate_hz=50, quick=True),
        Case(
            "stream-64x50-step",
            "64 streams of 50 events/s in engine steps",
            "stream",
            streams=64,
            rate_hz=50,
            step=True,
        ),
        Case(
            "stream-64x50-usage",
            "64 streams of 50 events/s with usage to correct in each",
            "stream",
            streams=64,
            rate_hz=50,
            usage=True,
        ),
        Case("stream-512x20", "512 streams of 20 events/s", "stream", streams=512, rate_hz=20),
        Case("stream-2000x10", "2,000 streams of 10 events/s", "stream", streams=2000, rate_hz=10),
        Case("rss-10k", "Memory after 10,000 requests of 1 KB", "memory", requests=10_000, quick=True),
        Case(
            "peak-64m", "Peak memory for 64 MB bodies", "memory", body_bytes=64_000_000, connections=1, requests=3
        ),
    )
}

# What is compared: each a number per proxy and round, smaller is better.
Metric = Literal["cpu_us", "added_p50_us", "added_p99_us", "rss_mb", "peak_bodies", "errors"]


@dataclass(frozen=True)
class Target:
    """`proxy`'s `metric` in `case` is at most `limit` times `against`'s (or `limit` itself without `against`)."""

    stage: Literal["first", "goal"]
    case: str
    metric: Metric
    against: str | None
    limit: float
    proxy: str = "sidecar"


TARGETS: tuple[Target, ...] = (
    Target("first", "body-1k", "cpu_us", "vllm-router", 2.5),
    Target("first", "body-100k", "cpu_us", "vllm-router", 1.5),
    Target("first", "stream-64x50", "cpu_us", "nginx", 1.3),
    Target("first", "rss-10k", "rss_mb", None, 60),
    Target("goal", "body-1k", "cpu_us", "vllm-router", 1.0),
    Target("goal", "body-100k", "cpu_us", "vllm-router", 0.8),
    Target("goal", "body-1m", "cpu_us", "vllm-router", 0.3),
    Target("goal", "body-8m", "cpu_us", "vllm-router", 0.3),
    Target("goal", "stream-64x50", "cpu_us", "nginx", 1.2),
    Target("goal", "stream-512x20", "cpu_us", "nginx", 1.2),
    Target("goal", "conns-1", "added_p50_us", "vllm-router", 1.0),
    Target("goal", "conns-1", "added_p99_us", "vllm-router", 1.0),
    Target("goal", "body-1k", "added_p50_us", "vllm-router", 1.0),
    Target("goal", "body-1k", "added_p99_us", "vllm-router", 1.0),
    Target("goal", "rss-10k", "rss_mb", "vllm-router", 0.6),
    Target("goal", "peak-64m", "peak_bodies", None, 3),
    Target("goal", "body-1k", "cpu_us", "sidecar-plain", 1.25),
    Target("goal", "body-1k", "cpu_us", "sidecar-plain", 1.25, proxy="sidecar-traced"),
    Target("goal", "stream-64x50", "cpu_us", "sidecar-plain", 1.25, proxy="sidecar-traced"),
    Target("goal", "stream-64x50-usage", "cpu_us", "sidecar-local", 1.25),
    Target("goal", "stream-2000x10", "errors", None, 0),
    Target("goal", "stream-2000x10", "added_p99_us", None, 5_000),
)
