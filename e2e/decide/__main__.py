"""`make decide`: the mixed load by every way, from flags; where the results go. It must not know how anything is
measured."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from e2e import machine
from e2e.decide import report
from e2e.decide.ways import LEAST_TOKENS, MAIN, MIXED, SIDE, WARM_UP, WAYS
from e2e.ending import end_what_was_started
from e2e.engines import HOST
from e2e.latency.measure import BLOCK_SIZE, DTYPE, UCX_TLS, Cores, Result, Stage, run_rounds
from e2e.latency.publish import publish
from e2e.rounds import turns
from tests.ports import free_ports

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs" / "decide"
ROUNDS = 4
KV_CACHE_BYTES = 1 << 30
"""Room for all that a round sends: what was evicted would be nobody's decision."""


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.decide", description=__doc__)
    parser.add_argument("--mode", action="append", choices=list(WAYS), help="only this way (repeatable)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="round r has the load of this plus r")
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder")
    parser.add_argument("--write", action="store_true", help=f"write the results into {_DOCS.relative_to(_ROOT)}/")
    parser.add_argument("--output", type=Path, help="folder for report, samples and plots (default: build/decide)")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="JSON", help="measure nothing: report on these samples anew"
    )
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(f"decide: {text}", file=sys.stderr, flush=True)


def plan(modes: list[str] | None, rounds: int) -> list[list[str]]:
    """The ways of each round, in order: the main ones alternate, the others come once."""
    main = [name for name in MAIN if not modes or name in modes]
    side = [name for name in SIDE if not modes or name in modes]
    found = list(turns(main, rounds)) if main else [[] for _ in range(rounds)]
    for number, name in enumerate(side):
        found[number % rounds] += [name]
    return found


async def _measure(stage: Stage, flags: argparse.Namespace) -> Result:
    result = Result(MIXED.name)
    _say("`auto` learns what both ways cost")
    await stage.sample(WARM_UP, WAYS["auto"], 0)
    orders = [[WAYS[name] for name in order] for order in plan(flags.mode, flags.rounds)]
    await run_rounds(stage, MIXED, orders, range(flags.first_seed, flags.first_seed + flags.rounds), result, _say)
    return result


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """The document of a run. RuntimeError of any kind: it could not be run at all."""
    cores = Cores.chosen(sorted(os.sched_getaffinity(0)))
    described = machine.describe({}, sys.executable)
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    events, replay = free_ports(), free_ports()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{events}",
        "replay_endpoint": f"tcp://{HOST}:{replay}",
    }
    sidecar = {
        "--min-remote-tokens": LEAST_TOKENS,
        "--kv-events": "on",
        "--kv-events-port": events,
        "--kv-events-replay-port": replay,
    }
    with Stage(
        flags.model,
        cores,
        None,
        UCX_TLS,
        BLOCK_SIZE,
        sidecar_flags=[str(word) for pair in sidecar.items() for word in pair],
        decode_flags=["--kv-events-config", json.dumps(config)],
        kv_cache_bytes=KV_CACHE_BYTES,
    ) as stage:
        described["versions"]["vllm"] = stage.decode.request("GET", "/version").json()["version"]
        result = asyncio.run(_measure(stage, flags))
        model, tamed = stage.rig.model_name, bool(stage.decode.cores)
    settings = {
        "started": started,
        "command": shlex.join(["python", "-m", "e2e.decide", *sys.argv[1:]]),
        "layout": cores.text() if tamed else "a vLLM of its own, which is not pinned",
        "model": model,
        "dtype": DTYPE,
        "ucx_tls": f"UCX_TLS={UCX_TLS}",
        "block_size": BLOCK_SIZE,
        "load_at_end": round(os.getloadavg()[0], 2),
    }
    return report.document(described, settings, dataclasses.asdict(result))


def main(arguments: list[str] | None = None) -> int:
    """0 unless it could not run at all: whether what must be shown holds is said in the report."""
    flags = _flags(arguments)
    folder = _DOCS if flags.write else flags.output or _ROOT / "build" / "decide"
    return publish("decide", folder, lambda: measure(flags), flags.source, report.plots, report.markdown, _say)


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
