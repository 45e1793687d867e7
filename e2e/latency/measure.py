"""Engines, sidecar and router, up for the time of a run, and one sample of a scenario by one way.

It puts the load on, reads what engines and sidecar counted meanwhile, and keeps every token's time. It must not
know how results are shown, nor what is good enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import os
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from e2e.bench.proxies import SPECS, NotReadyError, Place, Proxy, Spec
from e2e.engines import HOST, PROMPT_TOKEN_SOURCES, Engine, Metrics, RigError
from e2e.install import engine_python
from e2e.latency import driver, public
from e2e.latency.driver import Client, LoadError, Record, Run, Turn
from e2e.latency.numbers import percentile
from e2e.latency.scenarios import MODES, STREAM, Mode, Scenario, prompt
from e2e.rig import Rig
from e2e.rounds import turns
from tests.ports import free_ports

ROUTER = "vllm-router"
MAX_BATCHED_TOKENS = 2048
"""One prompt of 2,000 tokens is one step of the engine: the whole pause that a prefill is."""
DTYPE = "bfloat16"
UCX_TLS = "self,sm,cma,tcp"
"""Between engines of one machine memory is copied straight across: about half the time of TCP, under one load."""
BLOCK_SIZE = 32
"""Tokens. The larger a block, the fewer pieces both cores copy, where no RDMA hardware does it: with 128 remote to
nothing arriving was 1.40 (1.29 to 1.42) in three rounds, in place of 1.54."""
PROBE_TOKENS = 600
"""Of the request that shows that a way works: enough for `auto` to go remote."""
PROBE_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Cores:
    """Which core has whom."""

    prefill: int
    decode: int
    sidecar: int
    driver: int

    @classmethod
    def chosen(cls, cores: list[int], sidecar: int | None = None, driver: int | None = None) -> Cores:
        """Engines as `Rig` has them; sidecar and load on cores of their own as far as there are any. On two cores
        both share the prefill engine's: the decode engine's pauses are what is looked at, and nothing else may
        cause any."""
        half = len(cores) // 2
        engines = (cores[0], cores[half])
        spare = [core for core in cores if core not in engines]
        return cls(
            *engines,
            sidecar if sidecar is not None else (spare or engines)[0],
            driver if driver is not None else (spare[-1] if spare else engines[0]),
        )

    def text(self) -> str:
        """`core 0: prefill engine, load; core 1: ...`."""
        names = {
            "prefill": "prefill engine",
            "decode": "decode engine",
            "sidecar": "sidecar or router",
            "driver": "load",
        }
        on: dict[int, list[str]] = {}
        for key, core in dataclasses.asdict(self).items():
            on.setdefault(core, []).append(names[key])
        return "; ".join(f"core {core}: {', '.join(who)}" for core, who in sorted(on.items()))


@dataclass
class Sample:
    """One run of a scenario by one way. Times are milliseconds from the start of the window."""

    mode: str
    window_s: float
    requests: list[dict[str, Any]]
    decode_tokens: dict[str, int]
    """Prompt tokens of the decode engine by source."""
    prefill_tokens: int
    """Prompt tokens that the prefill engine computed."""
    parts_ms: dict[str, float]
    """Means over the remote requests: see `_parts`."""
    late_ms: float = 0.0
    """How late the load itself was woken, 99th percentile; 0 of a load that is not ours."""
    trouble: str = ""
    """Why it does not show what it should."""


@dataclass
class Result:
    """Samples of one scenario: `rounds[i][mode]`. A way that failed has its reason in `failed` instead."""

    scenario: str
    rounds: list[dict[str, Sample]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Stage:
    """A pair of engines, the sidecar before the decode engine, the router beside it. A context manager: it ends all
    that it started."""

    def __init__(
        self,
        model: str,
        cores: Cores,
        router: Path | None,
        ucx_tls: str,
        block_size: int,
        *,
        sidecar_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        kv_cache_bytes: int | None = None,
    ) -> None:
        self._cores = cores
        self._router = router
        self._sidecar_flags = sidecar_flags
        flags = ["--dtype", DTYPE, "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)]
        self.rig = Rig(
            model,
            extra_flags=flags,
            extra_env={"UCX_TLS": ucx_tls},
            block_size=block_size,
            decode_flags=decode_flags,
            kv_cache_bytes=kv_cache_bytes,
        )
        self._proxies: dict[str, Proxy] = {}
        self.failed: dict[str, str] = {}
        """Ways that did not come up, and why."""
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.rig)
            spec = _sidecar(self.prefill, self.decode, self._sidecar_flags)
            self._start("sidecar", spec, Path(sys.executable), stack)
            if self._router:
                try:
                    self._start(ROUTER, SPECS[ROUTER], self._router, stack)
                except NotReadyError as error:
                    self.failed[ROUTER] = str(error)
            stack.enter_context(_pinned(self._cores.driver))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *reason: object) -> None:
        self._open.__exit__(*reason)  # type: ignore[arg-type]

    @property
    def prefill(self) -> Engine:
        return self.rig.prefill[0]

    @property
    def decode(self) -> Engine:
        return self.rig.decode[0]

    def _start(self, name: str, spec: Spec, binary: Path, stack: contextlib.ExitStack) -> None:
        ports = (self.prefill.port, self.decode.port)
        proxy = Proxy(spec, binary, self._cores.sidecar, ports, self.rig.folder / name)
        stack.callback(proxy.close)
        body = {"model": self.rig.model_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        proxy.wait_ready(msgspec.json.encode(body))
        self._proxies[name] = proxy

    def address(self, mode: Mode) -> str:
        """Where the requests of this way go."""
        if mode.disagg:
            return f"http://{HOST}:{self._proxies['sidecar'].place.port}"
        if mode.name == ROUTER:
            return f"http://{HOST}:{self._proxies[ROUTER].place.port}"
        return self.decode.url

    # ------------------------------------------------------------ one sample

    async def sample(self, scenario: Scenario, mode: Mode, seed: int) -> Sample:
        """Everything once. LoadError if the way does not work at all, TimeoutError if the engines do not come to
        rest."""
        url = self.address(mode)
        if mode.disagg == "auto":
            # What it decides depends on what goes on; the way must be open, so that it can decide.
            await self._until_it_works(url, dataclasses.replace(mode, disagg="on"))
        await self._until_it_works(url, mode)
        await self._until_idle()
        before: list[Counted] = []
        salt = uuid.uuid4().hex

        async def begin() -> None:
            before.append(await asyncio.to_thread(self._count))

        async def kill() -> None:
            await asyncio.to_thread(self.prefill.kill)

        try:
            if scenario.public:
                await begin()
                run = await public.run(url, self.rig.model, engine_python(), self._cores.driver, seed)
            else:
                clients = [client for client in scenario.clients(seed) if client.background or mode.arrivals]
                if mode.elsewhere:
                    clients = [client if client.background else _to(self.prefill.url, client) for client in clients]
                if mode.held:
                    await driver.run(url, self.rig.model_name, _one_token_of_each(clients), salt=salt)
                    await self._until_idle()
                run = await driver.run(
                    url,
                    self.rig.model_name,
                    clients,
                    salt=salt,
                    routing=mode.routing(self.prefill.address, self.decode.url) if mode.routing else None,
                    min_window_s=scenario.min_window_s,
                    begin=begin,
                    events=[(scenario.kill_at_s, kill)] if mode.kill_prefill else [],
                )
        finally:
            if mode.kill_prefill:
                await asyncio.to_thread(self._mend)
        await self._until_idle()
        after = await asyncio.to_thread(self._count)
        decisions = await asyncio.to_thread(self.decisions) if mode.disagg else {}
        return _sample(mode, run, before[0], after, decisions)

    def _mend(self) -> None:
        if not self.prefill.alive():
            self.prefill.start()
            self.prefill.wait_healthy()

    async def _until_it_works(self, url: str, mode: Mode) -> None:
        """The sidecar's switch is turned, and one request answered as this way decides: engines that were restarted
        are connected again."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        if mode.disagg:
            _http("PUT", self._proxies["sidecar"].place.admin_port, "/disagg", mode.disagg.encode())
        wanted = {"off": "local", "on": "remote"}.get(mode.disagg, "")
        client = Client("probe", (Turn(prompt(PROBE_TOKENS, 0), 2),))
        while True:
            record = (await driver.run(url, self.rig.model_name, [client], salt=uuid.uuid4().hex)).records[0]
            if not record.error and record.decision.startswith(wanted):
                return
            if time.monotonic() > deadline:
                raise LoadError(f"{mode.name} at {url}: {record.error or f'decided {record.decision!r}'}")
            await asyncio.sleep(0.5)

    async def _until_idle(self) -> None:
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while True:
            counted = await asyncio.to_thread(self._count)
            if not any(metrics.total(name) for metrics in (counted.prefill, counted.decode) for name in names):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"engines did not come to rest within {IDLE_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.3)

    def _count(self) -> Counted:
        return Counted(self.prefill.metrics(), self.decode.metrics())

    def decisions(self) -> dict[str, dict[str, Any]]:
        """The sidecar's latest, by request id."""
        decisions = msgspec.json.decode(_http("GET", self._proxies["sidecar"].place.admin_port, "/decisions"))
        return {decision["request_id"]: decision for decision in decisions}


