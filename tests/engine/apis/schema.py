"""Request validation and errors with vLLM's status codes and shapes.

A small stand-in for the pydantic models of vllm/entrypoints: `Fields` says of which type each field is, in
pydantic's lax mode. Knows no API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from tests.engine.core import DEAD_MESSAGE
from tests.engine.wire import Answer, Received

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


def invalid(message: str, param: str | None = None) -> ApiError:
    """What a pydantic validator refuses: the route is never entered, and no prefill engine is told."""
    return ApiError(400, message, HTTPStatus.BAD_REQUEST.phrase, param)


def engine_dead() -> ApiError:
    return ApiError(500, DEAD_MESSAGE, "InternalServerError")


def generation_failed() -> ApiError:
    return ApiError(500, "Internal server error", "InternalServerError")


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, [(b"content-type", b"application/json")], json=value)


Check = Callable[[Any], Any]
Fields = Mapping[str, Check]


class _Wrong(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def parse(received: Received, fields: Fields, *, json_only: bool = True) -> dict[str, Any]:
    """The body as a dictionary with every known field checked; unknown fields are kept (extra="allow")."""
    media_type = (received.header("content-type") or "").lower().split(";", 1)[0]
    if json_only and media_type != "application/json":
        raise invalid("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = json.loads(received.body)
    except UnicodeDecodeError:
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    except json.JSONDecodeError as error:
        if not received.body:
            raise _problem("missing", ("body",), "Field required", None) from None
        raise _problem("json_invalid", ("body", error.pos), "JSON decode error", {}) from None
    except RecursionError:
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _problem("model_attributes_type", ("body",), message, body)
    return check(body, fields)


def check(body: dict[str, Any], fields: Fields, where: tuple[str, ...] = ("body",)) -> dict[str, Any]:
    checked = dict(body)
    for name, value in body.items():
        rule = fields.get(name)
        if rule is None:
            continue
        try:
            checked[name] = rule(value)
        except _Wrong as wrong:
            raise _problem(wrong.kind, (*where, name), str(wrong), value) from None
    return checked


def require(body: dict[str, Any], name: str) -> None:
    if name not in body:
        raise _problem("missing", ("body", name), "Field required", body)


def _problem(kind: str, where: tuple[Any, ...], message: str, value: Any) -> ApiError:
    path = ".".join(str(part) for part in where)
    shown = value if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"
    detail = {"type": kind, "loc": path, "msg": message, "input": shown}
    return invalid(f"1 validation error:\n  {detail}", path)


# -- checks, in pydantic's lax mode


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    def checked(value: Any) -> int:
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                raise _Wrong("int_parsing", "Input should be a valid integer") from None
        if isinstance(value, float):
            if not value.is_integer():
                raise _Wrong("int_from_float", "Input should be a valid integer, got a number with a fraction")
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
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on", "y", "t"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off", "n", "f"):
        return False
    if value in (0, 1) and not isinstance(value, str):
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


def list_of(item: Check, maximum: int | None = None) -> Check:
    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _Wrong("list_type", "Input should be a valid list")
        if maximum is not None and len(value) > maximum:
            raise _Wrong("too_long", f"List should have at most {maximum} items")
        return [item(each) for each in value]

    return checked


def one_of(*values: str) -> Check:
    def checked(value: Any) -> str:
        if value not in values:
            raise _Wrong("literal_error", f"Input should be one of {values}")
        return str(value)

    return checked


def either(*checks: Check) -> Check:
    def checked(value: Any) -> Any:
        last: _Wrong | None = None
        for each in checks:
            try:
                return each(value)
            except _Wrong as wrong:
                last = wrong
        assert last is not None
        raise last

    return checked


def nullable(rule: Check) -> Check:
    def checked(value: Any) -> Any:
        return None if value is None else rule(value)

    return checked


def anything(value: Any) -> Any:
    return value


def xargs(value: Any) -> dict[str, Any]:
    """`vllm_xargs`: strings, numbers and lists of them, so an object in it is a 400."""
    scalar = either(string(), number)
    for each in mapping(value).values():
        if each is None:
            raise _Wrong("string_type", "Input should be a valid string")
        either(scalar, list_of(scalar))(each)
    return dict(value)


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
    "stop": nullable(either(string(), list_of(string(), 64))),
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


def check_common(body: dict[str, Any]) -> None:
    """The validators of whole requests that several APIs share."""
    for name in ("prompt_logprobs", "logprobs", "top_logprobs"):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise invalid(f"1 validation error: `{name}` must be an integer.", name)
    if body.get("stream_options") and not body.get("stream"):
        raise invalid(
            "1 validation error: Stream options can only be defined when `stream=True`.", "stream_options"
        )
    prompt_logprobs = body.get("prompt_logprobs")
    if prompt_logprobs is not None:
        if body.get("stream") and (prompt_logprobs > 0 or prompt_logprobs == -1):
            raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt_logprobs < 0 and prompt_logprobs != -1:
            raise invalid("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs")
    salt = body.get("cache_salt")
    if isinstance(salt, str) and (len(salt) > 128 or set(salt) & set("@/\\\0")):
        raise invalid("`cache_salt` has forbidden characters or is too long.", "cache_salt")
    response_format = body.get("response_format")
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        return
    if response_format.get("json_schema") is None:
        raise invalid(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )


def check_sampling(body: dict[str, Any], max_tokens: int) -> None:  # noqa: C901 one list of limits
    """`SamplingParams._verify_args` (sampling_params.py:631): refused by the serving layer, so P is told."""

    def number_of(name: str, default: float) -> float:
        value = body.get(name)
        return default if value is None else value

    def refuse(message: str, param: str | None = None) -> ApiError:
        return ApiError(400, message, "BadRequestError", param)

    samples = number_of("n", 1)
    if samples < 1:
        raise refuse(f"n must be at least 1, got {samples}.", "n")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= number_of(name, 0.0) <= 2.0:
            raise refuse(f"{name} must be in [-2, 2], got {body[name]}.")
    if number_of("repetition_penalty", 1.0) <= 0.0:
        raise refuse(f"repetition_penalty must be greater than zero, got {body['repetition_penalty']}.")
    temperature = number_of("temperature", 1.0)
    if temperature < 0.0:
        raise refuse(f"temperature must be non-negative, got {temperature}.", "temperature")
    if not temperature <= 2.0:
        raise refuse(f"temperature must be in [0, 2], got {temperature}.", "temperature")
    if not 0.0 < number_of("top_p", 1.0) <= 1.0:
        raise refuse(f"top_p must be in (0, 1], got {body['top_p']}.", "top_p")
    if number_of("top_k", 0) < -1:
        raise refuse(f"top_k must be 0 (disable), or at least 1, got {body['top_k']}.")
    if not 0.0 <= number_of("min_p", 0.0) <= 1.0:
        raise refuse(f"min_p must be in [0, 1], got {body['min_p']}.")
    if max_tokens < 1:
        raise refuse(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    min_tokens = number_of("min_tokens", 0)
    if min_tokens < 0:
        raise refuse(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise refuse(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    if any(not stop for stop in _as_list(body.get("stop"))):
        raise refuse("stop cannot contain an empty string.")


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
