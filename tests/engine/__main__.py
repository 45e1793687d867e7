"""Simulated engines as a process of their own: `python -m tests.engine --prefill 8100 --decode 8200`.

Prints one JSON line with the addresses when all of them listen, and ends on SIGINT or SIGTERM. All engines share
the process, so that decode engines can reach the KV of the prefill engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal

import uvloop

from tests.engine import Engine


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engine", description=__doc__)
    parser.add_argument("--prefill", type=int, action="append", default=[], metavar="PORT", help="0: any port")
    parser.add_argument("--decode", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=65536)
    parser.add_argument("--max-model-len", type=int, default=1_048_576)
    parser.add_argument("--lease-seconds", type=float, default=30.0)
    parser.add_argument("--load-failure-policy", choices=["fail", "recompute"], default="fail")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--prefill-seconds-per-1k-tokens", type=float, default=0.0)
    parser.add_argument("--no-tool-parser", action="store_true")
    return parser.parse_args()


async def _run(options: argparse.Namespace) -> None:
    engines: list[tuple[str, Engine]] = []
    for role in ("prefill", "decode"):
        for port in getattr(options, role):
            engine = Engine(
                model=options.model,
                host=options.host,
                port=port,
                block_size=options.block_size,
                num_blocks=options.num_blocks,
                max_model_len=options.max_model_len,
                kv_lease_seconds=options.lease_seconds,
                kv_load_failure_policy=options.load_failure_policy,
                seconds_per_token=options.seconds_per_token,
                prefill_seconds_per_1k_tokens=options.prefill_seconds_per_1k_tokens,
                tool_parser=not options.no_tool_parser,
            )
            await engine.start()
            engines.append((role, engine))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    lines = [
        {"role": role, "url": engine.url, "side_channel_port": engine.side_channel_port} for role, engine in engines
    ]
    print(json.dumps(lines), flush=True)
    await stop.wait()
    for _, engine in engines:
        await engine.stop()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_run(_options()))
