"""Real engines still answer as recorded in tests/engine/recorded.json, which the simulated engine is held against.

`python -m e2e.test_contract` records anew: after a step to another vLLM, say. Then the simulation's own tests show
what has to change there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest

from e2e.adapters import make_adapter
from e2e.install import engine_python
from e2e.models import model_path
from e2e.rig import Rig
from tests.engine import contract, harms, loras, record

Policy = Literal["recompute", "fail"]


class _Pair:
    """The engines of a rig, as the script wants them."""

    prefill_url = ""
    side_channel_port = 0

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._look()

    def _look(self) -> None:
        self.decode_url = self._rig.decode[0].url
        if self._rig.prefill:
            self.prefill_url = self._rig.prefill[0].url
            self.side_channel_port = self._rig.prefill[0].side_channel_port

    def revive(self) -> None:
        self._rig.decode[0].restart()
        self._look()

    def revive_prefill(self) -> None:
        self._rig.prefill[0].restart()
        self._look()


def _contract(policy: Policy) -> dict[str, Any]:
    with Rig("tiny", prefill=1, decode=1, load_failure_policy=policy) as rig:
        pair = _Pair(rig)
        return contract.contract(pair.prefill_url, pair.decode_url, model=rig.model_name)


def _hazards(*, thorough: bool) -> dict[str, Any]:
    with Rig("tiny", prefill=1, decode=1) as rig:
        return harms.hazards(_Pair(rig), thorough=thorough)


def _deaths() -> dict[str, Any]:
    with Rig("tiny", prefill=0, decode=1) as rig:
        return harms.deaths(_Pair(rig))


def _releases() -> dict[str, Any]:
    # Leases that outlast the test: what is freed in it was freed by what the test did.
    with Rig("tiny", prefill=1, decode=1, lease_seconds=600) as rig:
        return harms.releases(_Pair(rig))


def _loras() -> dict[str, Any]:
    model = model_path("tiny", engine_python())
    with tempfile.TemporaryDirectory() as folder:
        a, b = (make_adapter(Path(folder) / name, model, seed) for seed, name in enumerate("ab"))
        flags = "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"a={a}"
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        with Rig("tiny", prefill=0, decode=1, extra_flags=flags, extra_env=environment) as rig:
            return loras.loras(rig.decode[0].url, str(b))


def _assert_as_recorded(section: str, found: dict[str, Any]) -> None:
    recorded = {name: kept for name, kept in record.load()[section].items() if name in found}
    lines = record.difference(recorded, record.plain(found))
    assert not lines, "recorded against found:\n" + "\n".join(line[:400] for line in lines)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_real_engines_answer_as_recorded(policy: Policy) -> None:
    _assert_as_recorded(policy, _contract(policy))


def test_real_engines_hang_and_die_as_recorded() -> None:
    # Each death costs a start; those that are alike are only recorded.
    _assert_as_recorded("hazards", _hazards(thorough=False))


def test_requests_that_a_real_engine_takes_along_end_as_recorded() -> None:
    _assert_as_recorded("deaths", _deaths())


def test_real_prefill_engines_free_blocks_as_recorded() -> None:
    _assert_as_recorded("releases", _releases())


def test_adapters_of_real_engines_are_as_recorded() -> None:
    _assert_as_recorded("loras", _loras())


if __name__ == "__main__":
    record.save(
        {
            "recompute": _contract("recompute"),
            "fail": _contract("fail"),
            "hazards": _hazards(thorough=True),
            "deaths": _deaths(),
            "releases": _releases(),
            "loras": _loras(),
        }
    )