def _one_token_of_each(clients: Sequence[Client]) -> list[Client]:
    """What arrives, at once and with as little of an answer as there can be."""
    arrivals = [client for client in clients if not client.background]
    return [
        dataclasses.replace(
            client, at_s=0.0, turns=tuple(dataclasses.replace(turn, answer_tokens=1) for turn in client.turns)
        )
        for client in arrivals
    ]


def _to(url: str, client: Client) -> Client:
    """Its prompts alone, somewhere else."""
    turns = tuple(dataclasses.replace(turn, answer_tokens=1) for turn in client.turns)
    return dataclasses.replace(client, base_url=url, turns=turns)


@dataclass(frozen=True)
class Counted:
    """What both engines had counted at one moment."""

    prefill: Metrics
    decode: Metrics


def _sidecar(prefill: Engine, decode: Engine, more: Sequence[str]) -> Spec:
    """The sidecar of this pair, with its defaults but for these flags."""

    def command(place: Place, python: Path) -> list[str]:
        flags = {
            "--host": HOST,
            "--port": place.port,
            "--metrics-host": HOST,
            "--metrics-port": place.admin_port,
            "--model-server-port": decode.port,
            "--local-side-channel": f"{HOST}:{decode.side_channel_port}",
            "--prefill": prefill.address,
            "--prefill-side-channel-port": prefill.side_channel_port,
            "--nixl-relay-port": free_ports(),
        }
        words = [str(word) for pair in flags.items() for word in pair]
        return [str(python), "-m", "sidecar", "serve", *words, *more]

    return Spec("sidecar", 2, command)


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    """This process, which is the load, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _http(method: str, port: int, path: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", data=body, method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: bytes = response.read()
    return answer


# ---------------------------------------------------------------- from counters to a sample


def _sample(mode: Mode, run: Run, before: Counted, after: Counted, decisions: dict[str, dict[str, Any]]) -> Sample:
    name = "vllm:prompt_tokens_by_source_total"
    requests = [_request(record, run.window_s, decisions.get(record.request_id, {})) for record in run.records]
    sample = Sample(
        mode=mode.name,
        window_s=round(run.window_s, 3),
        requests=requests,
        decode_tokens={
            source: int(after.decode.total(name, source=source) - before.decode.total(name, source=source))
            for source in PROMPT_TOKEN_SOURCES
        },
        # The counters of an engine that was killed began anew.
        prefill_tokens=0
        if mode.kill_prefill
        else int(
            after.prefill.total(name, source="local_compute") - before.prefill.total(name, source="local_compute")
        ),
        parts_ms=_parts(requests, before, after) if not (mode.kill_prefill or mode.elsewhere) else {},
        late_ms=round(percentile(run.lateness_s, 99) * 1000, 2) if run.lateness_s else 0.0,
    )
    sample.trouble = trouble(mode, sample)
    return sample


def _request(record: Record, window_s: float, decision: dict[str, Any]) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 2)

    told = {
        "kind": record.kind,
        "began_ms": ms(record.began_s),
        "status": record.status,
        "error": record.error,
        "decision": record.decision or decision.get("decision", ""),
        "prompt_tokens": record.prompt_tokens,
        "ttft_ms": ms(record.ttft_s),
        "e2e_ms": ms(record.e2e_s),
        "token_ms": [round(at * 1000, 1) for at in record.token_s if -1 < at <= window_s],
    }
    for name in ("reason", "inputs", "predicted"):
        if decision.get(name):
            told[name] = decision[name]
    for name in ("ttft", "prefill", "decode_first_byte", "overhead"):
        if (seconds := decision.get(f"{name}_seconds")) is not None:
            told[f"sidecar_{name}_ms"] = round(seconds * 1000, 3)
    return told


def _parts(requests: list[dict[str, Any]], before: Counted, after: Counted) -> dict[str, float]:
    """What the TTFT of the remote requests that began in the window is made of; means in ms.

    `queue` and `prefill` are the prefill engine's own (request_queue_time, request_prefill_time), `prefill_leg` is
    what the sidecar waited for its answer, `transfer` is NIXL's (nixl_xfer_time), `decode_leg` what the sidecar
    waited for the decode engine's first byte (the transfer is in it).
    """
    found = {}
    for part, engine, metric in (
        ("queue", "prefill", "vllm:request_queue_time_seconds"),
        ("prefill", "prefill", "vllm:request_prefill_time_seconds"),
        ("transfer", "decode", "vllm:nixl_xfer_time_seconds"),
    ):
        old, new = getattr(before, engine), getattr(after, engine)
        count = new.total(f"{metric}_count") - old.total(f"{metric}_count")
        if count:
            found[part] = (new.total(f"{metric}_sum") - old.total(f"{metric}_sum")) / count * 1000
    # A router says nothing of its decisions: it knows one way only.
    remote = [
        request
        for request in requests
        if request["began_ms"] >= 0 and (not request["decision"] or request["decision"].startswith("remote"))
    ]
    for part, name in (
        ("ttft", "ttft_ms"),
        ("prefill_leg", "sidecar_prefill_ms"),
        ("decode_leg", "sidecar_decode_first_byte_ms"),
        ("sidecar", "sidecar_overhead_ms"),
    ):
        values = [request[name] for request in remote if request.get(name) is not None]
        if values:
            found[part] = sum(values) / len(values)
    return {part: round(value, 2) for part, value in found.items()}


def trouble(mode: Mode, sample: Sample) -> str:
    """Why a sample does not show what it should; empty if it does."""
    failed = [request for request in sample.requests if request["error"]]
    if failed:
        return f"{len(failed)} of {len(sample.requests)} requests failed: {failed[0]['error']}"
    pulled = sample.decode_tokens["external_kv_transfer"]
    decisions = [
        request["decision"].partition(";")[0]
        for request in sample.requests
        if not mode.elsewhere or request["kind"] == STREAM
    ]
    if mode.disagg == "off" and set(decisions) != {"local"}:
        return f"decided {_counts(decisions)} with `--disagg off`"
    is_always = mode.disagg == "on" and mode.routing is None
    if is_always and not mode.kill_prefill and set(decisions) != {"remote"}:
        return f"decided {_counts(decisions)} with `--disagg on`"
    if mode.kill_prefill and "recompute" not in decisions and "local" not in decisions:
        return "the prefill engine was killed and nobody noticed"
    if mode.disagg in ("", "off") and mode.name != ROUTER and pulled:
        return f"{pulled} tokens were pulled without disaggregation"
    if mode.held and sample.decode_tokens["local_compute"] > sample.decode_tokens["local_cache_hit"]:
        return "the decode engine did not hold what arrived"
    # A prefill engine may be killed before the first prompt has been pulled.
    pulls = mode.arrivals and not mode.kill_prefill and not mode.elsewhere
    if pulls and (mode.disagg == "on" or mode.name == ROUTER) and not pulled:
        return "no token was pulled: everything was computed twice"
    return ""


def _counts(values: list[str]) -> str:
    return ", ".join(f"{values.count(value)} {value or 'nothing'}" for value in dict.fromkeys(values))


# ---------------------------------------------------------------- rounds


async def run_scenario(
    stage: Stage, scenario: Scenario, names: list[str], rounds: int, say: Callable[[str], None]
) -> Result:
    """All rounds of a scenario. A way that did not come up has its reason in `failed`."""
    result = Result(scenario.name, failed={name: stage.failed[name] for name in names if name in stage.failed})
    able = [name for name in names if name not in stage.failed]
    orders = [[MODES[name] for name in order] for order in turns(able, rounds)]
    await run_rounds(stage, scenario, orders, [number * 1000 for number in range(rounds)], result, say)
    return result


async def run_rounds(
    stage: Stage,
    scenario: Scenario,
    orders: Sequence[Sequence[Mode]],
    seeds: Sequence[int],
    result: Result,
    say: Callable[[str], None],
) -> None:
    """Adds rounds: the ways of each in order, all with the round's seed. A way that can't do it has its reason in
    `failed`; nothing is dropped silently."""
    for number, (order, seed) in enumerate(zip(orders, seeds, strict=True)):
        samples: dict[str, Sample] = {}
        for mode in order:
            say(f"{scenario.name}, round {number + 1} of {len(orders)}, {mode.name}")
            try:
                samples[mode.name] = await stage.sample(scenario, mode, seed)
            except (LoadError, RigError, OSError, http.client.HTTPException) as error:
                result.failed[mode.name] = str(error) or repr(error)
                say(f"  {mode.name}: {result.failed[mode.name]}")
            else:
                if samples[mode.name].trouble:
                    say(f"  {mode.name}: {samples[mode.name].trouble}")
        result.rounds.append(samples)
