"""`make latency`: what to measure, from flags; where the results go. It must not know how anything is measured."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from e2e import machine
from e2e.bench.install import install, versions
from e2e.ending import end_what_was_started
from e2e.engines import RigError
from e2e.latency import report
from e2e.latency.measure import BLOCK_SIZE, DTYPE, ROUTER, UCX_TLS, Cores, Result, Stage, run_scenario
from e2e.latency.publish import publish
from e2e.latency.scenarios import MODES, SCENARIOS

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs" / "latency"
_QUICK_ROUNDS = 3


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.latency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five minutes: three scenarios, fewer ways")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one (repeatable)")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="only this way (repeatable)")
    parser.add_argument("--rounds", type=int, help="alternating rounds of each scenario (default: by scenario)")
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder")
    parser.add_argument("--ttft-target-ms", type=float, default=8000, help="goodput: a TTFT is good up to this")
    parser.add_argument(
        "--itl-target-ms", type=float, default=250, help="goodput: a request's p99 gap is good up to this"
    )
    parser.add_argument("--ucx-tls", default=UCX_TLS, help=f"how engines copy KV: UCX_TLS (default {UCX_TLS})")
    parser.add_argument(
        "--block-size",
        type=int,
        default=BLOCK_SIZE,
        help=f"tokens in a KV block of both engines (default {BLOCK_SIZE})",
    )
    parser.add_argument("--sidecar-core", type=int, help="core of sidecar and router")
    parser.add_argument("--driver-core", type=int, help="core of the load")
    parser.add_argument("--write", action="store_true", help=f"write the results into {_DOCS.relative_to(_ROOT)}/")
    parser.add_argument("--output", type=Path, help="folder for report, samples and plots (default: build/latency)")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="JSON", help="measure nothing: report on these samples anew"
    )
    parser.add_argument("--list", action="store_true", help="list scenarios and ways")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(f"latency: {text}", file=sys.stderr, flush=True)


def _plan(flags: argparse.Namespace) -> dict[str, list[str]]:
    """Ways by scenario."""
    plan = {}
    for name, scenario in SCENARIOS.items():
        modes = scenario.quick_modes if flags.quick and not (flags.scenario or flags.mode) else scenario.modes
        if flags.scenario and name not in flags.scenario:
            continue
        if chosen := [mode for mode in modes if not flags.mode or mode in flags.mode]:
            plan[name] = chosen
    return plan


async def _measure(stage: Stage, plan: dict[str, list[str]], rounds: int | None) -> dict[str, Result]:
    return {
        name: await run_scenario(stage, SCENARIOS[name], modes, rounds or SCENARIOS[name].rounds, _say)
        for name, modes in plan.items()
    }


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """The document of a run. RuntimeError of any kind: it could not be run at all."""
    plan = _plan(flags)
    if not plan:
        raise RigError("latency: no scenario has the ways that --mode names; see --list")
    rounds = flags.rounds or (_QUICK_ROUNDS if flags.quick else None)
    cores = Cores.chosen(sorted(os.sched_getaffinity(0)), flags.sidecar_core, flags.driver_core)
    with_router = any(ROUTER in modes for modes in plan.values())
    peers = install([ROUTER] if with_router else [])
    described = machine.describe(versions(peers), sys.executable)
    started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    with Stage(flags.model, cores, peers.binaries.get(ROUTER), flags.ucx_tls, flags.block_size) as stage:
        described["versions"]["vllm"] = stage.decode.request("GET", "/version").json()["version"]
        for mode, why in peers.absent.items():
            stage.failed[mode] = why
        tamed = bool(stage.decode.cores)
        model = stage.rig.model_name
        results = asyncio.run(_measure(stage, plan, rounds))
        absent = dict(stage.failed)
    settings = {
        "started": started,
        "command": shlex.join(["python", "-m", "e2e.latency", *sys.argv[1:]]),
        "layout": cores.text() if tamed else "a vLLM of its own, which is not pinned",
        "model": model,
        "tamed": tamed,
        "dtype": DTYPE,
        "ucx_tls": f"UCX_TLS={flags.ucx_tls}",
        "block_size": flags.block_size,
        "targets": {"ttft_ms": flags.ttft_target_ms, "itl_ms": flags.itl_target_ms},
    }
    return report.document(
        described, settings, {name: dataclasses.asdict(result) for name, result in results.items()}, absent
    )


def main(arguments: list[str] | None = None) -> int:
    """0 unless it could not run at all: whether what must be shown holds is said in the report."""
    flags = _flags(arguments)
    if flags.list:
        for name, scenario in SCENARIOS.items():
            print(f"{name:14} {scenario.title}: {', '.join(scenario.modes)}")
        for name, mode in MODES.items():
            print(f"{name:14} {mode.title}")
        return 0
    folder = _DOCS if flags.write else flags.output or _ROOT / "build" / "latency"
    return publish("latency", folder, lambda: measure(flags), flags.source, report.plots, report.markdown, _say)


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
