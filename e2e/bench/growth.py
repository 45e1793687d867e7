"""How cost grows with body size, streams, endpoints and label sets.

    python -m e2e.bench.growth            # measures and prints
    python -m e2e.bench.growth --write    # and writes docs/bench/growth.md and growth.json

It must not know what the numbers mean (slopes.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import http.client
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from e2e import machine
from e2e.bench import payloads, slopes
from e2e.bench.cases import CASES, Case
from e2e.bench.install import cache_folder, install, versions
from e2e.bench.measure import Bench, Pace, memory_mb, trouble
from e2e.bench.proxies import SPECS, NotReadyError, Place, Proxy, Spec
from e2e.bench.rig import RigError
from e2e.ending import end_what_was_started
from e2e.rounds import turns
from sidecar.admin.exposition import pieces
from sidecar.admin.observer import Observer
from sidecar.exchange.budget import Budget
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoints
from tests.engine import nixl
from tests.ports import free_ports

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "bench" / "growth.md"
BODIES = ("body-1k", "body-16k", "body-100k", "body-1m", "body-8m")
RELAYS = ("sidecar", "sidecar-local", "nginx")
BELOW = (("stream-64x50", 64, 50), ("stream-512x20", 512, 20))
MOST_STREAMS = 2000
RATES_HZ = (10, 14, 18, 22, 26, 30, 36, 42)
"""Of the 2,000 streams; what one pod asks for is the first."""
ENDPOINTS = (1, 16, 128, 512)
SERIES = (0, 250, 1000, 4000, 8000)
SCRAPES = 10
IDLE_S = 6.0
"""Longer than the side channels' probes are apart (transport/prober.py)."""
SETTLE_S = 30.0
OPENMETRICS = "application/openmetrics-text;version=1.0.0"

Rounds = dict[int, list[dict[str, Any]]]


