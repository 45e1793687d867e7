"""The scenarios, in the order in which they are played: what is done to whom; each docstring says what must hold.

What must hold after all of them (answers, gauges, blocks, descriptors, tasks, log) is in stage.py. Moments, sizes
and numbers are drawn from the seed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from e2e.asking import COMPLETIONS, ask, request_body, token_ids
from e2e.engines import HOST
from e2e.faults.clock import Clock
from e2e.faults.stage import PREFILL_TIMEOUT_S, PULL_TIMEOUT_S, Play, Scenario
from e2e.faults.wire import Weather
from tests.integration.client import Client
from tests.nameserver import ThreadedNameServer

if TYPE_CHECKING:
    from e2e.engines import Engine

COMPUTE_S = 20.0
"""What recomputing a handful of prompts takes on a machine with ten times as much to do; alone a second does."""
STALLED_S = 3 * PULL_TIMEOUT_S
AGAIN_S = 30.0
"""A breaker's pause (1 s, doubled with every failed trial) and the next request."""
RECONNECT_S = 60.0
"""A TCP connection that has lost its packets for seconds tries again after twice as many."""
STEPS_S = (3600, -3600, 86400 * 400, 0)
ABORTS_PER_S = 100
SCENARIOS: dict[str, Scenario] = {}


def scenario(
    within_s: float, again_s: float = AGAIN_S, *, errors: bool = False, network: bool = False
) -> Callable[[Callable[[Play], None]], Callable[[Play], None]]:
    """Puts a scenario on the list, under its function's name."""

    def put(play: Callable[[Play], None]) -> Callable[[Play], None]:
        name = play.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, play, within_s, again_s, errors, network)
        return play

    return put


# ------------------------------------------------------------------------- engines


@scenario(within_s=COMPUTE_S)
def prefill_killed(play: Play) -> None:
    """Requests that it had are recomputed (or get the policy's status); those after it wait for nothing."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        play.prefill.kill()
        play.pause(1.0, 2.0)
    began = time.monotonic()
    play.ask(play.sidecar)
    seconds = time.monotonic() - began
    play.must(seconds < COMPUTE_S / 3, f"a request waited {seconds:.1f} s for an engine that is known to be dead")
    _start(play.prefill)


@scenario(within_s=COMPUTE_S, errors=True)
def decode_killed(play: Play) -> None:
    """Clients hear of it: 502 or 503 where nothing was sent yet, an error event where a stream had begun."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        play.decode.kill()
        play.pause(0.5, 1.5)
        _start(play.decode)
        play.sidecar.wait_until("/readyz")


@scenario(within_s=PREFILL_TIMEOUT_S + COMPUTE_S)
def prefill_restarted(play: Play) -> None:
    """It is back at the same address with another engine id: nothing of the old one is used, no text is wrong."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        play.prefill.restart()
        play.wait_for(lambda: play.is_remote(play.sidecar), "the new engine is used", AGAIN_S)


@scenario(within_s=PULL_TIMEOUT_S + COMPUTE_S)
def prefill_frozen(play: Play) -> None:
    """SIGSTOP, then SIGCONT: nobody waits longer than --pull-timeout for it, also where decode waits for its KV."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        play.prefill.stop()
        play.pause(PULL_TIMEOUT_S + 1, PULL_TIMEOUT_S + 4)
        play.prefill.cont()


@scenario(within_s=COMPUTE_S + 6)
def decode_frozen(play: Play) -> None:
    """SIGSTOP, then SIGCONT: requests wait for their engine, and are answered when it goes on."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        play.decode.stop()
        play.pause(2.0, 6.0)
        play.decode.cont()


@scenario(within_s=PREFILL_TIMEOUT_S + COMPUTE_S)
def prefill_out_of_blocks(play: Play) -> None:
    """Its blocks are held by handoffs that nobody reads: prompts wait --prefill-timeout there, then the policy."""
    play.serve()
    stop = threading.Event()
    sizes = [play.draw.randrange(6000, 7500) for _ in range(4)]
    with play.load(2, 4):
        hoarders = [threading.Thread(target=_hoard, args=(play.prefill, size, stop), daemon=True) for size in sizes]
        for hoarder in hoarders:
            hoarder.start()
        play.wait_for(lambda: play.prefill.kv_usage() > 0.6, "the prefill engine has no room for another", 60.0)
        play.pause(3.0, 5.0)
        stop.set()
    for hoarder in hoarders:
        hoarder.join()


@scenario(within_s=PREFILL_TIMEOUT_S + COMPUTE_S + 30)
def decode_out_of_blocks(play: Play) -> None:
    """Handoffs wait until it has room, up to beyond their first lease, and are read in time or computed again."""
    play.serve()
    stop = threading.Event()
    bodies = [request_body(COMPLETIONS, token_ids(6500), 1500, ignore_eos=True, stream=True) for _ in range(6)]
    with play.load(2, 4):
        hogs = [threading.Thread(target=_hog, args=(play.decode, body, stop), daemon=True) for body in bodies]
        for hog in hogs:
            hog.start()
        play.wait_for(lambda: play.decode.kv_usage() > 0.8, "the decode engine is full")
        play.pause(4.0, 12.0)
        stop.set()
    for hog in hogs:
        hog.join()


# ------------------------------------------------------------------------- the network


@scenario(within_s=PREFILL_TIMEOUT_S + COMPUTE_S, network=True)
def http_port_blocked(play: Play) -> None:
    """Packets of its HTTP port are dropped: requests under way are given up, new ones not sent."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        with play.weather(Weather(blocked=(play.prefill.port,))):
            play.pause(3.0, 6.0)


