"""A process that may open no more descriptors. Standard library only."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_descriptors(pid: int = 0) -> Iterator[int]:
    """Every number below its limit is taken, until one of them is closed; the limit is what it yields. 0: this
    process."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    names = list(Path(f"/proc/{pid or 'self'}/fd").iterdir())
    taken = {int(one.name) for one in names if one.is_symlink()}  # not the one with which that was read
    limit = min(set(range(len(taken) + 1)) - taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
