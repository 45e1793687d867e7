"""Requests that name a LoRA adapter: where they are prefilled, and what an adapter that only one side has costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine import ThreadedEngine
from tests.integration.apis import APIS
from tests.integration.client import Answer, Client
from tests.integration.sidecar import Sidecar, completion, eventually

PATH = "/v1/completions"
TOLD_WITHIN_S = 8.0
"""The sidecar looks once a second whose turn it is: first the decode engine's, then the endpoints'."""

Started = Callable[..., tuple[Sidecar, ThreadedEngine, list[ThreadedEngine]]]


@pytest.fixture
def started() -> Iterator[Started]:
    """`started(options of the decode engine, options of each prefill engine)`: a sidecar that knows what they
    serve."""
    with ExitStack() as stack:

        def start(
            own: dict[str, Any],
            *there: dict[str, Any],
            flags: tuple[str, ...] = (),
            before: Callable[[list[ThreadedEngine]], None] = lambda _engines: None,
        ) -> tuple[Sidecar, ThreadedEngine, list[ThreadedEngine]]:
            prefill = [stack.enter_context(ThreadedEngine(**options)) for options in there]
            decode = stack.enter_context(ThreadedEngine(**own))
            before(prefill)
            sidecar = Sidecar(
                *("--model-server-port", str(decode.port), "--disagg", "on", *flags),
                *(flag for engine in prefill for flag in ("--prefill", engine.address)),
            )
            stack.callback(sidecar.stop)
            if all(engine.engine.api_key is None for engine in prefill):
                eventually(lambda: _told(sidecar) == len(prefill), TOLD_WITHIN_S)
            return sidecar, decode, prefill

        yield start


def _told(sidecar: Sidecar) -> int:
    """How many endpoints have told what they serve."""
    return sidecar.admin("GET", "/endpoints")[1].count('"adapters"')


def posted(engine: ThreadedEngine) -> list[dict[str, Any]]:
    return [json.loads(one.body) for one in list(engine.requests) if one.method == "POST"]


def ask(sidecar: Sidecar, model: str, path: str = PATH, **headers: str) -> Answer:
    return sidecar.ask("POST", path, APIS[path](model=model), [*headers.items()])


def reason(answer: Answer) -> str:
    return answer.decision.partition("; ")[2]


@pytest.mark.parametrize("path", APIS)
def test_the_name_passes_to_both_legs(started: Started, path: str) -> None:
    sidecar, decode, (prefill,) = started({"loras": ["french"]}, {"loras": ["french"]})
    answer = ask(sidecar, "french", path)
    assert answer.status == 200
    assert answer.decision == f"remote; prefill={prefill.address}"
    assert [body["model"] for body in (*posted(prefill), *posted(decode))] == ["french", "french"]


def test_only_endpoints_that_have_the_adapter(started: Started) -> None:
    sidecar, _, (with_it, without) = started({"loras": ["french"]}, {"loras": ["french"]}, {"loras": ["german"]})
    for _ in range(10):
        answer = ask(sidecar, "french")
        assert (answer.status, answer.decision) == (200, f"remote; prefill={with_it.address}")
    assert not posted(without)
    seen = {ask(sidecar, "sim").decision for _ in range(20)}
    assert seen == {f"remote; prefill={one.address}" for one in (with_it, without)}


@pytest.mark.parametrize("by_header", [False, True])
def test_an_adapter_that_only_decode_has(started: Started, by_header: bool) -> None:
    """Before there was 404 from prefill for what the decode engine can answer. Now: computed here, and said."""
    sidecar, _, (prefill,) = started({"loras": ["french", "dutch"]}, {"loras": ["dutch"]})
    headers = {"x-prefiller-host-port": prefill.address} if by_header else {}
    for _ in range(3):
        answer = ask(sidecar, "french", **headers)
        assert (answer.status, reason(answer)) == (200, "reason=model")
    assert not posted(prefill)
    line = "adapter 'french' is on the decode engine and on none of the prefill endpoints: load it there too"
    assert sidecar.log.count(line) == 1
    assert sidecar.metrics()("requests_total", decision="local", reason="model") == 3
    assert "french" not in sidecar.metrics().text
    assert ask(sidecar, "dutch", **headers).decision.startswith("remote")


@pytest.mark.parametrize("by_header", [False, True])
def test_an_adapter_that_only_prefill_has(started: Started, by_header: bool) -> None:
    """The decode engine's 404 before any work, and no client's word in the log."""
    sidecar, decode, (prefill,) = started({"loras": []}, {"loras": ["french"]})
    answer = ask(sidecar, "french", **({"x-prefiller-host-port": prefill.address} if by_header else {}))
    assert (answer.status, reason(answer)) == (404, "reason=model")
    assert b"does not exist" in answer.body
    assert not posted(prefill)
    assert len(posted(decode)) == 1
    assert "an adapter that prefill endpoints have is not on the decode engine" in sidecar.log
    assert "french" not in sidecar.log


def test_an_endpoint_that_can_load_by_name(started: Started) -> None:
    """It lists no adapter, and is used for one: it may be able to load it, and is."""
    sidecar, _, (prefill,) = started({"loras": ["french"]}, {"runtime_loras": True, "resolvable_loras": ["french"]})
    answer = ask(sidecar, "french")
    assert (answer.status, answer.decision) == (200, f"remote; prefill={prefill.address}")


def test_an_endpoint_that_could_not_load_it_after_all(started: Started) -> None:
    """Its 404 is no mistake of the client's, who gets its answer; and the next one does not ask in vain again."""
    sidecar, _, (prefill,) = started({"loras": ["french"]}, {"runtime_loras": True})
    answer = ask(sidecar, "french")
    assert (answer.status, answer.decision) == (200, "local; reason=model")
    assert len(posted(prefill)) == 1
    for _ in range(3):
        answer = ask(sidecar, "french")
        assert (answer.status, reason(answer)) == (200, "reason=model")
    assert len(posted(prefill)) == 1
    assert sidecar.metrics()("prefill_attempts_total", outcome="no_adapter") == 1
    assert sidecar.metrics()("fallbacks_total") == 0
    assert ask(sidecar, "sim").decision.startswith("remote")


