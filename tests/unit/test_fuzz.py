"""Every target replays its corpus and is fuzzed: all of them for FUZZ_SECONDS (3 by default, 60 in `make test`)."""

from __future__ import annotations

import os
import random

import pytest

from tests.fuzz.fuzz import Fuzzer
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "3")) / len(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_promises_are_kept(name: str) -> None:
    target, seeds = TARGETS[name]
    fuzzer = Fuzzer(name, target, seeds, random.Random(os.environ.get("FUZZ_SEED", "1")))
    finding = fuzzer.replay() or fuzzer.run(SECONDS)
    assert finding is None, str(finding)
    assert len(fuzzer.reached) > 10


def test_the_fuzzer_finds_what_is_wrong() -> None:
    """A promise that is broken two bends away from the seed."""

    def target(data: bytes) -> None:
        assert not (data[:1] == b"{" and b"kv_transfer_params" in data), "found"

    fuzzer = Fuzzer("none", target, [b"{}"], random.Random(1))
    assert fuzzer.replay() is None
    found = fuzzer.run(30)
    assert found is not None
    assert b"kv_transfer_params" in found.data