def _say(what: str) -> None:
    print(f"growth: {what}", file=sys.stderr, flush=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads (proc(5), schedstat: nanoseconds, where `stat` counts ticks of 10 ms)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


# -- bodies -----------------------------------------------------------------------------------------------------


def measure_bodies(bench: Bench, names: list[str], pace: Pace) -> dict[str, Rounds]:
    """CPU per request by proxy and size."""
    found: dict[str, Rounds] = {name: defaultdict(list) for name in names}
    for number, order in enumerate(turns(names, pace.rounds)):
        for case in (CASES[name] for name in BODIES):
            _say(f"round {number + 1} of {pace.rounds}: {case.title}")
            for name in order:
                proxy = bench.proxy(name)
                sample = bench.closed(case, proxy, pace)
                wrong = trouble(proxy.spec, sample)
                cost = sample.proxy_cpu_s / sample.requests * 1e6 if sample.requests and not wrong else None
                found[name][case.body_bytes].append({"cpu_us": cost, "trouble": wrong or ""})
    return found


# -- streams ----------------------------------------------------------------------------------------------------


@contextmanager
def _peaks(pid: int) -> Iterator[dict[str, float]]:
    """The most memory and descriptors of a process meanwhile."""
    seen = {"rss_mb": 0.0, "descriptors": 0.0}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            seen["rss_mb"] = max(seen["rss_mb"], memory_mb([pid], "VmRSS"))
            seen["descriptors"] = max(seen["descriptors"], descriptors(pid))

    thread = threading.Thread(target=look, name="peaks", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _step(bench: Bench, proxy: Proxy, case: Case, direct_p50_us: float, pace: Pace) -> slopes.Step:
    sample = bench.stream(case, proxy, pace)
    wrong = trouble(proxy.spec, sample) or ""
    if not wrong and sample.rig_cpu_s > slopes.FULL * sample.wall_s:
        wrong = "the rig was the limit"
    return slopes.Step(
        case.streams,
        case.rate_hz,
        sample.chunks / sample.wall_s,
        sample.proxy_cpu_s / max(sample.chunks, 1) * 1e6,
        sample.proxy_cpu_s / sample.wall_s,
        sample.p99_us - direct_p50_us,
        max(sample.proxy_waited_s, sample.rig_waited_s) / sample.wall_s,
        wrong,
    )


def measure_streams(bench: Bench, pace: Pace) -> tuple[list[list[slopes.Step]], list[dict[str, Any]]]:
    """Steps of each round, and what the pod with 2,000 streams of 10 a second needed."""
    rounds, pods = [], []
    for number in range(pace.rounds):
        steps = []
        for name, streams, rate_hz in BELOW:
            _say(f"round {number + 1} of {pace.rounds}: {streams} streams of {rate_hz}/s")
            base = bench.stream(CASES[name], None, pace)
            steps.append(_step(bench, bench.proxy("sidecar"), CASES[name], base.p50_us, pace))
        first = CASES["stream-2000x10"]
        base = bench.stream(first, None, pace)
        for rate_hz in RATES_HZ:
            _say(f"round {number + 1} of {pace.rounds}: {MOST_STREAMS} streams of {rate_hz}/s")
            proxy = bench.proxy("sidecar")
            case = dataclasses.replace(first, rate_hz=rate_hz)
            with _peaks(proxy.pid) as peaks:
                step = _step(bench, proxy, case, base.p50_us, pace)
            if step.why_not:  # once more: a moment's noise is not the end
                step = _step(bench, proxy, case, base.p50_us, pace)
            steps.append(step)
            if rate_hz == RATES_HZ[0] and not step.trouble:
                pods.append({**peaks, "core_share": step.core_share})
            if step.why_not:
                break
        rounds.append(steps)
    return rounds, pods


PAUSES_WINDOW_S = 70.0
"""Longer than what is done once a minute is apart (sidecar/process.py)."""


def _pauses(proxy: Proxy) -> dict[str, tuple[float, float]]:
    """How often and for how many seconds in all the process has tidied its memory, by cause."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(scrape(proxy.place.admin_port, "text/plain").decode()):
        if family.name == "pd_sidecar_pause_seconds":
            for sample in family.samples:
                found[sample.labels["cause"]][sample.name.rpartition("_")[2]] = sample.value
    return {cause: (values["count"], values["sum"]) for cause, values in found.items()}


def measure_pauses(bench: Bench) -> list[slopes.Pauses]:
    """While 2,000 streams begin, and for more than a minute of them."""
    _say(f"pauses with {MOST_STREAMS} streams")
    proxy = bench.proxy("sidecar")
    before = _pauses(proxy)
    bench.stream(CASES["stream-2000x10"], proxy, Pace(rounds=1, warm_s=0.2, window_s=PAUSES_WINDOW_S))
    found = []
    for cause, (count, seconds) in sorted(_pauses(proxy).items()):
        earlier_count, earlier_s = before.get(cause, (0.0, 0.0))
        found.append(slopes.Pauses(cause, int(count - earlier_count), seconds - earlier_s))
    return found


# -- endpoints --------------------------------------------------------------------------------------------------


def host(number: int) -> str:
    """The address of one prefill engine, on loopback."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


class Listeners:
    """The side channels of many engines, on one socket and one thread: all of them tell of the same engine."""

    def __init__(self, hosts: list[str], port: int, payload: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for one in hosts:
            self._socket.bind(f"tcp://{one}:{port}")
        self._payload = payload
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="side channels", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(50):
                identity, empty, _question = self._socket.recv_multipart()
                stamp = msgspec.msgpack.encode(time.perf_counter())
                self._socket.send_multipart((identity, empty, self._payload, stamp))

    def close(self) -> None:
        """Ends the thread and frees the ports."""
        self._over.set()
        self._thread.join()
        self._socket.close()
        self._context.term()


def _payload(engine_id: str) -> bytes:
    metadata = nixl.metadata(engine_id, nixl.new_agent_blob(), 1 << 20, payloads.BLOCK_TOKENS)
    hashed = nixl.compatibility_hash(payloads.MODEL)
    return msgspec.msgpack.encode(nixl.HandshakePayload(hashed, msgspec.msgpack.encode(metadata)))


def _knowing(count: int, side_port: int, own_port: int, relay_port: int) -> Spec:
    """A sidecar to which a file tells of so many endpoints."""

    def command(place: Place, _: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "sidecar", "serve", "--warm-up", "off"),
            *("--port", str(place.port), "--metrics-port", str(place.admin_port)),
            *("--model-server-port", str(place.decode_port), "--local-side-channel", f"127.0.0.1:{own_port}"),
            *("--prefill-side-channel-port", str(side_port), "--nixl-relay-port", str(relay_port)),
            *("--discovery", f"file:{place.folder / 'endpoints'}"),
        ]

    def files(place: Place) -> dict[str, str]:
        return {"endpoints": "".join(f"{host(number)}:{place.prefill_port}\n" for number in range(count))}

    return Spec(f"sidecar-{count}", 1, command, files=files)


def scrape(port: int, accept: str = OPENMETRICS) -> bytes:
    """/metrics of an admin port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        return connection.getresponse().read()
    finally:
        connection.close()


def _settled(proxy: Proxy, count: int) -> None:
    """Until every side channel has a connection and a relay. NotReadyError if that never comes."""
    deadline = time.monotonic() + SETTLE_S
    while descriptors(proxy.pid) < 2 * count or scrape(proxy.place.admin_port).count(b"_breaker_state{") < count:
        if time.monotonic() > deadline:
            raise NotReadyError(f"{count} side channels did not come up: {proxy.log_end()}")
        time.sleep(0.5)


def measure_endpoints(bench: Bench, where: tuple[int, int], folder: Path, rounds: int) -> Rounds:
    """What sidecars cost that know so many endpoints and have nothing to do; all at the same time, so that a noisy
    moment weighs on all alike. `where`: their core and niceness."""
    core, niceness = where
    found: Rounds = defaultdict(list)
    with ExitStack() as stack:
        side_port, own_port = free_ports(), free_ports()
        everyone = Listeners([host(number) for number in range(max(ENDPOINTS))], side_port, _payload("prefill"))
        stack.callback(everyone.close)
        own = nixl.SideChannel("127.0.0.1", own_port, {(0, 0): _payload("decode")})
        own.start()
        stack.callback(own.stop)
        proxies: dict[int, Proxy] = {}
        for count in ENDPOINTS:
            _say(f"a sidecar that knows {count} endpoints")
            spec = _knowing(count, side_port, own_port, free_ports())
            engines = (bench.rig.prefill_port, bench.rig.decode_port)
            proxies[count] = Proxy(spec, Path(sys.executable), core, engines, folder / spec.name, niceness)
            stack.callback(proxies[count].close)
            proxies[count].wait_ready(payloads.chat_body(1_000, stream=False).body)
            _settled(proxies[count], count)
        time.sleep(2)  # what comes after a start
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}: idle sidecars")
            before, began = {count: cpu_s(proxy.pid) for count, proxy in proxies.items()}, time.monotonic()
            time.sleep(IDLE_S)
            elapsed_s = time.monotonic() - began
            for count, proxy in proxies.items():
                share = (cpu_s(proxy.pid) - before[count]) / elapsed_s
                found[count].append({"cpu_share": share, **_standing(proxy, share)})
    return found


def _standing(proxy: Proxy, idle_share: float) -> dict[str, float]:
    """Memory, descriptors, and a scrape's CPU beyond what the process takes anyway."""
    began, before = time.monotonic(), cpu_s(proxy.pid)
    written = [scrape(proxy.place.admin_port) for _ in range(SCRAPES)]
    idle_s = (time.monotonic() - began) * idle_share
    return {
        "scrape_cpu_ms": (cpu_s(proxy.pid) - before - idle_s) / SCRAPES * 1000,
        "scrape_kb": len(written[-1]) / 1000,
        "series": sum(not line.startswith(b"#") for line in written[-1].splitlines()),
        "rss_mb": memory_mb([proxy.pid], "VmRSS"),
        "descriptors": descriptors(proxy.pid),
    }


def _known(count: int) -> Endpoints:
    return Endpoints([Address(host(number), 8000) for number in range(count)], AllowList([]), time.monotonic)


def _timed_us(step: Callable[[int], object], times: int = 300) -> float:
    """The least of some repetitions, of this thread's CPU."""
    least = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for number in range(times):
            step(number)
        least = min(least, (time.thread_time() - began) / times)
    return least * 1e6


def measure_choices(rounds: int) -> Rounds:
    """What the choice takes on a request's way, by the number of endpoints."""
    found: Rounds = defaultdict(list)
    for order in turns([str(count) for count in ENDPOINTS], rounds):
        for count in map(int, order):
            endpoints = _known(count)
            members = tuple(endpoints.members)

            def choose(conversation: int, endpoints: Endpoints = endpoints) -> object:
                candidates = tuple(endpoints.members)
                return endpoints.choose(
                    candidates, [], ordered=False, may_repeat=False, conversation=conversation, tokens=1000
                )

            plain = _timed_us(lambda _, choose=choose: choose(0))  # type: ignore[misc]
            talk = _timed_us(lambda number, choose=choose: choose(number * 2_654_435_761 % 2**32 or 1))  # type: ignore[misc]
            for one in members:
                one.tokens_in_flight = 1000
            busy = _timed_us(lambda _, known=endpoints, all_=members: known.least_tokens_in_flight(all_))  # type: ignore[misc]
            found[count].append({"plain_us": plain, "conversation_us": talk, "busy_us": busy})
    return found


# -- label sets -------------------------------------------------------------------------------------------------


def measure_series(rounds: int) -> Rounds:
    """What writing out many label sets takes."""
    encode, _ = choose_encoder(OPENMETRICS)
    found: Rounds = defaultdict(list)
    for order in turns([str(count) for count in SERIES], rounds):
        for count in map(int, order):
            observer = Observer(_known(1), Budget(1, 0))
            for number in range(count):
                observer.requests.add(
                    ("completions", "recompute", f"prefill_reason_{number // 16}", str(number % 16))
                )
            times_s, size, series = [], 0, 0
            for _ in range(3):
                taken_s, began = [], time.thread_time()
                size = series = 0
                for piece in pieces(observer.collection, encode):
                    now = time.thread_time()
                    taken_s.append(now - began)
                    began = now
                    size += len(piece)
                    series += sum(not line.startswith(b"#") for line in piece.splitlines())
                    began = time.thread_time()
                times_s.append(taken_s)
            best = min(times_s, key=sum)
            found[series].append({"cpu_ms": sum(best) * 1000, "turn_ms": max(best) * 1000, "kb": size / 1000})
    return found


# -- all of it --------------------------------------------------------------------------------------------------


def run(rounds: int, niceness: int) -> tuple[str, dict[str, Any]]:
    """Measure everything: Markdown and samples."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, rig_core = cores[-1], cores[0]
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    load_start = os.getloadavg()[0]
    peers = install(["nginx"])
    described = machine.describe(versions(peers), sys.executable)
    names = [name for name in RELAYS if SPECS[name].peer not in peers.absent]
    pace = Pace(rounds=rounds, warm_s=0.2, window_s=1.0)
    with (
        tempfile.TemporaryDirectory(prefix="pd-sidecar-growth-") as folder,
        Bench(cache_folder(), proxy_core, rig_core, peers.binaries, niceness) as bench,
    ):
        names = bench.start_all(names)
        if "sidecar" not in names:
            raise NotReadyError(bench.failed["sidecar"])
        bodies = measure_bodies(bench, names, pace)
        steps, pods = measure_streams(bench, dataclasses.replace(pace, window_s=1.5))
        pauses = measure_pauses(bench)
        known = measure_endpoints(bench, (proxy_core, niceness), Path(folder), rounds)
        absent = peers.absent | bench.failed
    choices, scrapes = measure_choices(rounds), measure_series(rounds)
    for name, reason in absent.items():
        _say(f"{name} is not measured: {reason}")
    settings = {
        "started": started,
        "rounds": rounds,
        "niceness": niceness,
        "load_start": load_start,
        "load_end": os.getloadavg()[0],
        "proxy_core": proxy_core,
        "rig_core": rig_core,
    }
    told = {"machine": machine.sentence(described), "versions": machine.versions(described)}
    parts = [
        slopes.body_lines(bodies),
        slopes.stream_lines(steps, pods),
        slopes.pause_lines(pauses, PAUSES_WINDOW_S),
        slopes.endpoint_lines(known, choices),
        slopes.series_lines(scrapes),
    ]
    samples = {
        "machine": described,
        "settings": settings,
        "absent": absent,
        "bodies": bodies,
        "streams": [[dataclasses.asdict(step) for step in one] for one in steps],
        "pod": pods,
        "pauses": [dataclasses.asdict(one) for one in pauses],
        "endpoints": known,
        "choices": choices,
        "series": scrapes,
        "most_series": slopes.most_series(),
    }
    return slopes.markdown({**described, **settings, **told}, parts), samples


def main() -> int:
    """0 unless it could not run or the sidecar did not come up."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/bench/{DOCUMENT.name} and its samples")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (3)")
    parser.add_argument("--nice", type=int, default=0, help="niceness of proxies and rig; below 0 needs root")
    flags = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))  # 2,000 streams are 6,000 sockets
    try:
        text, samples = run(flags.rounds, flags.nice)
    except (NotReadyError, RigError) as error:
        _say(str(error))
        return 1
    print(text)
    if flags.write:
        DOCUMENT.write_text(text, encoding="utf-8")
        written = json.dumps(samples, indent=1, ensure_ascii=False) + "\n"
        DOCUMENT.with_suffix(".json").write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
