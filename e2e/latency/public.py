"""A load that is not ours: vLLM's own generator (`vllm bench serve`), in the engines' Python, where it comes locked
with vLLM. Of the public ones it is the one that needs nothing more: guidellm brings a CUDA build of torch, and
inference-perf a newer Python.

What it reports of each request becomes a record like our own driver's. It must not know by which way requests go.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import uuid
from itertools import accumulate
from pathlib import Path
from typing import Any

from e2e.engines import CPU_ENGINE_ENV, OWN_SETTINGS, QUIET_ENV
from e2e.latency.driver import LoadError, Record, Run
from e2e.models import model_path

PROMPTS = 14
INPUT_TOKENS, INPUT_SPREAD = 900, 0.85
"""Lengths are drawn from 135 to 1,665 tokens."""
OUTPUT_TOKENS = 32
REQUESTS_PER_SECOND = 1.0
TIMEOUT_S = 300.0
# The `vllm` command needs vLLM's own distribution, which is not the one that has builds for CPU.
_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def run(base_url: str, model: str, python: Path, core: int, seed: int) -> Run:
    """One run against `base_url` from `core`; the same prompts for the same `seed`, and no engine knows them.
    LoadError with the end of the generator's output if it fails."""
    salt = uuid.uuid4().hex
    prefix = f"{salt}-"
    path = str(model_path(model, python))
    with tempfile.TemporaryDirectory(prefix="pd-latency-") as folder:
        flags = {
            "--backend": "openai",
            "--endpoint": "/v1/completions",
            "--base-url": base_url,
            "--model": path,
            "--served-model-name": Path(model).name,
            "--dataset-name": "random",
            "--random-input-len": INPUT_TOKENS,
            "--random-output-len": OUTPUT_TOKENS,
            "--random-range-ratio": json.dumps({"input": INPUT_SPREAD, "output": 0.0}),
            "--num-prompts": PROMPTS,
            "--request-rate": REQUESTS_PER_SECOND,
            "--seed": seed,
            "--extra-body": json.dumps({"cache_salt": salt}),
            "--temperature": 0,
            "--request-id-prefix": prefix,
            "--num-warmups": 0,
            "--ready-check-timeout-sec": 0,
            "--result-dir": folder,
            "--result-filename": "result.json",
        }
        words = [str(word) for pair in flags.items() for word in pair]
        env = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-c", _PROGRAM, *words, "--save-result", "--save-detailed", "--disable-tqdm"),
            env=env | CPU_ENGINE_ENV | QUIET_ENV,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            tail = output.decode(errors="replace").splitlines()[-10:]
            raise LoadError(f"load: vllm bench serve against {base_url} ended with {process.returncode}: {tail}")
        return read(json.loads((Path(folder) / "result.json").read_text()), prefix)


def read(result: dict[str, Any], prefix: str) -> Run:
    """Its detailed result (vllm/benchmarks/serve.py of 0.32) as records."""
    first = min(result["start_times"])
    records = []
    for number, began in enumerate(result["start_times"]):
        began_s = began - first
        record = Record("request", f"{prefix}{number}", began_s, prompt_tokens=result["input_lens"][number])
        if error := result["errors"][number]:
            record.error = error.strip().splitlines()[-1][:300]
        else:
            record.status = 200
            record.token_s = list(accumulate(result["itls"][number], initial=began_s + result["ttfts"][number]))
        record.ended_s = record.token_s[-1] if record.token_s else began_s
        records.append(record)
    return Run(records, max(record.ended_s for record in records))
