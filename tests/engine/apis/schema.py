"""Request validation and errors with vLLM's status codes and shapes.

A small stand-in for the pydantic models of vllm/entrypoints: `Fields` says of which type each field is, in
pydantic's lax mode. Two kinds of refusal look different, as in vLLM: a field of a wrong type ("Bad Request", by
FastAPI) and a rule about the whole request ("BadRequestError", VLLMValidationError). Knows no API.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from tests.engine.http_messages import Answer, Received
from tests.engine.run import DEAD_MESSAGE

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class ApiError(Exception):
    """An answer with an error body (serve/engine/protocol.py: ErrorInfo)."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}

    def answer(self) -> Answer:
        return json_answer(self.body, self.status)

    def event(self) -> bytes:
        # With json.dumps' default separators, unlike all other events (create_streaming_error_response).
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


class FieldError(ApiError):
    """Refused by FastAPI itself: the route is never entered, and no prefill engine is told of the handoff."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, HTTPStatus.BAD_REQUEST.phrase, param)


class _UnreadableBody(ApiError):
    """Not even JSON's encoding, or nested too deep: starlette's own error, not vLLM's."""

    def __init__(self) -> None:
        super().__init__(400, "There was an error parsing the body")

    @property
    def body(self) -> dict[str, Any]:
        return {"detail": str(self)}


_NO_VALUE = object()


def refused(message: str, param: str | None = None, value: Any = _NO_VALUE) -> ApiError:
    """A VLLMValidationError (vllm/exceptions.py:28), whose text names the parameter and its value."""
    extras = [f"parameter={param}"] if param is not None else []
    if value is not _NO_VALUE and value is not None:
        extras.append(f"value={value}")
    if extras:
        message = f"{message} ({', '.join(extras)})"
    return ApiError(400, message, "BadRequestError", param)


def engine_dead() -> ApiError:
    return ApiError(500, DEAD_MESSAGE, "InternalServerError")


class GenerationFailed(ApiError):
    """The engine answered for this request, with `finish_reason` "error": so the answer had begun."""

    def __init__(self) -> None:
        super().__init__(500, "Internal server error", "InternalServerError")


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, content_type=b"application/json", json=value)


Check = Callable[[Any], Any]
Fields = Mapping[str, Check]