@scenario(within_s=PULL_TIMEOUT_S + COMPUTE_S, network=True)
def side_channel_blocked(play: Play) -> None:
    """Its side channel's port is dropped: prompts are not sent there in vain, no handoff is passed on unchecked."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        with play.weather(Weather(blocked=(play.prefill.side_channel_port,))):
            play.pause(3.0, 6.0)


@scenario(within_s=STALLED_S + COMPUTE_S, again_s=RECONNECT_S, network=True)
def data_ports_blocked(play: Play) -> None:
    """NIXL's own connections are dropped while HTTP and side channel answer: decode's wait for KV has an end."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        open_ports = (play.prefill.port, play.prefill.side_channel_port)
        with play.weather(Weather(blocked_but=open_ports)):
            play.pause(STALLED_S + 1, STALLED_S + 4)


@scenario(within_s=30.0, network=True)
def packets_lost_and_late(play: Play) -> None:
    """5 % lost, 50 ms late, both ways: slower, and all of it right."""
    play.serve(timeouts=False)
    with play.load():
        for weather in (Weather(loss=0.05), Weather(delay_s=0.05), Weather(loss=0.05, delay_s=0.05)):
            with play.weather(weather):
                play.pause(2.0, 4.0)


@scenario(within_s=PREFILL_TIMEOUT_S + COMPUTE_S, network=True)
def half_open(play: Play) -> None:
    """Prefill's host goes without a FIN or RST, and another engine comes back at its address: nobody waits longer
    than the deadlines for connections that stand on one side only."""
    play.serve()
    with play.load():
        play.pause(0.2, 1.0)
        with play.weather(Weather(dead=True)):
            play.prefill.kill()
            play.pause(3.0, 5.0)
        _start(play.prefill)


# ------------------------------------------------------------------------- the rest


@scenario(within_s=COMPUTE_S)
def clock_steps(play: Play) -> None:
    """The sidecar's wall clock jumps by hours and by a year, both ways: no deadline, lease or breaker notices."""
    with Clock() as clock:
        play.serve(environment=clock.environment)
        with play.load():
            for seconds in STEPS_S:
                clock.step(seconds)
                play.pause(0.5, 1.0)
                play.ask(play.sidecar)
                off_s = play.sidecar.decisions()[0]["time"] - time.time()
                play.must(abs(off_s - seconds) < 60, f"the clock is {off_s:.0f} s off, not {seconds}")
        outcomes = {one.outcome for one in play.asked}
        play.must(outcomes <= {"remote"}, f"not only remote: {outcomes}")


@scenario(within_s=COMPUTE_S)
def dns_away(play: Play) -> None:
    """The name server dies and comes back: what it told last is used all the while, no request waits for it."""
    host = play.prefill.host
    with ThreadedNameServer() as server:
        server.records["prefill.test"] = [host]
        port = server.port
        name = f"dns:prefill.test.:{play.prefill.port}"
        play.serve("--discovery", name, "--discovery-dns-server", server.address, static=False)
    with play.load():
        play.wait_for(lambda: play.sidecar.metrics()("discovery_errors_total") >= 2, "lookups fail")
        play.pause(1.0, 3.0)
        again = ThreadedNameServer()
        again.port = port
        with again:
            again.records["prefill.test"] = [host]
            play.wait_for(lambda: again.count() > 0, "it is asked again")
            play.wait_for(lambda: play.sidecar.metrics()("discovery_age_seconds") < 2, "it is believed again")
            play.pause(0.3, 1.0)
    outcomes = {one.outcome for one in play.asked}
    play.must(outcomes <= {"remote"}, f"not only remote: {outcomes}")


@scenario(within_s=COMPUTE_S)
def aborts(play: Play) -> None:
    """A hundred clients a second leave, at every moment of their requests, while others are answered as ever."""
    play.serve()
    left, lasts_s = 0, play.draw.uniform(3.0, 5.0)
    with play.load(2, 3), ThreadPoolExecutor(64) as pool:
        began = time.monotonic()
        while time.monotonic() < began + lasts_s:
            wait_s = play.draw.choice((0.0, 0.01, 0.05, 0.2)) * play.draw.random()
            pool.submit(_leave, play, wait_s, streamed=play.draw.random() < 0.5)
            left += 1
            time.sleep(max(0.0, began + left / ABORTS_PER_S - time.monotonic()))
        seconds = time.monotonic() - began
    play.must(left / seconds > ABORTS_PER_S * 0.9, f"only {left} aborts in {seconds:.1f} s")
    labels = play.sidecar.metrics()
    play.must(labels("requests_total", status="none") > left / 4, "hardly anybody left before an answer")


# ------------------------------------------------------------------------- what they share


def _start(engine: Engine) -> None:
    engine.start()
    engine.wait_healthy()


def _hoard(engine: Engine, tokens: int, stop: threading.Event) -> None:
    """Prompts whose blocks are held for a lease, one after the other."""
    lost = {"kv_transfer_params": {"do_remote_decode": True}}
    while not stop.is_set():
        with suppress(OSError):
            ask(engine, COMPLETIONS, request_body(COMPLETIONS, token_ids(tokens), 1, **lost))


def _hog(engine: Engine, body: object, stop: threading.Event) -> None:
    """A stream straight from the engine, until told to leave."""
    with Client((engine.host, engine.port), timeout_s=60) as client:
        client.request("POST", COMPLETIONS.path, body)
        for _ in client.pieces(client.head()):
            if stop.is_set():
                return


def _leave(play: Play, after_s: float, *, streamed: bool) -> None:
    question = play.questions.next(streamed=streamed)
    with suppress(OSError), Client((HOST, play.sidecar.port), timeout_s=30) as client:
        client.request("POST", question.api.path, question.body)
        time.sleep(after_s)
