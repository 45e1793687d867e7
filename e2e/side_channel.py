"""What the NIXL handshake costs a request on real engines, with the relay and without: docs/side-channel.md.

    python -m e2e.side_channel            # measures and prints
    python -m e2e.side_channel --write    # and writes docs/side-channel.md

Times of whole requests, so they hold what the engines compute. The black hole needs root and nftables: the
measurement then runs in a network namespace of its own. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from e2e.asking import COMPLETIONS, ask, prompt, request_body
from e2e.door import Door, gone_between_the_legs
from e2e.ending import end_what_was_started
from e2e.engines import HOST, Engine
from e2e.pair import LEASE_S, free
from e2e.rig import Rig
from tests.integration.sidecar import Sidecar

PROMPT_TOKENS = 600
LEAVING = 100
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "side-channel.md"
INSIDE = "PD_E2E_IN_NAMESPACE"


def request_ms(where: Sidecar | Engine) -> tuple[float, str]:
    """One request of one token; its time and what was decided."""
    body = request_body(COMPLETIONS, prompt(PROMPT_TOKENS), 1)
    began = time.perf_counter()
    answer = ask(where, COMPLETIONS, body)
    elapsed_ms = (time.perf_counter() - began) * 1000
    assert answer.status == 200, answer.body
    return elapsed_ms, answer.decision or "local"


@contextlib.contextmanager
def sidecar_for(rig: Rig, *flags: str) -> Iterator[Sidecar]:
    prefill, decode = rig.prefill[0], rig.decode[0]
    sidecar = Sidecar(
        *("--disagg", "on", "--prefill", prefill.address, "--model-server-port", str(decode.port)),
        *("--local-side-channel", f"{HOST}:{decode.side_channel_port}"),
        *flags,
    )
    try:
        yield sidecar
    finally:
        sidecar.stop()


def wound(engine: Engine) -> None:
    """Ends the listener of an engine's side channel for good: one question for a rank that it does not have."""
    context = zmq.Context()
    try:
        with context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.connect(f"tcp://{HOST}:{engine.side_channel_port}")
            asking.send(msgspec.msgpack.encode((b"get_meta_msg", 7, 7)))
            assert not asking.poll(1000)
    finally:
        context.term()


class Table:
    """Rows of the report, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.left = ""

    def add(self, situation: str, relay: str, times: list[tuple[float, str]]) -> None:
        shown = " / ".join(f"{elapsed_ms:,.0f}" for elapsed_ms, _ in times)
        decisions = "; ".join(dict.fromkeys(decision.split("; prefill")[0] for _, decision in times))
        self.rows.append(f"| {situation} | {relay} | {shown} | {decisions} |")
        print(self.rows[-1], flush=True)


def measure(rig: Rig, table: Table) -> None:
    prefill, decode = rig.prefill[0], rig.decode[0]
    local = [request_ms(decode)[0] for _ in range(5)]
    table.add("no sidecar, computed locally (median of 5)", "", [(statistics.median(local), "local")])

    for relay in ("on", "off"):
        _cold(rig)
        with sidecar_for(rig, "--nixl-relay", relay, "--warm-up", "off") as sidecar:
            table.add("healthy; first, second and third request of a new pair", relay, _three(sidecar))
    _cold(rig)
    usual = ("--prefill-side-channel-port", str(prefill.side_channel_port))
    with sidecar_for(rig, "--warm-up", "on", *usual) as sidecar:
        table.add("the same with `--warm-up on`", "on", _three(sidecar))

    for relay in ("on", "off"):
        _cold(rig)
        wound(prefill)
        with sidecar_for(rig, "--nixl-relay", relay, "--warm-up", "off") as sidecar:
            table.add("prefill engine's listener dead, its `/health` 200", relay, _three(sidecar))
        prefill.restart()
    if os.environ.get(INSIDE):
        for relay in ("on", "off"):
            _cold(rig)
            with (
                sidecar_for(rig, "--nixl-relay", relay, "--warm-up", "off") as sidecar,
                _black_hole(prefill.side_channel_port),
            ):
                table.add("packets to the side channel dropped", relay, _three(sidecar))
    else:
        print("(packets dropped: not measured, needs root and nftables)")
    _cold(rig)
    table.left = _leave(rig)
    print(table.left)


def _leave(rig: Rig) -> str:
    """How soon the prefill engine's blocks are free when clients leave between the legs."""
    door = Door(rig.decode[0])
    try:
        with sidecar_for(rig, "--engine-idle-timeout", "0.01", "--model-server-port", str(door.port)) as sidecar:
            assert request_ms(sidecar)[1].startswith("remote")  # the engines know each other
            free(rig.prefill[0], within_s=LEASE_S + 15)  # what the situations before have left
            told, freed = zip(
                *(gone_between_the_legs(sidecar, rig.prefill[0], door) for _ in range(LEAVING)), strict=True
            )
    finally:
        door.close()
    return (
        f"{LEAVING} clients, one after the other: {_spread_ms(freed)} ms (median / p90 / worst) from the moment\n"
        "at which the decode engine took the sidecar's connection until the blocks were free;\n"
        f"{_spread_ms(told)} ms from the leaving to that moment."
    )


