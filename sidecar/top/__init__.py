"""`pd-sidecar top`: one sidecar live in a terminal, from its admin port alone.

Runs in a process of its own; only that process imports the rest of this room.
"""

import argparse

DEFAULT_URL = "http://127.0.0.1:9090"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the sidecar's admin port (default: {DEFAULT_URL})")
    parser.add_argument(
        "--token-file", default="", help="file with its key (--admin-token-file), for another pod's"
    )
    parser.add_argument("--once", action="store_true", help="print one frame, of the time since its start, and end")
