"""`make demo`: two real engines on this machine's CPU, the sidecar between them, the same prompts both ways.

It uses the sidecar as anyone would (its command line, its ports, its headers) and must not import it. It ends with
exit code 0 only if remote prefills really moved KV and changed no text. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from e2e.engines import HOST, Engine, RigError
from e2e.install import InstallError, engine_python, say
from e2e.models import REPOSITORY, ModelError, model_path
from e2e.prompts import make_prompt
from e2e.rig import Rig
from e2e.zygote import die_with_parent
from tests.ports import bindable, free_ports

MODEL = "smollm2"
ANSWER_TOKENS = 48
# Name and number of sentences; some 28 tokens each with this model's tokenizer.
PROMPTS = (("short", 0), ("medium", 9), ("long", 35), ("very long", 72))
MODES = ("off", "on")
BACKGROUND_TOKENS = 4000  # more than can be decoded meanwhile
REQUEST_TIMEOUT_SECONDS = 180.0
READY_TIMEOUT_SECONDS = 60.0
# vLLM counts a prompt's tokens when its first token is out; the counter may come a little later than the answer.
COUNTERS_TIMEOUT_SECONDS = 5.0


class DemoError(RuntimeError):
    """Something that the demo needs does not work; the text says what and where to look."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer, and where its prompt came from."""

    decision: str  # the x-pd-decision header
    text: str
    prompt_tokens: int
    ttft_seconds: float
    tokens_per_second: float
    sources: dict[str, int]  # prompt tokens of the decode engine by source

    @property
    def computed(self) -> int:
        return self.sources["local_compute"]

    @property
    def pulled(self) -> int:
        return self.sources["external_kv_transfer"]


# --- the sidecar, from outside ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sidecar:
    port: int
    admin_port: int
    log_path: Path
    process: subprocess.Popen[bytes]

    def turn(self, mode: str) -> None:
        request = urllib.request.Request(
            f"http://{HOST}:{self.admin_port}/disagg", data=mode.encode(), method="PUT"
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read()

    def log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])


@contextlib.contextmanager
def serve(prefill: Engine, decode: Engine, folder: Path) -> Iterator[Sidecar]:
    """The sidecar before `decode`, ready; ended with the block."""
    # The usual ports where they are free: what is printed is then what the documentation says.
    port = 8000 if bindable(8000) else free_ports()
    admin_port = 9090 if bindable(9090) else free_ports()
    flags = {
        "--host": HOST,
        "--port": port,
        "--metrics-host": HOST,
        "--metrics-port": admin_port,
        "--model-server-port": decode.port,
        "--local-side-channel": f"{HOST}:{decode.side_channel_port}",
        "--prefill": prefill.address,
        "--prefill-side-channel-port": prefill.side_channel_port,
        "--nixl-relay-port": free_ports(),
        "--disagg": "off",
    }
    command = [sys.executable, "-m", "sidecar", "serve", *(str(part) for pair in flags.items() for part in pair)]
    # What is set in this shell for a sidecar of the user's is not meant for the demo's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PD_SIDECAR_")}
    log_path = folder / "sidecar.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    sidecar = Sidecar(port, admin_port, log_path, process)
    try:
        _wait_until_ready(sidecar)
        say(f"  sidecar: {' '.join(command[1:])}")
        yield sidecar
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(sidecar: Sidecar) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    problem = ""
    while True:
        if sidecar.process.poll() is not None:
            code = sidecar.process.returncode
            raise DemoError(f"the sidecar ended ({code}); {sidecar.log_path}:\n{sidecar.log_tail()}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{sidecar.admin_port}/readyz", timeout=2):
                return
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise DemoError(
                f"the sidecar's /readyz on {HOST}:{sidecar.admin_port} was not 200 within "
                f"{READY_TIMEOUT_SECONDS:.0f} s ({problem}); {sidecar.log_path}:\n{sidecar.log_tail()}"
            )
        time.sleep(0.1)


# --- prompts and answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One event of a streamed answer."""

    arrival_seconds: float  # time.monotonic
    decision: str  # the answer's x-pd-decision header
    text: str
    usage: dict[str, int] | None