def _spread_ms(times: Sequence[float]) -> str:
    ordered = sorted(times)
    return " / ".join(f"{1000 * ordered[len(ordered) * share // 100]:,.0f}" for share in (50, 90, 99))


def _three(sidecar: Sidecar) -> list[tuple[float, str]]:
    return [request_ms(sidecar) for _ in range(3)]


def _cold(rig: Rig) -> None:
    """A decode engine that has shaken hands with nobody, and has its start behind it."""
    rig.decode[0].restart()
    request_ms(rig.decode[0])
    request_ms(rig.prefill[0])


@contextlib.contextmanager
def _black_hole(port: int) -> Iterator[None]:
    chain = "add table inet hole; add chain inet hole in { type filter hook input priority 0; }; "
    subprocess.run(["nft", f"{chain} add rule inet hole in tcp dport {port} drop"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete table inet hole"], check=True)


def report(rows: list[str], left: str) -> str:
    return "\n".join(
        [
            "# What a side channel costs a request",
            "",
            "Written by `python -m e2e.side_channel --write`: real vLLM engines on CPU, a tiny model, prompts of",
            f"about {PROMPT_TOKENS} tokens, one token generated. Times are those of whole requests, one after the",
            "other, on one machine with two cores: the ratio of the rows is the point, not the numbers.",
            "",
            "| situation | `--nixl-relay` | ms: first / second / third request | decisions |",
            "|---|---|---|---|",
            *rows,
            "",
            "Without the relay the decode engine waits five seconds for a dead side channel, again for each",
            "and on one thread for all. With it the sidecar knows before the handoff is passed on, and from the",
            "second request on before a prompt is prefilled for nothing.",
            "",
            "## A client that leaves between prefill and decode",
            "",
            left,
            "",
            "So that the moment is met, the decode engine takes no connection when the client leaves, and the",
            "kernel tries again a second after its first try: the time before. A connection that stands has none.",
            "The prefill engine would hold the blocks for its lease (30 s by default) if nobody told it.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="measure what the NIXL handshake costs a request")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    arguments = parser.parse_args()
    if not os.environ.get(INSIDE) and os.geteuid() == 0 and shutil.which("nft") and shutil.which("unshare"):
        command = [sys.executable, "-m", "e2e.side_channel", *sys.argv[1:]]
        in_namespace = ["unshare", "-n", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        return subprocess.run(in_namespace, env={**os.environ, INSIDE: "1"}, check=False).returncode
    table = Table()
    with Rig(model="tiny", prefill=1, decode=1, lease_seconds=LEASE_S) as rig:
        measure(rig, table)
    if arguments.write:
        DOCUMENT.write_text(report(table.rows, table.left), encoding="utf-8")
        print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