class _Wrong(Exception):
    """What is wrong with a value, and where in it."""

    def __init__(self, kind: str, message: str, where: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where

    def below(self, key: Any) -> _Wrong:
        return _Wrong(self.kind, str(self), (key, *self.where))


def parse_json(received: Received) -> dict[str, Any]:
    """The body as an object, as FastAPI reads it: NaN, repeated keys and lone surrogates pass."""
    media_type = (received.header("content-type") or "").lower().split(";", 1)[0]
    if media_type != "application/json":
        raise FieldError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    if not received.body:
        raise _problem("missing", ("body",), "Field required", None)
    try:
        body = json.loads(received.body)
    except json.JSONDecodeError as error:
        raise _problem("json_invalid", ("body", error.pos), "JSON decode error", {}) from None
    except (UnicodeDecodeError, RecursionError):
        raise _UnreadableBody from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _problem("model_attributes_type", ("body",), message, body)
    return body


def check(body: dict[str, Any], fields: Fields, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body with every known field checked and converted; unknown ones are kept (extra="allow")."""
    for name in required:
        if name not in body:
            raise _problem("missing", ("body", name), "Field required", body)
    checked = dict(body)
    for name, value in body.items():
        rule = fields.get(name)
        if rule is None:
            continue
        try:
            checked[name] = rule(value)
        except _Wrong as wrong:
            raise _problem(wrong.kind, ("body", name, *wrong.where), str(wrong), value) from None
    return checked


def field_problem(name: str, message: str, value: Any) -> FieldError:
    return _problem("value_error", ("body", name), f"Value error, {message}", value)


def _problem(kind: str, where: tuple[Any, ...], message: str, value: Any) -> FieldError:
    path = ".".join(str(part) for part in where)
    shown = str(value)
    if isinstance(value, list | dict):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    detail = {"type": kind, "loc": path, "msg": message, "input": shown[:200]}
    return FieldError(f"1 validation error:\n  {detail}", path)


# -- checks, in pydantic's lax mode


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    def checked(value: Any) -> int:
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                raise _Wrong(
                    "int_parsing", "Input should be a valid integer, unable to parse string as an integer"
                ) from None
        if isinstance(value, float):
            if not value.is_integer():
                raise _Wrong("int_from_float", "Input should be a valid integer, got a fractional number")
            value = int(value)
        if not isinstance(value, int):
            raise _Wrong("int_type", "Input should be a valid integer")
        if minimum is not None and value < minimum:
            raise _Wrong("greater_than_equal", f"Input should be greater than or equal to {minimum}")
        if maximum is not None and value > maximum:
            raise _Wrong("less_than_equal", f"Input should be less than or equal to {maximum}")
        return int(value)

    return checked


def number(value: Any) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise _Wrong("float_parsing", "Input should be a valid number") from None
    if not isinstance(value, int | float):
        raise _Wrong("float_type", "Input should be a valid number")
    return float(value)


def boolean(value: Any) -> bool:
    if isinstance(value, str):
        if value.lower() in ("true", "1", "yes", "on", "y", "t"):
            return True
        if value.lower() in ("false", "0", "no", "off", "n", "f"):
            return False
    elif value in (0, 1):
        return bool(value)
    raise _Wrong("bool_parsing", "Input should be a valid boolean, unable to interpret input")


def string(minimum: int = 0, maximum: int | None = None) -> Check:
    def checked(value: Any) -> str:
        if not isinstance(value, str):
            raise _Wrong("string_type", "Input should be a valid string")
        if len(value) < minimum or (maximum is not None and len(value) > maximum):
            raise _Wrong("string_too_short", "String has a wrong length")
        return value

    return checked


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("dict_type", "Input should be a valid dictionary")
    return value


def list_of(item: Check, minimum: int = 0, maximum: int | None = None) -> Check:
    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _Wrong("list_type", "Input should be a valid list")
        if len(value) < minimum:
            raise _Wrong("too_short", f"List should have at least {minimum} item after validation")
        if maximum is not None and len(value) > maximum:
            raise _Wrong("too_long", f"List should have at most {maximum} items after validation")
        checked_items = []
        for index, each in enumerate(value):
            try:
                checked_items.append(item(each))
            except _Wrong as wrong:
                raise wrong.below(index) from None
        return checked_items

    return checked


def one_of(*values: str) -> Check:
    def checked(value: Any) -> str:
        if value not in values:
            raise _Wrong("literal_error", f"Input should be one of {values}")
        return str(value)

    return checked


def either(*checks: Check) -> Check:
    def checked(value: Any) -> Any:
        # The first problem is the one that `param` names.
        first: _Wrong | None = None
        for each in checks:
            try:
                return each(value)
            except _Wrong as wrong:
                first = first or wrong
        assert first is not None
        raise first

    return checked


def nullable(rule: Check) -> Check:
    def checked(value: Any) -> Any:
        return None if value is None else rule(value)

    return checked


def anything(value: Any) -> Any:
    return value


_SCALAR = either(string(), number)


def xargs(value: Any) -> dict[str, Any]:
    """`vllm_xargs`: strings, numbers and lists of them, so an object in it is a 400."""
    for name, each in mapping(value).items():
        try:
            either(_SCALAR, list_of(_SCALAR))(each)
        except _Wrong as wrong:
            raise wrong.below(name) from None
    return dict(value)


def message(roles: tuple[str, ...] | None = None, branch: str | None = None) -> Check:
    """One message of a conversation; `branch` is the union member that pydantic names first."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            where = (branch,) if branch is not None else ()
            raise _Wrong("dict_type", "Input should be a valid dictionary", where)
        if roles is not None and value.get("role") not in roles:
            raise _Wrong("literal_error", f"Input should be one of {roles}", ("role",))
        if roles is not None and "content" not in value:
            raise _Wrong("missing", "Field required", ("content",))
        return value

    return checked


# The fields that completions, chat and responses share (generate/base, sampling parameters).
COMMON: Fields = {
    "model": nullable(string()),
    "stream": nullable(boolean),
    "stream_options": nullable(mapping),
    "temperature": nullable(number),
    "top_p": nullable(number),
    "top_k": nullable(integer()),
    "min_p": nullable(number),
    "frequency_penalty": nullable(number),
    "presence_penalty": nullable(number),
    "repetition_penalty": nullable(number),
    "seed": nullable(integer(INT64_MIN, INT64_MAX)),
    "stop": nullable(either(string(), list_of(string(), maximum=64))),
    "stop_token_ids": nullable(list_of(integer())),
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "min_tokens": integer(),
    "max_tokens": nullable(integer()),
    "skip_special_tokens": boolean,
    "use_beam_search": boolean,
    "prompt_logprobs": nullable(integer()),
    "logit_bias": nullable(mapping),
    "user": nullable(string()),
    "priority": integer(INT64_MIN, INT64_MAX),
    "request_id": string(),
    "session_id": nullable(string()),
    "return_token_ids": nullable(boolean),
    "add_special_tokens": boolean,
    "truncate_prompt_tokens": nullable(integer(-1, INT64_MAX)),
    "cache_salt": nullable(string(1, 1024)),
    "kv_transfer_params": nullable(mapping),
    "ec_transfer_params": nullable(mapping),
    "vllm_xargs": nullable(xargs),
    "response_format": nullable(mapping),
    "structured_outputs": nullable(mapping),
    "allowed_token_ids": nullable(list_of(integer())),
    "bad_words": list_of(string()),
    "stream_interval": nullable(integer(1)),
}


def check_cache_salt(body: dict[str, Any]) -> None:
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise refused("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or set(salt) & set("@/\\\0"):
        raise refused("Parameter 'cache_salt' has forbidden characters or is too long.", "cache_salt")


def check_whole(body: dict[str, Any]) -> None:
    """The "before" validators that completions and chat share; they see the raw body."""
    check_cache_salt(body)
    response_format = body.get("response_format")
    if (
        isinstance(response_format, dict)
        and response_format.get("type") == "json_schema"
        and response_format.get("json_schema") is None
    ):
        raise refused(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )
    if body.get("stream_options") and not body.get("stream"):
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")


def check_prompt_logprobs(body: dict[str, Any], *others: str) -> None:
    for name in ("prompt_logprobs", *others):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise refused(f"`{name}` must be an integer.", name, value)
    wanted = body.get("prompt_logprobs")
    if wanted is None:
        return
    if body.get("stream") and (wanted > 0 or wanted == -1):
        raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if wanted < 0 and wanted != -1:
        raise refused("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", wanted)


def check_sampling(body: dict[str, Any], max_tokens: int | None) -> None:
    """`SamplingParams._verify_args` (sampling_params.py:631): refused by the serving layer, so P is told."""
    for name, default, lowest, highest in (
        ("presence_penalty", 0.0, -2.0, 2.0),
        ("frequency_penalty", 0.0, -2.0, 2.0),
        ("min_p", 0.0, 0.0, 1.0),
    ):
        value = _or(body.get(name), default)
        if not lowest <= value <= highest:
            raise refused(f"{name} must be in [{lowest:g}, {highest:g}], got {value}.")
    if _or(body.get("n"), 1) < 1:
        raise refused(f"n must be at least 1, got {body['n']}.")
    if _or(body.get("repetition_penalty"), 1.0) <= 0.0:
        raise refused(f"repetition_penalty must be greater than zero, got {body['repetition_penalty']}.")
    temperature = _or(body.get("temperature"), 1.0)
    if not math.isfinite(temperature):
        raise refused(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
    if temperature < 0.0:
        raise refused(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2.0:
        raise refused(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    top_p = _or(body.get("top_p"), 1.0)
    if not 0.0 < top_p <= 1.0:
        raise refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if _or(body.get("top_k"), 0) < -1:
        raise refused(f"top_k must be 0 (disable), or at least 1, got {body['top_k']}.")
    if temperature < 1e-5 and _or(body.get("n"), 1) > 1:
        raise refused(f"n must be 1 when using greedy sampling, got {body['n']}.")
    _check_lengths(body, max_tokens)


def _check_lengths(body: dict[str, Any], max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise refused(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    min_tokens = _or(body.get("min_tokens"), 0)
    if min_tokens < 0:
        raise refused(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise refused(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    stop = body.get("stop")
    if any(not each for each in ([stop] if isinstance(stop, str) else stop or [])):
        raise refused("stop cannot contain an empty string.")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
