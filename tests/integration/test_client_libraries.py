"""What the official client libraries raise: the type that the status stands for, with the message that says why.

An answer of an engine's, one of the sidecar's own, and a stream that breaks off must all reach the user as the
library's own exceptions. (What they make of good answers is shown on real engines, e2e/test_client_libraries.py.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.engine import Fault
from tests.integration.sidecar import MAX_BODY_BYTES, Rig, prompt, quick
from tests.libraries import ANTHROPIC, LIBRARIES, OPENAI, Library
from tests.ports import free_ports

TOLD = "the engine's own words"
REFUSALS = {
    OPENAI: {"error": {"message": TOLD, "type": "Some", "param": None, "code": 1}},
    ANTHROPIC: {"type": "error", "error": {"type": "some_error", "message": TOLD}},
}
"""An engine's error as each API has it."""
every_library = pytest.mark.parametrize("library", LIBRARIES, ids=str)


def client_of(library: Library, rig: Rig) -> Any:
    return library.client(rig.sidecar.port, {"x-prefiller-host-port": rig.target})


STATUSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}


def raised(call: Callable[[], Any]) -> Any:
    with pytest.raises((openai.APIError, anthropic.APIError)) as error:
        call()
    return error.value


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("status", STATUSES)
@every_library
def test_what_an_engine_refuses(rigged: Callable[..., Rig], library: Library, status: int, streamed: bool) -> None:
    """Said by decode, as a local request shows it: the sidecar adds and takes nothing."""
    rig = rigged(*quick())
    rig.target = ""
    fault = Fault(
        status=status,
        headers=(("content-type", "application/json"), ("retry-after", "7")),
        body=json.dumps(REFUSALS[library]).encode(),
    )
    rig.decode.fault(fault, path=library.path)
    with client_of(library, rig) as client:
        error = raised(lambda: library.ask(client, prompt(400), stream=streamed))
    assert isinstance(error, getattr(library.module, STATUSES[status]))
    assert error.status_code == status
    assert TOLD in error.message
    assert error.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("status", [400, 401, 404, 422])
@every_library
def test_what_prefill_refuses(rigged: Callable[..., Rig], library: Library, status: int) -> None:
    """The client's own mistake, found by prefill: decode is not asked."""
    rig = rigged(*quick())
    fault = Fault(
        status=status, headers=(("content-type", "application/json"),), body=json.dumps(REFUSALS[library]).encode()
    )
    rig.prefill.fault(fault, path=library.path)
    with client_of(library, rig) as client:
        error = raised(lambda: library.ask(client, prompt(400), stream=True))
    assert isinstance(error, getattr(library.module, STATUSES[status]))
    assert TOLD in error.message
    assert not rig.decoded()


@every_library
def test_a_target_that_nobody_allows(rigged: Callable[..., Rig], library: Library) -> None:
    rig = rigged(*quick())
    rig.target = "192.0.2.7:8000"
    with client_of(library, rig) as client:
        error = raised(lambda: library.ask(client, prompt(400), stream=True))
    assert isinstance(error, library.module.PermissionDeniedError)
    assert "--prefill-allow" in error.message


@every_library
def test_a_prompt_that_is_too_large(rigged: Callable[..., Rig], library: Library) -> None:
    rig = rigged(*quick())
    with client_of(library, rig) as client:
        error = raised(lambda: library.ask(client, "x" * (MAX_BODY_BYTES + 1)))
    assert error.status_code == 413
    assert "--max-body-bytes" in error.message


@every_library
def test_a_failed_prefill_where_the_policy_is_to_fail(rigged: Callable[..., Rig], library: Library) -> None:
    rig = rigged(*quick("fail"))
    rig.target = f"127.0.0.1:{free_ports()}"
    with client_of(library, rig) as client:
        error = raised(lambda: library.ask(client, prompt(400), stream=True))
    assert isinstance(error, library.module.InternalServerError)
    assert error.status_code in (502, 503)
    said = error.body.get("error", error.body)
    assert said["stage"] == "prefill"
    assert said["reason"] == "prefill_refused"


@every_library
def test_a_stream_that_breaks_off(rigged: Callable[..., Rig], library: Library) -> None:
    """Neither a clean end nor an exception of the transport's: one that says what happened."""
    rig = rigged(*quick())
    rig.decode.fault(Fault(cut_after_events=4), path=library.path)
    seen = []
    with client_of(library, rig) as client:
        stream = library.ask(client, prompt(400), stream=True)
        with stream:
            error = raised(lambda: seen.extend(iter(stream)))
    assert "the decode engine broke off" in str(error)
    assert "streaming_reset" in str(error.body)
    assert len(seen) == 4
