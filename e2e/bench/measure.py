"""Runs cases in alternating rounds and keeps every sample. It must not know how results are shown.

A round takes each proxy once, in an order that turns from round to round; comparisons are made within a round
(report.py), so that a noisy minute weighs on all alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from e2e.bench import payloads
from e2e.bench.proxies import SPECS, NotReadyError, Proxy, Spec
from e2e.bench.rig import Rig, Sample, build
from e2e.rounds import turns
from tests.engine import nixl
from tests.ports import free_ports

if TYPE_CHECKING:
    from e2e.bench.cases import Case

DIRECT = "direct"  # the stub engines themselves, the base of added latency


@dataclass(frozen=True)
class Pace:
    """How long and how often: seconds and rounds. Memory repeats to the megabyte and each of its samples needs a
    fresh process, so fewer rounds of it do."""

    rounds: int
    warm_s: float
    window_s: float
    memory_rounds: int = 3


@dataclass
class Result:
    """Samples of one case: `rounds[i][proxy]`. A proxy that failed has its reason in `failed` instead."""

    case: Case
    rounds: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return dataclasses.asdict(self)


def _handshake_payload() -> bytes:
    metadata = nixl.metadata(payloads.ENGINE_ID, nixl.new_agent_blob(), 1 << 20, payloads.BLOCK_TOKENS)
    return msgspec.msgpack.encode(
        nixl.HandshakePayload(nixl.compatibility_hash(payloads.MODEL), msgspec.msgpack.encode(metadata))
    )


class Collector:
    """Takes the spans of a proxy that traces, on a thread, and forgets them."""

    def __init__(self) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nobody asked."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="collector", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()


class Bench:
    """Rig and proxies, up for the time of a run. A context manager: it ends all it started."""

    def __init__(
        self, cache: Path, proxy_core: int, rig_core: int, binaries: dict[str, Path], priority: int = 0
    ) -> None:
        self.failed: dict[str, str] = {}  # proxies that did not come up, and why
        self._proxy_core = proxy_core
        self._priority = priority
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="pd-sidecar-bench-"))
        self._side_channel = nixl.SideChannel("127.0.0.1", free_ports(), {(0, 0): _handshake_payload()})
        self._side_channel.start()
        self._collector = Collector()
        self._canned = payloads.canned(self._side_channel.port)
        self.rig = Rig(build(cache), rig_core, self._folder, self._canned, priority)
        self._proxies: dict[str, Proxy] = {}
        self.direct_one_leg: Sample | None = None  # the decode stub alone, of the latest direct round
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self._proxies.values():
            proxy.close()
        self.rig.close()
        self._side_channel.stop()
        self._collector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, spec: Spec) -> Proxy:
        """A fresh process of a proxy, ready. NotReadyError if it does not come up or does not do its work."""
        self._starts += 1
        binary = self._binaries[spec.peer] if spec.peer else Path(sys.executable)
        engines = (self.rig.prefill_port, self.rig.decode_port)
        folder = self._folder / f"{spec.name}-{self._starts}"
        proxy = Proxy(
            spec, binary, self._proxy_core, engines, folder, self._priority, collector_port=self._collector.port
        )
        try:
            prompt = payloads.chat_body(1_000, stream=False)
            self._load_answers(prompt)
            proxy.wait_ready(prompt.body)
            self._load_request(proxy, prompt)
            check = self.rig.closed(
                proxy.place.port, connections=1, warm_s=0.1, window_s=5, pids=[proxy.pid], max_requests=50
            )
            problem = trouble(spec, check)
            if problem:
                raise NotReadyError(f"{problem}: {proxy.log_end()}")
        except BaseException:
            proxy.close()
            raise
        return proxy

    def start_all(self, names: list[str]) -> list[str]:
        """Start what can be started; the rest is in `failed`."""
        for name in names:
            try:
                self._proxies[name] = self.start(SPECS[name])
            except NotReadyError as error:
                self.failed[name] = str(error)
        return list(self._proxies)

    def proxy(self, name: str) -> Proxy:
        """A proxy of `start_all`, started again if the case before ended it."""
        if not self._proxies[name].alive:
            self._proxies[name] = self.start(SPECS[name])
        return self._proxies[name]

    def _load_answers(self, prompt: payloads.Prompt, cached_tokens: int | None = None) -> None:
        answer = payloads.prefill_answer(prompt.prompt_tokens, self._side_channel.port, cached_tokens)
        self.rig.load("prefill", answer)
        self.rig.load("decode", payloads.decode_answer(prompt.prompt_tokens))

    def _load_request(self, proxy: Proxy | None, prompt: payloads.Prompt, *, gzipped: bool = False) -> None:
        port = proxy.place.port if proxy else self.rig.decode_port
        headers = proxy.spec.headers(proxy.place) if proxy else {}
        if gzipped:
            prompt, headers = prompt.gzipped(), {**headers, "Content-Encoding": "gzip"}
        self.rig.load("request", payloads.http_request(port, prompt.body, headers))

    # ------------------------------------------------------------ one sample

    def closed(self, case: Case, proxy: Proxy | None, pace: Pace) -> Sample:
        """One closed-loop window; without a proxy the two engines called one after the other, on one connection."""
        prompt = payloads.chat_body(case.body_bytes, stream=False)
        self._load_answers(prompt)
        self._load_request(proxy, prompt, gzipped=case.gzip)
        if proxy:
            return self.rig.closed(
                proxy.place.port,
                connections=case.connections,
                warm_s=pace.warm_s,
                window_s=pace.window_s,
                pids=proxy.pids,
                pause_us=case.pause_us,
            )
        decode, prefill = (
            self.rig.closed(port, connections=1, warm_s=0.05, window_s=pace.window_s / 4, pids=[])
            for port in (self.rig.decode_port, self.rig.prefill_port)
        )
        self.direct_one_leg = decode
        return dataclasses.replace(
            decode,
            p50_us=decode.p50_us + prefill.p50_us,
            p90_us=decode.p90_us + prefill.p90_us,
            p99_us=decode.p99_us + prefill.p99_us,
            mean_us=decode.mean_us + prefill.mean_us,
            max_us=decode.max_us + prefill.max_us,
        )

    def stream(self, case: Case, proxy: Proxy | None, pace: Pace) -> Sample:
        """One window of open streams, or the engine's own without a proxy."""
        prompt = payloads.chat_body(case.body_bytes, stream=True, usage=case.usage)
        self._load_answers(prompt, cached_tokens=8 if case.usage else None)
        self._load_request(proxy, prompt)
        self.rig.load("stream", payloads.stream_head())
        self.rig.load("stream_end", payloads.stream_end())
        self.rig.load("events", payloads.stream_events(usage=case.usage))
        return self.rig.stream(
            proxy.place.port if proxy else self.rig.decode_port,
            streams=case.streams,
            rate_hz=case.rate_hz,
            step=case.step,
            warm_s=pace.warm_s,
            window_s=pace.window_s,
            pids=proxy.pids if proxy else [],
        )

    def memory(self, case: Case, name: str) -> dict[str, Any]:
        """A fresh process's memory before, after and at the peak of `case.requests` requests."""
        proxy = self.start(SPECS[name])
        try:
            before_mb = memory_mb(proxy.pids, "VmRSS")
            for pid in proxy.pids:
                # Resets the high-water mark (proc(5), clear_refs); root only on some systems.
                with contextlib.suppress(OSError):
                    Path(f"/proc/{pid}/clear_refs").write_text("5")
            prompt = payloads.chat_body(case.body_bytes, stream=False)
            self._load_answers(prompt)
            self._load_request(proxy, prompt)
            sample = self.rig.closed(
                proxy.place.port,
                connections=case.connections,
                warm_s=0,
                window_s=60,
                pids=proxy.pids,
                max_requests=case.requests,
            )
            after_mb, peak_mb = memory_mb(proxy.pids, "VmRSS"), memory_mb(proxy.pids, "VmHWM")
        finally:
            proxy.close()
        return {
            **dataclasses.asdict(sample),
            "rss_before_mb": before_mb,
            "rss_mb": after_mb,
            "peak_mb": peak_mb,
            "peak_bodies": (peak_mb - before_mb) * 1e6 / case.body_bytes,
        }