def stream(sidecar: Sidecar, model: str, prompt: str, **fields: Any) -> Iterator[Event]:
    """One streamed, greedy chat completion through the sidecar. Raises DemoError with the body if it is no 200."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    connection = http.client.HTTPConnection(HOST, sidecar.port, timeout=REQUEST_TIMEOUT_SECONDS)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(f"the sidecar answered {response.status}: {response.read().decode(errors='replace')}")
        decision = response.getheader("x-pd-decision") or ""
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise DemoError(f"the stream broke off: {event['error']}")
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            yield Event(time.monotonic(), decision, text, event.get("usage"))
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"no answer from the sidecar at {HOST}:{sidecar.port}: {error!r}") from error
    finally:
        connection.close()


def ask(sidecar: Sidecar, decode: Engine, model: str, prompt: str, salt: str) -> Answer:
    """One answer, and what it took. Blocks are shared only between requests of one salt."""
    before = decode.prompt_tokens_by_source()
    start = time.monotonic()
    events = list(stream(sidecar, model, prompt, max_tokens=ANSWER_TOKENS, cache_salt=salt))
    tokens = [event.arrival_seconds for event in events if event.text]
    usage = next((event.usage for event in events if event.usage), None)
    if not tokens or usage is None:
        raise DemoError(f"an empty answer: {events}")
    decoding_seconds = tokens[-1] - tokens[0]
    return Answer(
        decision=events[0].decision,
        text="".join(event.text for event in events),
        prompt_tokens=usage["prompt_tokens"],
        ttft_seconds=tokens[0] - start,
        tokens_per_second=(usage["completion_tokens"] - 1) / decoding_seconds if decoding_seconds else 0.0,
        sources=_sources_since(decode, before, usage["prompt_tokens"]),
    )


def _sources_since(decode: Engine, before: dict[str, int], expected: int) -> dict[str, int]:
    deadline = time.monotonic() + COUNTERS_TIMEOUT_SECONDS
    while True:
        now = decode.prompt_tokens_by_source()
        difference = {source: now[source] - before[source] for source in now}
        if sum(difference.values()) >= expected or time.monotonic() > deadline:
            return difference
        time.sleep(0.05)


# --- the comparison ---------------------------------------------------------------------------------------

COLUMNS = ("prompt", "disagg", "decision", "TTFT", "tokens/s", "computed here", "pulled over NIXL", "same text")


def compare(sidecar: Sidecar, rig: Rig) -> list[str]:
    """Sends every prompt both ways and prints the table; returns what is wrong."""
    decode = rig.decode[0]
    run = uuid.uuid4().int % 1_000_000
    for mode in MODES:  # first requests meet cold code and, remotely, engines that do not know each other
        sidecar.turn(mode)
        ask(sidecar, decode, rig.model_name, make_prompt(3, run), f"warm-up {mode}")
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    for number, (name, sentences) in enumerate(PROMPTS, run + 1):
        prompt = make_prompt(sentences, number)
        answers: dict[str, Answer] = {}
        for mode in MODES:
            sidecar.turn(mode)
            answers[mode] = ask(sidecar, decode, rig.model_name, prompt, f"{run} {mode}")
        same = answers["on"].text == answers["off"].text
        for mode, answer in answers.items():
            rows.append(
                (
                    f"{name}, {answer.prompt_tokens} tokens" if mode == MODES[0] else "",
                    mode,
                    answer.decision,
                    f"{answer.ttft_seconds * 1000:,.0f} ms",
                    f"{answer.tokens_per_second:.1f}",
                    f"{answer.computed:,}",
                    f"{answer.pulled:,}",
                    "" if mode == MODES[0] else "yes" if same else "NO",
                )
            )
        say(f"  {name}: sent both ways")
        problems += _problems(name, answers)
    say("")
    _print_table(rows)
    say(
        "\nPrompt tokens are the decode engine's: computed by itself, or pulled from the prefill engine's memory.\n"
        "Each way has a cache salt of its own, so neither finds what the other has computed.\n"
        "Without RDMA the copy is paid by the CPU, here the same that computes: the TTFT is not what a fabric\n"
        "would give."
    )
    return problems


def _problems(name: str, answers: dict[str, Answer]) -> list[str]:
    local, remote = answers["off"], answers["on"]
    found = []
    if not local.decision.startswith("local"):
        found.append(f"{name}, off: the decision was {local.decision!r}, not local")
    if not remote.decision.startswith("remote"):
        found.append(f"{name}, on: the decision was {remote.decision!r}, not remote")
    if local.pulled:
        found.append(f"{name}, off: {local.pulled} tokens were pulled although disaggregation was off")
    if not remote.pulled:
        found.append(f"{name}, on: no token was pulled over NIXL, everything was computed twice")
    if local.text != remote.text:
        found.append(f"{name}: the texts differ\n    off: {local.text!r}\n    on:  {remote.text!r}")
    return found


def _print_table(rows: list[tuple[str, ...]]) -> None:
    numbers = range(3, 7)  # columns set to the right
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    for row in (COLUMNS, tuple("-" * width for width in widths), *rows):
        cells = (
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        say("  ".join(cells).rstrip())


# --- what it is for ---------------------------------------------------------------------------------------


def longest_pause(sidecar: Sidecar, rig: Rig, mode: str, number: int) -> float:
    """Seconds that a running stream stands still, at most, while a very long prompt arrives."""
    sidecar.turn(mode)
    arrivals: list[float] = []
    running, enough = threading.Event(), threading.Event()

    def read() -> None:
        prompt = make_prompt(1, number)
        for event in stream(sidecar, rig.model_name, prompt, max_tokens=BACKGROUND_TOKENS, ignore_eos=True):
            arrivals.append(event.arrival_seconds)
            if len(arrivals) > 10:
                running.set()
            if enough.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            while not running.wait(0.1):
                if reading.done():
                    reading.result()
                    raise DemoError("the stream in the background ended too early")
            start = time.monotonic()
            prompt = make_prompt(PROMPTS[-1][1], number + 1)
            answer = ask(sidecar, rig.decode[0], rig.model_name, prompt, f"{number} {mode}")
        finally:
            enough.set()
        reading.result()
    first_token = start + answer.ttft_seconds
    return max(b - a for a, b in pairwise(arrivals) if b > start and a < first_token)


def show_pace(sidecar: Sidecar, rig: Rig) -> None:
    say("\nWhat it is for: the longest pause of a stream that runs while the very long prompt arrives")
    for mode in MODES:
        seconds = longest_pause(sidecar, rig, mode, uuid.uuid4().int % 1_000_000)
        say(f"  disagg {mode + ':':<4} {seconds * 1000:>8,.0f} ms")


# --- all of it --------------------------------------------------------------------------------------------


def explain(sidecar: Sidecar, rig: Rig) -> None:
    body = {"model": rig.model_name, "messages": [{"role": "user", "content": "What is a tide?"}], "max_tokens": 64}
    say(
        f"""
