"""`make bench`: what to measure, from flags; where the results go. It must not know how anything is measured."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e import machine
from e2e.bench import report
from e2e.bench.cases import CASES, TARGETS
from e2e.bench.install import cache_folder, install, versions
from e2e.bench.measure import Bench, Pace, Result, run_case
from e2e.bench.plots import all_plots
from e2e.bench.profiling import profile
from e2e.bench.proxies import SPECS, add_baseline, use_python
from e2e.bench.rig import RigError
from e2e.ending import end_what_was_started

_DOCS = Path(__file__).parents[2] / "docs" / "bench"
_QUICK = Pace(rounds=3, warm_s=0.2, window_s=0.8, memory_rounds=1)
_FULL = Pace(rounds=5, warm_s=0.3, window_s=2.0)
_QUICK_PROXIES = ("sidecar", "vllm-router", "smg", "nginx", "envoy")


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about two minutes: fewer cases, shorter rounds")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case (repeatable)")
    parser.add_argument("--proxy", action="append", choices=list(SPECS), help="only this proxy (repeatable)")
    parser.add_argument(
        "--baseline", metavar="REVISION|FOLDER", help="also measure the sidecar of another revision, as `baseline`"
    )
    parser.add_argument("--python", metavar="PATH", help="interpreter of the sidecar: a venv's, or of this version")
    parser.add_argument("--rounds", type=int, help="alternating rounds of each case")
    parser.add_argument("--seconds", type=float, help="length of one measured window")
    parser.add_argument("--nice", type=int, default=0, help="niceness of proxies and rig; below 0 needs root")
    parser.add_argument("--json", type=Path, help="where to write the samples (default: the cache)")
    parser.add_argument(
        "--write", action="store_true", help=f"write the results into {_DOCS.relative_to(_DOCS.parents[1])}/"
    )
    parser.add_argument("--list", action="store_true", help="list cases and proxies")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="py-spy",
        choices=("py-spy", "cprofile", "perf"),
        help="instead of measuring, show where the sidecar spends the time of --case (default body-1k)",
    )
    return parser.parse_args(arguments)


def _cores() -> tuple[int, int]:
    """Core of the proxy, core of the rig. On one core both share it, and the report's remarks will show it."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1], cores[0]


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _baseline(where: str | None) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="pd-sidecar-baseline-") as folder:
        if where:
            add_baseline(where, Path(folder))
        yield


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0 unless it could not run at all."""
    flags = _flags(arguments)
    if flags.list:
        for case in CASES.values():
            print(f"{case.name:20} {case.title}{' (quick)' if case.quick else ''}")
        for spec in SPECS.values():
            print(f"{spec.name:20} {spec.remark}")
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))  # 2,000 streams are 6,000 sockets

    pace = _QUICK if flags.quick else _FULL
    pace = dataclasses.replace(pace, rounds=flags.rounds or pace.rounds, window_s=flags.seconds or pace.window_s)
    proxy_core, rig_core = _cores()
    names = flags.proxy or list(_QUICK_PROXIES if flags.quick else SPECS)
    if flags.python:
        use_python(flags.python)
    cases = [
        case
        for case in CASES.values()
        if (case.name in flags.case if flags.case else case.quick or not flags.quick)
    ]
    wanted = ["py-spy"] if flags.profile == "py-spy" else []
    if not flags.profile:
        wanted = [peer for name in names if (peer := SPECS[name].peer)]
    peers = install(wanted)
    absent = {name: peers.absent[peer] for name in names if (peer := SPECS[name].peer) in peers.absent}
    names = [name for name in names if name not in absent]
    try:
        with (
            _baseline(flags.baseline),
            Bench(cache_folder(), proxy_core, rig_core, peers.binaries, flags.nice) as bench,
        ):
            if flags.profile:
                case = CASES[flags.case[0]] if flags.case else CASES["body-1k"]
                return profile(
                    bench, case, flags.profile, peers, (flags.proxy or ["sidecar"])[0], flags.seconds or 5
                )
            described = machine.describe(versions(peers), flags.python or sys.executable)
            described |= {"proxy_core": proxy_core, "rig_core": rig_core}
            started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            names = bench.start_all([*names, "baseline"] if flags.baseline else names)
            absent |= bench.failed
            for name, reason in absent.items():
                _say(f"{name} is not measured: {reason}")
            results: dict[str, Result] = {}
            for case in cases:
                results[case.name] = run_case(bench, case, names, pace, _say)
    except (RigError, ValueError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:  # everything that was started has been ended on the way here
        return 130

    settings: dict[str, Any] = {
        "started": started,
        "mode": "quick" if flags.quick else "full",
        "rounds": pace.rounds,
        "warm_s": pace.warm_s,
        "window_s": pace.window_s,
        "niceness": flags.nice,
        "proxies": names,
    }
    document = {
        "machine": described,
        "settings": settings,
        "absent": absent,
        "targets": [report.judge(target, results) for target in TARGETS],
        "cases": {name: result.as_json() for name, result in results.items()},
    }
    text = report.markdown(described, settings, results, absent)
    print(text)
    paths = [flags.json or cache_folder() / "results.json"]
    if flags.write:
        _DOCS.mkdir(parents=True, exist_ok=True)
        drawn = all_plots(results, names)
        for file, svg in drawn.items():
            (_DOCS / file).write_text(svg)
        (_DOCS / "results.md").write_text("\n".join([text, *(f"![]({file})" for file in drawn), ""]))
        paths.append(_DOCS / "results.json")
    for path in paths:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        _say(f"samples in {path}")
    return 0


if __name__ == "__main__":
    end_what_was_started()
    sys.exit(main())
