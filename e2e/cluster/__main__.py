"""`python -m e2e.cluster`: a rolling restart in network namespaces, with a verdict on each step."""

from __future__ import annotations

import argparse
import sys

from e2e.cluster import network, rollout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=rollout.__doc__)
    parser.add_argument("--clients", type=int, default=200, help="streams at a time (default: %(default)d)")
    options = parser.parse_args()
    if why_not := network.why_not():
        sys.exit(why_not)
    try:
        result = rollout.run(options.clients, lambda text: print(text, file=sys.stderr, flush=True))
    except rollout.NoEnvoy as reason:
        sys.exit(str(reason))
    print(rollout.report(result))
    return int(bool(result.all_problems))


if __name__ == "__main__":
    sys.exit(main())