Talk to it (the first line of interest is x-pd-decision):
  curl -i http://{HOST}:{sidecar.port}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{json.dumps(body)}'
Turn remote prefill off, on, or leave the choice to the sidecar:
  curl -X PUT http://{HOST}:{sidecar.admin_port}/disagg -d off
  curl -X PUT http://{HOST}:{sidecar.admin_port}/disagg -d on
  curl -X PUT http://{HOST}:{sidecar.admin_port}/disagg -d auto
What it decided and measured:
  curl http://{HOST}:{sidecar.admin_port}/decisions
  curl http://{HOST}:{sidecar.admin_port}/metrics
The engines themselves: prefill {rig.prefill[0].url} (processes {_pids(rig.prefill[0])}),
  decode {rig.decode[0].url} (processes {_pids(rig.decode[0])})
Break something: kill -9 or kill -STOP the prefill engine's processes, ask again, and read the sidecar's log:
  tail -f {sidecar.log_path}   (the engines' logs lie beside it; all of it goes with Ctrl-C)
The switch is at auto now. Ctrl-C ends everything."""
    )
    sidecar.turn("auto")


def _pids(engine: Engine) -> str:
    return " ".join(map(str, engine.pids()))


def stay(sidecar: Sidecar, rig: Rig) -> None:
    """Until Ctrl-C or the sidecar's end, which is an error. Engines may be killed to see what happens."""
    gone: set[str] = set()
    while True:
        time.sleep(1)
        if sidecar.process.poll() is not None:
            raise DemoError(f"the sidecar has ended; {sidecar.log_path}:\n{sidecar.log_tail()}")
        for engine in rig.engines:
            if not engine.alive() and engine.name not in gone:
                gone.add(engine.name)
                say(f"{engine.name} has ended; its log: {engine.log_path}")


def demo(*, once: bool) -> int:
    say("1/4 software and model")
    model_path(MODEL, engine_python())
    say("2/4 one prefill and one decode engine, each on a core of its own")
    with Rig(MODEL) as rig:
        for engine in rig.engines:
            say(f"  {engine.name}: {engine.url}, up in {engine.start_seconds:.0f} s")
        say("3/4 the sidecar before the decode engine")
        with serve(rig.prefill[0], rig.decode[0], rig.folder) as sidecar:
            say("4/4 the same prompts, prefilled by the decode engine (off) and by the prefill engine (on)")
            problems = compare(sidecar, rig)
            if problems:
                raise DemoError(
                    "\n".join(["not as it should be:", *problems, f"sidecar's log: {sidecar.log_path}"])
                )
            show_pace(sidecar, rig)
            say("\nAs it should be: remote prompts came over NIXL, and no text changed")
            if not once:
                explain(sidecar, rig)
                stay(sidecar, rig)
    return 0


def main() -> int:
    argparse.ArgumentParser(prog="python -m e2e.demo", description="As `make demo`: see there.").parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return demo(once=os.environ.get("ONCE", "") not in ("", "0"))
    except KeyboardInterrupt:
        say("\nended")
        return 0
    except (InstallError, ModelError, RigError, DemoError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
