"""What tokenising a prompt once saves, by its length, on real engines: docs/tokenize-once.md.

    python -m e2e.tokenize_once            # measures and prints
    python -m e2e.tokenize_once --write    # and writes docs/tokenize-once.md

Both engines hold the prompts' KV before, so that what is left of a request is what tokenising is a part of. The
two ways take turns, and ratios are taken within a round. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from e2e.asking import CHAT, ask, prompt, request_body
from e2e.engines import HOST
from e2e.rig import Rig
from e2e.rounds import spread, table, turns
from tests.integration.sidecar import Sidecar

LENGTHS = (1_000, 3_000, 10_000, 30_000, 100_000)
"""Characters."""
ROUNDS = 21
MAX_TOKENS = 65_536
ENGINE_FLAGS = [
    "--max-model-len",
    str(MAX_TOKENS),
    "--hf-overrides",
    json.dumps({"max_position_embeddings": MAX_TOKENS}),
]
KV_CACHE_BYTES = 160 << 20
"""For all prompts at once, at 1 KB a token."""
ANSWER_TIMEOUT_S = 300.0
"""Of the first request with a prompt, which computes it."""
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "tokenize-once.md"
WAYS = ("off", "on")


def text_of_length(characters: int) -> str:
    """Words that no other prompt begins with."""
    words = prompt(characters // 3)
    return words[:characters] if len(words) >= characters else words + " work" * ((characters - len(words)) // 5)


class Pair:
    """The same engines behind a sidecar for each way."""

    def __init__(self, rig: Rig, stack: ExitStack) -> None:
        prefill, decode = rig.prefill[0], rig.decode[0]
        self._sidecars = {
            way: self._sidecar(way, prefill.address, decode.port, decode.side_channel_port) for way in WAYS
        }
        for sidecar in self._sidecars.values():
            stack.callback(sidecar.stop)

    @staticmethod
    def _sidecar(way: str, prefill: str, port: int, side_channel_port: int) -> Sidecar:
        return Sidecar(
            *("--disagg", "on", "--prefill", prefill, "--model-server-port", str(port)),
            *("--local-side-channel", f"{HOST}:{side_channel_port}", "--tokenize-once", way),
            *("--prefill-timeout", str(ANSWER_TIMEOUT_S), "--pull-timeout", str(ANSWER_TIMEOUT_S)),
        )

    def request_ms(self, way: str, text: str) -> tuple[float, int]:
        """One request of one token: its time, and the length of its prompt in tokens."""
        body = request_body(CHAT, text, 1)
        began = time.perf_counter()
        answer = ask(self._sidecars[way], CHAT, body, timeout_s=ANSWER_TIMEOUT_S)
        elapsed_ms = (time.perf_counter() - began) * 1000
        assert answer.status == 200, answer.body
        assert answer.decision.startswith("remote"), answer.decision
        return elapsed_ms, answer.json["usage"]["prompt_tokens"]


def measure(pair: Pair, characters: int) -> list[str]:
    """One row: the medians of both ways, and their ratio round by round."""
    text = text_of_length(characters)
    tokens = pair.request_ms("off", text)[1]
    for way in WAYS:
        pair.request_ms(way, text)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for order in turns(list(WAYS), ROUNDS):
        for way in order:
            times[way].append(pair.request_ms(way, text)[0])
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    faster = sum(ratio < 1 for ratio in ratios)
    medians = [spread(times[way]) for way in WAYS]
    cells = [f"{one.median:,.1f}" for one in medians if one]
    return [
        f"{characters:,}",
        f"{tokens:,}",
        *cells,
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
        f"{faster} of {len(ratios)}",
    ]


HEAD = ["characters", "tokens", "off, ms", "on, ms", "on / off (quartiles)", "rounds in which on was faster"]


def report(rows: list[list[str]], load: float) -> str:
    return "\n".join(
        [
            "# What tokenising once saves",
            "",
            "Written by `python -m e2e.tokenize_once --write`: real vLLM engines on CPU, a tiny model with a",
            "vocabulary of 2,048, requests of one token through `--tokenize-once off` and `on`. Both engines",
            "hold the prompts' KV before, so that what is left is what tokenising is a part of.",
            f"{ROUNDS} rounds, both ways in each, in turns; ratios are those of a round: median and quartiles.",
            f"{os.cpu_count()} cores; load of the machine when it began: {load:.1f}.",
            "",
            *table(HEAD, rows),
            "Chats alone. Where it saves nothing it stays on: it rules out that the two engines mean different",
            "prompts by another template. Completions have none, and with their ids in the prompt's place they",
            "were not shown to be faster (0.81 to 0.99 from 1,000 to 100,000 characters, every upper quartile",
            "above 1), so decode gets them as they came. Responses, messages and prompts with media are tokenised",
            "twice: vLLM 0.32 does not tell their ids, or they are not all of the prompt.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="measure what tokenising once saves")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    write = parser.parse_args().write
    rows = []
    load = os.getloadavg()[0]
    with Rig("tiny", extra_flags=ENGINE_FLAGS, kv_cache_bytes=KV_CACHE_BYTES) as rig, ExitStack() as stack:
        pair = Pair(rig, stack)
        for characters in LENGTHS:
            rows.append(measure(pair, characters))
            print(" | ".join(rows[-1]), flush=True)
    text = report(rows, load)
    print(text)
    if write:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
