"""`make decide` from end to end, once and small: what is exact about it. No number is judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from e2e.decide.__main__ import main
from e2e.decide.trace import DOCUMENT, KINDS, LATER_TURN

if TYPE_CHECKING:
    from pathlib import Path


def test_one_round_by_auto_and_by_a_rule(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--mode", "auto", "--mode", "dynamo-rule", "--rounds", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "decide.json").read_text())["result"]
    assert not result["failed"]
    [samples] = result["rounds"]
    for mode in ("auto", "dynamo-rule"):
        sample = samples[mode]
        assert sample["trouble"] == ""
        requests = sample["requests"]
        assert {request["kind"] for request in requests} == set(KINDS)
        documents = [request for request in requests if request["kind"] == DOCUMENT]
        assert {request["decision"].partition(";")[0] for request in documents} <= {"remote", "local"}
        assert sum(request["prompt_tokens"] for request in requests) == sum(sample["decode_tokens"].values())
        assert sample["decode_tokens"]["local_cache_hit"] > 0
        later = [request for request in requests if request["kind"] == LATER_TURN]
        assert any(request["decision"].startswith("local") for request in later)
    inputs = [request["inputs"] for request in samples["auto"]["requests"] if "inputs" in request]
    assert any(one["cached"] for one in inputs)
    assert {one["decision"].partition(";")[0] for one in samples["dynamo-rule"]["requests"]} == {"local", "remote"}
    assert "auto ÷ always remote" in (tmp_path / "decide.md").read_text()
    assert (tmp_path / "ttft.svg").exists()
