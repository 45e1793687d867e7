"""The simulated engine answers as real ones did when `tests/engine/recorded.json` was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import ThreadedEngine, contract, harms, loras, record

if TYPE_CHECKING:
    from tests.unit.engine.conftest import Start

# The flags of the real engines that were recorded (e2e/rig.py).
AS_RECORDED = {
    "model": "tiny",
    "block_size": 32,
    "num_blocks": 1024,
    "max_model_len": 8192,
    "tool_parser": False,
    "handshake_timeout_seconds": 5.0,
}


def _lines(section: str, found: dict[str, Any]) -> str:
    lines = record.difference(record.load()[section], record.plain(found))
    return "\n".join(line[:400] for line in lines)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_answers_are_those_of_real_engines(start: Start, policy: str) -> None:
    prefill = start(**AS_RECORDED, kv_load_failure_policy=policy)
    decode = start(**AS_RECORDED, kv_load_failure_policy=policy)
    assert not _lines(policy, contract.contract(prefill.url, decode.url, model="tiny"))


def test_adapters_are_those_of_real_engines(start: Start) -> None:
    engine = start(**AS_RECORDED, loras=["a"], max_loras=2, runtime_loras=True, lora_files=["/adapters/b"])
    assert not _lines("loras", loras.loras(engine.url, "/adapters/b"))


class _Pair:
    def __init__(self, prefill: ThreadedEngine, decode: ThreadedEngine) -> None:
        self._prefill, self._decode = prefill, decode
        self.prefill_url, self.decode_url = prefill.url, decode.url
        self.side_channel_port = prefill.side_channel_port

    def revive(self) -> None:
        self._decode.restart()

    def revive_prefill(self) -> None:
        self._prefill.restart()


def test_what_hangs_and_kills_real_engines_does_so_here(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything six times as fast, on a machine that may have something else to do.
    monkeypatch.setattr(harms, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(harms, "DEATH_SECONDS", 0.2)
    options = {**AS_RECORDED, "handshake_timeout_seconds": 0.8, "death_seconds": 0.01}
    pair = _Pair(start(**options), start(**options))
    assert not _lines("hazards", harms.hazards(pair))


def test_requests_that_an_engine_takes_along_end_as_with_real_ones(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harms, "DEATH_AFTER_SECONDS", 0.2)
    decode = start(**AS_RECORDED, seconds_per_token=0.05)
    assert not _lines("deaths", harms.deaths(_Pair(decode, decode)))


def test_what_frees_blocks_of_real_prefill_engines_does_so_here(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harms, "RELEASE_SECONDS", 0.4)
    pair = _Pair(start(**AS_RECORDED), start(**AS_RECORDED, seconds_per_token=0.002))
    assert not _lines("releases", harms.releases(pair))
