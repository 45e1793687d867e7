"""`python -m e2e.cluster`: a rolling restart in network namespaces, or faults of the network, and the verdict."""

from __future__ import annotations

import argparse
import sys

from e2e.cluster import faults, network, rollout
from e2e.cluster.scene import NoEnvoy, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="streams at a time (default: %(default)d)")
    parser.add_argument("--faults", action="store_true", help="of the network, in place of the rolling restart")
    options = parser.parse_args()
    if why_not := network.why_not() or (options.faults and faults.why_not()):
        sys.exit(why_not)
    play = faults.run if options.faults else rollout.run
    try:
        result = play(options.clients, lambda text: print(text, file=sys.stderr, flush=True))
    except NoEnvoy as reason:
        sys.exit(str(reason))
    print(report(result))
    return int(bool(result.all_problems))


if __name__ == "__main__":
    sys.exit(main())
