"""By hand, for as long as one likes: `python -m tests.fuzz --seconds 600 --target edge --keep`.

Ends with 1 at the first input that breaks a promise; that goes into the corpus, and the tests replay it for ever.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.fuzz import Fuzzer, keep, kept
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one (repeatable)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="put what reached new lines into tests/fuzz/corpus")
    options = parser.parse_args()
    for name in options.target or TARGETS:
        target, seeds = TARGETS[name]
        fuzzer = Fuzzer(name, target, seeds, random.Random(options.seed))
        finding = fuzzer.replay()
        known = len(fuzzer.corpus)
        finding = finding or fuzzer.run(options.seconds)
        new = fuzzer.corpus[known:]
        print(f"{name}: {fuzzer.tried:,} inputs, {len(fuzzer.reached)} lines reached, {len(new)} inputs are new")
        if finding is not None:
            print(f"{name}: {finding}\nkept as {keep(name, finding.data)}")
            return 1
        if options.keep:
            for data in new:
                keep(name, data)
            print(f"{name}: {len(kept(name))} inputs in the corpus")
    return 0


if __name__ == "__main__":
    sys.exit(main())
