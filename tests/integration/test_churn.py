"""Endpoint churn: twenty prefill pods join and twenty leave in every second, under load. No request fails, none
goes to a pod after its removal was seen, and nothing grows.

CHURN_SECONDS makes it longer (the default is 10).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from sidecar.background import Background
from sidecar.prefill.address import Address, AllowList
from sidecar.prefill.endpoints import Endpoint, Endpoints
from sidecar.prefill.gate import Gate
from tests.engine import ThreadedEngine
from tests.engine.tokens import encode
from tests.integration.apis import COMPLETIONS
from tests.integration.sidecar import Sidecar, completion, eventually
from tests.integration.storm import OUTPUT_TOKENS, text_of
from tests.integration.transport.peers import until
from tests.kube.api import ThreadedApi
from tests.kube.objects import pod
from tests.ports import free_ports
from transport.side_channels import SideChannels

SECONDS = float(os.environ.get("CHURN_SECONDS", "10"))
PODS = 40
"""Half of them are members at any time."""
SWAPS_PER_SECOND = 20
CLIENTS = 8
GATEWAY_LAG_S = 0.3


@dataclass
class Pod:
    """One pod, and when it was a member (`time.perf_counter`)."""

    name: str
    engine: ThreadedEngine
    joined_at: float = 0.0
    left_at: float = 0.0
    seen_leaving: list[float] = field(default_factory=list)
    """When /endpoints first showed that it no longer gets requests, one for each time that it left."""
    joins: list[float] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end, at its client, of each request that it prefilled."""

    @property
    def is_member(self) -> bool:
        return self.joined_at > self.left_at

    def late(self) -> list[float]:
        """Requests that it got although its removal had been seen before they were sent, and although it was not
        back before they ended: how late each was."""
        found = []
        for seen in self.seen_leaving:
            back = min((at for at in self.joins if at > seen), default=float("inf"))
            found += [began - seen for began, ended in self.asked if seen < began and ended < back]
        return found