def memory_mb(pids: list[int], key: str) -> float:
    """Sum over a proxy's processes; pages that they share count once for each."""
    total_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def trouble(spec: Spec, sample: Sample) -> str | None:
    """Why a sample does not show what it should: errors, hangs, or a P/D router that made no P/D request."""
    if sample.hung:
        return f"{sample.hung} requests never ended"
    if sample.streams_missing:
        return f"{sample.streams_missing} streams never began"
    if sample.errors:
        return f"{sample.errors} errors (first status {sample.first_bad_status or 'none: connection lost'})"
    if sample.decodes and spec.legs == 2:
        if sample.prefills != sample.decodes:
            return f"{sample.decodes} decodes but {sample.prefills} prefills"
        if sample.handoffs != sample.handoffs_checked:
            without = sample.handoffs_checked - sample.handoffs
            return f"{without} of {sample.handoffs_checked} decodes without a handoff"
    if sample.decodes and spec.legs == 1 and sample.prefills:
        return f"{sample.prefills} prefills through a plain relay"
    return None


def _record(result: Result, name: str, sample: Sample, bench: Bench) -> dict[str, Any]:
    work = sample.chunks or sample.requests
    spec = SPECS.get(name)
    record = {
        **dataclasses.asdict(sample),
        "cpu_us": sample.proxy_cpu_s / work * 1e6 if work and spec else None,
        "per_second": work / sample.wall_s if sample.wall_s else None,
        "trouble": trouble(spec, sample) if spec else None,
    }
    if name == DIRECT and result.case.kind == "closed" and bench.direct_one_leg:
        record["one_leg_p50_us"] = bench.direct_one_leg.p50_us
    return record


def run_case(bench: Bench, case: Case, names: list[str], pace: Pace, say: Callable[[str], None]) -> Result:
    """All rounds of a case. A proxy that can't do it has its reason in `failed`; nothing is dropped silently."""
    result = Result(case)
    rounds = pace.memory_rounds if case.kind == "memory" else pace.rounds
    for number, order in enumerate(turns(names if case.kind == "memory" else [DIRECT, *names], rounds)):
        say(f"{case.name}, round {number + 1} of {rounds}")
        samples: dict[str, dict[str, Any]] = {}
        for name in order:
            try:
                if case.kind == "memory":
                    samples[name] = bench.memory(case, name)
                    continue
                proxy = None if name == DIRECT else bench.proxy(name)
                sample = (bench.closed if case.kind == "closed" else bench.stream)(case, proxy, pace)
                samples[name] = _record(result, name, sample, bench)
                if proxy and not proxy.alive:
                    raise NotReadyError(f"it ended during {case.name}: {proxy.log_end()}")
            except (NotReadyError, OSError) as error:
                result.failed[name] = str(error)
        result.rounds.append(samples)
    return result
