"""What e2e.cluster calls whole, and what it lets pass: a verdict that could not be NO would show nothing."""

from __future__ import annotations

import json

import pytest

from e2e.cluster.load import WHOLE, Outcome, verdict
from e2e.cluster.scene import BUDGET, BUDGET_ONLY, Result, Step, report
from tests.integration.client import Answer

VICTIM, OTHER = "10.77.0.1:8000", "10.77.0.2:8000"


def outcome(what: str, *, pod: str = VICTIM, began: float = 1.0, status: int = 200) -> Outcome:
    return Outcome(began, began + 1, pod, status, what)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (outcome("cut"), True),
        (outcome("503", status=503), True),
        (outcome("cut", pod=OTHER), False),
        (outcome("cut", began=3.0), False),
        (outcome("503", status=503, pod=OTHER), False),
        (outcome("wrong text"), False),
        (outcome("hangs"), False),
        (outcome("500", status=500), False),
    ],
)
def test_a_pod_that_is_killed_takes_its_own_requests_along_and_no_other(one: Outcome, expected: bool) -> None:
    assert Step("", 0.0, allowed="its own", victim=VICTIM, killed_at=2.0).is_allowed(one) is expected


def test_over_budget_is_allowed_only_where_prefill_fails() -> None:
    assert Step("", 0.0, allowed=BUDGET_ONLY).is_allowed(outcome(BUDGET, status=503))
    assert not Step("", 0.0).is_allowed(outcome(BUDGET, status=503))
    assert not Step("", 0.0, allowed=BUDGET_ONLY).is_allowed(outcome("cut"))


def streamed(*texts: str, last: bytes = b"data: [DONE]\n\n") -> Answer:
    events = [b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n" for text in texts]
    return Answer(200, headers=[(b"content-type", b"text/event-stream")], body=b"".join(events) + last)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (streamed("a", "b"), WHOLE),
        (streamed("a"), "wrong text"),
        (streamed("a", "b", last=b""), "wrong text"),
        (streamed("a", last=b'data: {"error": {}}\n\n'), "error event"),
        (Answer(503, body=b'{"error": {"reason": "decode_refused"}}'), "503 decode_refused"),
        (Answer(503, body=b"no healthy upstream"), "503"),
    ],
)
def test_what_an_answer_is(answer: Answer, expected: str) -> None:
    assert verdict(answer, "ab") == expected


def test_the_report_says_no() -> None:
    step = Step("a step", 0.0, 1.0, outcomes=[outcome(WHOLE), outcome("cut")], problems=["1 requests: cut"])
    text = report(Result(2, [step], problems=["an engine is gone"]))
    assert "| **NO** |" in text
    assert "| 1 cut |" in text
    assert "NOT AS IT SHOULD BE: a step: 1 requests: cut" in text
    assert "NOT AS IT SHOULD BE: an engine is gone" in text
