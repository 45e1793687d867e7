"""Where the sidecar spends its time in one case, so that it is made faster by measurement.

py-spy: samples by line, from outside; C code counts for the line that called it (little slowdown).
cprofile: every call counted, from inside (slows Python code far more than C code: read counts, not shares).
perf: the kernel's and the C libraries' share, where `perf` is installed.
It must not know what is measured otherwise.
"""

from __future__ import annotations

import collections
import dataclasses
import pstats
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.bench.measure import Bench, Pace
from e2e.bench.proxies import SPECS, Place, Proxy, Spec

if TYPE_CHECKING:
    from e2e.bench.cases import Case
    from e2e.bench.install import Peers
    from e2e.bench.rig import Sample

_TOP = 60
_LINE = re.compile(r":\d+\)$")


def _load(bench: Bench, case: Case, proxy: Proxy, seconds: float) -> Sample:
    run = bench.stream if case.kind == "stream" else bench.closed
    return run(case, proxy, Pace(1, 0.5, seconds))


def _told(sample: Sample) -> str:
    work = sample.chunks or sample.requests
    unit = "chunk" if sample.chunks else "request"
    return f"{work} {unit}s, {sample.proxy_cpu_s / max(1, work) * 1e6:.1f} µs of CPU each while profiled"


def _py_spy(bench: Bench, case: Case, binary: Path, proxy: Proxy, seconds: float) -> None:
    folded = proxy.place.folder / "folded.txt"
    command = [str(binary), "record", "--rate", "500", "--format", "raw"]
    sampler = subprocess.Popen(
        [*command, "--duration", str(int(seconds)), "--output", str(folded), "--pid", str(proxy.pid)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(0.5)  # it stops the process for a moment while it reads symbols
    sample = _load(bench, case, proxy, seconds + 1)
    _, errors = sampler.communicate(timeout=60)
    if not folded.exists():
        print(f"py-spy brought nothing: {errors.strip()[-400:]}")
        return
    line_own: collections.Counter[str] = collections.Counter()
    function_own: collections.Counter[str] = collections.Counter()
    function_all: collections.Counter[str] = collections.Counter()
    total = 0
    for line in folded.read_text().splitlines():
        stack, _, count_text = line.rpartition(" ")
        count, frames = int(count_text), stack.split(";")
        total += count
        line_own[frames[-1]] += count
        function_own[_LINE.sub(")", frames[-1])] += count
        for function in {_LINE.sub(")", frame) for frame in frames}:
            function_all[function] += count
    print(f"\n{_told(sample)}; {total} samples\n")
    for title, counter in (
        ("Functions by their own time, C code called from them included", function_own),
        ("Lines by their own time", line_own),
        ("Functions with all below them", function_all),
    ):
        print(f"## {title}")
        for frame, count in counter.most_common(_TOP):
            print(f"{count / total:6.1%}  {frame}")
        print()


def _cprofile(bench: Bench, case: Case, spec: Spec, seconds: float) -> None:
    def command(place: Place, binary: Path) -> list[str]:
        python, *rest = spec.command(place, binary)
        return [python, "-m", "cProfile", "-o", str(place.folder / "profile"), *rest]

    proxy = bench.start(dataclasses.replace(spec, command=command))
    try:
        sample = _load(bench, case, proxy, seconds)
        proxy.end_gently()  # the statistics are written at the end
        path = proxy.place.folder / "profile"
        print(f"\n{_told(sample)}\n")
        if path.exists():
            pstats.Stats(str(path), stream=sys.stdout).sort_stats("tottime").print_stats(_TOP)
        else:
            print(f"no statistics were written: {proxy.log_end()}")
    finally:
        proxy.close()


def _perf(bench: Bench, case: Case, proxy: Proxy, seconds: float) -> None:
    perf = shutil.which("perf")
    if perf is None:
        print("perf is not installed (Debian: linux-perf)")
        return
    data = proxy.place.folder / "perf.data"
    done: list[Sample] = []
    loader = threading.Thread(target=lambda: done.append(_load(bench, case, proxy, seconds + 2)))
    loader.start()
    time.sleep(1)
    subprocess.run(
        [perf, "record", "-q", "-p", str(proxy.pid), "-o", data, "--", "sleep", str(seconds)],
        check=False,
        capture_output=True,
    )
    loader.join()
    print(f"\n{_told(done[0])}\n")
    for keys in ("dso", "symbol"):
        told = subprocess.run(
            [perf, "report", "-i", data, "--stdio", "--sort", keys, "-g", "none"],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in told.stdout.splitlines() if line.strip() and not line.startswith("#")]
        print("\n".join(lines[:_TOP]), "\n")


def profile(bench: Bench, case: Case, tool: str, peers: Peers, name: str, seconds: float) -> int:
    """Run `case` against one proxy under `tool` and print where the time went."""
    spec = SPECS[name]
    if tool == "py-spy" and "py-spy" not in peers.binaries:
        print(f"py-spy is not available: {peers.absent['py-spy']}")
        return 1
    if tool == "cprofile":
        _cprofile(bench, case, spec, seconds)
        return 0
    proxy = bench.start(spec)
    try:
        if tool == "py-spy":
            _py_spy(bench, case, peers.binaries["py-spy"], proxy, seconds)
        else:
            _perf(bench, case, proxy, seconds)
    finally:
        proxy.close()
    return 0