def test_an_adapter_that_was_unloaded_a_moment_ago(started: Started) -> None:
    """The other endpoint has it still."""
    both = {"loras": ["french"]}
    sidecar, _, (first, second) = started(both, both, both)
    first.engine.adapters.loaded.clear()
    for _ in range(20):
        answer = ask(sidecar, "french")
        assert (answer.status, answer.decision) == (200, f"remote; prefill={second.address}")
    assert len(posted(first)) <= 1
    unknown = ask(sidecar, "nobodys")
    assert unknown.status == 404


def test_engines_that_want_a_key_are_as_ever(started: Started) -> None:
    """What has not told counts as having it."""
    sidecar, _, (prefill,) = started({"loras": ["french"]}, {"loras": ["french"], "api_key": "secret"})
    answer = sidecar.ask("POST", PATH, completion(model="french"), [("Authorization", "Bearer secret")])
    assert (answer.status, answer.decision) == (200, f"remote; prefill={prefill.address}")


def test_an_adapter_is_loaded_and_unloaded_through_the_sidecar(started: Started) -> None:
    """The local engine gets the call as it came, and within two seconds it is known what that changed."""
    options = {"runtime_loras": True, "lora_files": ["/adapters/french"]}
    sidecar, decode, (prefill,) = started(options, {"loras": ["german"]})
    assert ask(sidecar, "french").status == 404
    loaded = sidecar.ask("POST", "/v1/load_lora_adapter", {"lora_name": "french", "lora_path": "/adapters/french"})
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'french' added successfully.")
    assert posted(decode)[-1] == {"lora_name": "french", "lora_path": "/adapters/french"}
    answer = ask(sidecar, "french")  # not yet known, and yet
    assert (answer.status, reason(answer)) == (200, "reason=model")
    eventually(lambda: ask(sidecar, "french") and "adapter 'french' is on the decode engine" in sidecar.log, 3.0)
    unloaded = sidecar.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "french"})
    assert unloaded.status == 200
    eventually(lambda: ask(sidecar, "french").status == 404, 3.0)
    assert not [body for body in posted(prefill) if "lora_name" in body], "not the sidecar's to spread"


def test_what_an_engine_cannot_do_is_its_own_answer(started: Started) -> None:
    sidecar, decode, _ = started({"loras": ["french"]}, {"loras": ["french"]})
    answer = sidecar.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})
    assert answer.status == 404
    assert len(posted(decode)) == 1


def test_an_adapter_goes_where_it_has_a_slot(started: Started) -> None:
    """Two engines with one slot each, two adapters that both have: neither is pushed out of its slot."""
    both = {"loras": ["french", "german"], "max_loras": 1}

    def fill_slots(engines: list[ThreadedEngine]) -> None:
        for engine, model in zip(engines, ("french", "german"), strict=True):
            with Client(("127.0.0.1", engine.port)) as client:
                client.request("POST", PATH, completion(model=model))
                assert client.answer("POST").status == 200

    sidecar, _, engines = started(both, both, both, before=fill_slots)
    eventually(lambda: all(any(one.path == "/metrics/" for one in list(engine.requests)) for engine in engines))
    for _ in range(10):
        for engine, model in zip(engines, ("french", "german"), strict=True):
            assert ask(sidecar, model).decision == f"remote; prefill={engine.address}"


def test_workers_know_what_the_hub_has_heard(started: Started) -> None:
    """Each request is on a connection of its own, so all of them get some."""
    own = {"loras": ["french", "german"], "runtime_loras": True, "lora_files": ["/adapters/dutch"]}
    sidecar, _, (prefill,) = started(own, {"loras": ["french"]}, flags=("--workers", "2"))

    def seen(model: str) -> set[tuple[int, str]]:
        answers = [ask(sidecar, model) for _ in range(16)]
        return {(answer.status, answer.decision) for answer in answers}

    remote, local = (200, f"remote; prefill={prefill.address}"), (200, "local; reason=model")
    eventually(lambda: seen("german") == {local})
    before = len(posted(prefill))
    assert seen("german") == {local}
    assert seen("french") == {remote}
    assert len(posted(prefill)) == before + 16
    load = {"lora_name": "dutch", "lora_path": "/adapters/dutch"}
    assert sidecar.ask("POST", "/v1/load_lora_adapter", load).status == 200
    assert seen("dutch") == {local}, "whoever the call went through"
    before = len(posted(prefill))
    assert seen("dutch") == {local}
    assert len(posted(prefill)) <= before + 2, "each worker asks once, or has been told"