class Churn:
    """The cluster: swaps pods, and looks at what the sidecar knows."""

    def __init__(self, api: ThreadedApi, pods: list[Pod], sidecar: Sidecar) -> None:
        self.api, self.pods, self.sidecar = api, pods, sidecar
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self.over = False
        self._dice = random.Random(20)
        self._lock = threading.Lock()

    def join(self, one: Pod) -> None:
        one.joined_at = time.perf_counter()
        one.joins.append(one.joined_at)
        self.api.do(lambda: self.api.apply("pods", pod(one.name, one.engine.host)))

    def leave(self, one: Pod) -> None:
        """Half of them terminate, the others are gone from one moment to the next."""
        one.left_at = time.perf_counter()
        if self._dice.random() < 0.5:
            self.api.do(lambda: self.api.apply("pods", pod(one.name, one.engine.host, terminating=True)))
        else:
            self.api.do(lambda: self.api.delete("pods", one.name))

    def swap(self, seconds: float) -> int:
        """For so long; returns the number of swaps."""
        began, swaps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            members = [one for one in self.pods if one.is_member]
            others = [one for one in self.pods if not one.is_member]
            self.leave(min(members, key=lambda one: one.joined_at))
            self.join(min(others, key=lambda one: one.left_at))
            swaps += 1
            time.sleep(max(0.0, began + swaps / SWAPS_PER_SECOND - time.perf_counter()))
        return swaps

    def look(self) -> None:
        """Asks what is known, again and again."""
        while not self.over:
            asked = time.perf_counter()
            shown = json.loads(self.sidecar.admin("GET", "/endpoints")[1])["endpoints"]
            now = time.perf_counter()
            ready = {one["address"] for one in shown if one.get("standing") == "ready"}
            for one in self.pods:
                if one.engine.address not in ready and one.left_at > one.joined_at:
                    last = one.seen_leaving[-1] if one.seen_leaving else 0.0
                    if last < one.left_at < asked:
                        one.seen_leaving.append(now)
            time.sleep(0.02)

    def gateway(self, dice: random.Random) -> str:
        """A pod that was a member a moment ago, as a gateway knows it; or none."""
        if dice.random() < 0.5:
            return ""
        then = time.perf_counter() - GATEWAY_LAG_S
        known = [one for one in self.pods if one.joined_at < then and (one.is_member or one.left_at > then)]
        return dice.choice(known).engine.address if known else ""

    def client(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self.over:
            body = completion(dice.randrange(40, 200), max_tokens=OUTPUT_TOKENS)
            target = self.gateway(dice)
            began = time.perf_counter()
            try:
                answer = self.sidecar.ask(
                    "POST", COMPLETIONS, body, [("x-prefiller-host-port", target)] if target else []
                )
            except Exception as error:
                self._note(f"{type(error).__name__}: {error}", "error")
                continue
            for one in self.pods:
                if answer.decision == f"remote; prefill={one.engine.address}":
                    one.asked.append((began, time.perf_counter()))
            wrong = ""
            if answer.status != 200:
                wrong = f"{answer.status}: {answer.body[:200]!r}"
            elif answer.text != text_of(encode(body["prompt"])):
                wrong = f"wrong text ({answer.decision})"
            self._note(wrong, answer.decision.split("; prefill")[0])

    def _note(self, wrong: str, decision: str) -> None:
        with self._lock:
            self.seen[decision] += 1
            if wrong:
                self.wrong.append(wrong)


def test_churn_under_load() -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(ThreadedEngine(num_blocks=16384))
        port, side_channel_port = free_ports(), free_ports()
        pods = []
        for number in range(PODS):
            host = f"127.0.7.{number + 1}"
            options = {
                "host": host,
                "port": port,
                "side_channel_host": host,
                "side_channel_port": side_channel_port,
            }
            engine = ThreadedEngine(**options, prefill_seconds_per_1k_tokens=0.1)
            pods.append(Pod(f"prefill-{number}", stack.enter_context(engine)))
        api = stack.enter_context(ThreadedApi())
        sidecar = Sidecar(
            *("--model-server-port", str(decode.port), "--disagg", "on"),
            *("--local-side-channel", f"127.0.0.1:{decode.side_channel_port}"),
            *("--prefill-side-channel-port", str(side_channel_port), "--discovery-port", str(port)),
            *("--discovery", "kubernetes", "--kubernetes-api", api.url, "--discovery-namespace", "llm"),
        )
        stack.callback(sidecar.stop)
        eventually(lambda: len(api.watches) == 1)
        before, tasks = sidecar.descriptors(), sidecar.metrics()("tasks")
        churn = Churn(api, pods, sidecar)
        for one in pods[: PODS // 2]:
            churn.join(one)
        eventually(lambda: sidecar.metrics()("discovery_endpoints", state="ready") == PODS / 2)
        assert sidecar.ask("POST", COMPLETIONS, completion()).decision.startswith("remote")
        threads = [threading.Thread(target=churn.client, args=(seed,)) for seed in range(CLIENTS)]
        threads.append(threading.Thread(target=churn.look))
        for thread in threads:
            thread.start()
        try:
            swaps = churn.swap(SECONDS / 3)
            warm_mib = sidecar.rss_mib
            swaps += churn.swap(SECONDS * 2 / 3)
        finally:
            churn.over = True
            for thread in threads:
                thread.join()
        requests = sum(churn.seen.values())
        late = [delay for one in pods for delay in one.late()]
        departures = sum(len(one.seen_leaving) for one in pods)
        print(f"{swaps} swaps, {departures} seen, {requests} requests, {dict(churn.seen)}, RSS {warm_mib:.1f} MiB")
        assert churn.wrong == []
        assert swaps > PODS
        assert departures > swaps * 0.5, "most removals were not seen before the pod was back"
        assert late == []
        # A machine that has no time for 40 engines makes side channels silent, and what is silent is recomputed.
        assert churn.seen["remote"] > requests * 0.9, "they had to be computed here"
        assert sum(any(one.method == "POST" for one in pod.engine.requests) for pod in pods) > PODS * 0.9
        assert sidecar.rss_mib - warm_mib < 6

        for one in pods:
            if one.is_member:
                churn.leave(one)
        api.do(lambda: [api.delete("pods", name) for name in list(api._objects["pods"])])
        eventually(lambda: json.loads(sidecar.admin("GET", "/endpoints")[1])["endpoints"] == [])
        metrics = sidecar.metrics()
        assert metrics.labels("breaker_state") == metrics.labels("prefill_blocked") == []
        ports = {port, side_channel_port}
        # Those of probes are kept for 15 s by the client, 5 s by the engine.
        eventually(lambda: not {one.remote_port for one in sidecar.descriptors().connections} & ports, 20)
        eventually(lambda: sidecar.in_flight() == 0)
        eventually(lambda: sidecar.descriptors().count <= before.count + 2, 10)  # idle ones to the decode engine
        eventually(lambda: sidecar.metrics()("tasks") <= tasks + 3, 10)  # a probe may be under way
        assert all(engine.held_blocks == 0 for engine in (one.engine for one in pods))


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_is_kept_of_those_that_left() -> None:
    """Tasks, relay addresses and descriptors of the parts, without requests: 600 endpoints that never answer."""

    async def main() -> dict[str, Any]:
        background = Background()
        gate = Gate(background, free_ports())
        endpoints = Endpoints([], AllowList([]), time.monotonic, learned=gate.learn, forgotten=gate.forget)
        channels = SideChannels(port=free_ports(), on_state=gate.state_changed)
        gate.attach(channels)
        kept: list[Endpoint] = []
        most = 0

        async def come_and_go(turns: int) -> None:
            nonlocal kept, most
            for turn in range(turns):
                hosts = [f"127.0.8.{(turn * 20 + n) % 250 + 1}" for n in range(20)]
                endpoints.discovered({Address(host, 9): True for host in hosts})
                kept += endpoints.members
                await asyncio.sleep(0.02)
            most = len(asyncio.all_tasks())
            endpoints.discovered({})

        def open_now() -> tuple[int, int]:
            return len(asyncio.all_tasks()), open_descriptors()

        await come_and_go(2)
        await asyncio.sleep(0.5)
        before = open_now()
        await come_and_go(28)
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(now <= then for now, then in zip(open_now(), before, strict=True)))
        tasks, descriptors = open_now()
        result = {
            "most": most,
            "tasks": max(tasks - before[0], 0),
            "descriptors": max(descriptors - before[1], 0),
            "channels": len(channels.prober.channels),
            "relays": len(channels._relays),
            "sharers": len(gate._endpoints),
            "not forgotten": sum(not endpoint.forgotten for endpoint in kept),
        }
        await channels.close()
        await background.close()
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(main())
    assert result.pop("most") < 100
    assert result == dict.fromkeys(result, 0)
