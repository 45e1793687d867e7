"""What the process asks of its kernel and its C library at the start. Knows nothing of requests."""

import contextlib
import ctypes
import resource

M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def raise_descriptor_limit() -> None:
    """Every stream needs two descriptors; the soft limit of a container is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_large_blocks_back() -> None:
    """For TLS, of which uvloop keeps 256 KiB for each connection. glibc would soon serve them from the heap
    (mallopt(3): its threshold for blocks of their own grows), where they leave holes: 84 MiB and rising after
    12,000 requests of a storm, in place of 57."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 131072)
