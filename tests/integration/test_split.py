"""A request that is split: what each leg gets, what the client gets, and that nothing tells it from a local one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine import Fault
from tests.integration.apis import APIS, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, generate, responses
from tests.integration.client import events
from tests.integration.sidecar import KEY, Rig, chat, completion, eventually, prompt, released
from tests.ports import free_ports

every_api = pytest.mark.parametrize("path", APIS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@every_api
@streamed_or_not
def test_same_text_as_local_and_all_kv_pulled(rig: Rig, path: str, stream: bool) -> None:
    """Split, the prompt's KV is pulled and the text is the engine's own; nothing stays behind on the prefill
    side."""
    body = APIS[path](**({"stream": True} if stream else {}))
    answer = rig.post(path, body)
    assert answer.status == 200
    assert answer.decision == f"remote; prefill={rig.prefill.address}"
    pulled = rig.decode.counter("prompt_tokens_external_kv_transfer")
    assert pulled >= 400
    rig.decode.restart()  # without the prefix in its cache
    rig.target = ""
    local = rig.post(path, body)
    assert local.decision == "local; reason=no_target"
    assert local.text == answer.text != ""
    assert rig.decode.counter("prompt_tokens_external_kv_transfer") == 0
    assert rig.prefill.held_blocks == 0


# -- the legs' bodies ----------------------------------------------------------------------------------------


@every_api
@streamed_or_not
def test_decode_leg_is_the_clients_body_and_the_handoff(rig: Rig, path: str, stream: bool) -> None:
    """Byte for byte: only the handoff is put in front."""
    body = APIS[path](
        **({"stream": True} if stream else {}), zz=[1.50, 12345678901234567890, "\u00e9"], aa={"b": 1}
    )
    spelled = json.dumps(body, indent=1).replace("1.5", "1.50e0").encode()
    assert rig.post(path, spelled).status == 200
    (asked,) = rig.decoded()
    head = b'{"kv_transfer_params":'
    assert asked.body.startswith(head)
    handoff, end = json.JSONDecoder().raw_decode(asked.body[len(head) :].decode())
    assert asked.body[len(head) + end :] == b"," + spelled[1:]
    assert handoff["remote_engine_id"] == rig.prefill.engine_id


LIMITS = {
    COMPLETIONS: {"max_tokens": 1},
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    RESPONSES: {"max_output_tokens": 1},
    MESSAGES: {"max_tokens": 1},
    GENERATE: {"max_tokens": 1},
}


@every_api
@pytest.mark.parametrize("given", [50, None, "absent"])
def test_prefill_leg_makes_one_token(rig: Rig, path: str, given: Any) -> None:
    """Case 15: every limit of every API, present, absent or null."""
    body = APIS[path]()
    inner = body["sampling_params"] if path == GENERATE else body
    for limit in LIMITS[path]:
        inner.pop(limit, None)
        if given != "absent":
            inner[limit] = given
    answer = rig.post(path, body)
    # Of all APIs /v1/messages alone insists on a limit.
    assert answer.status == (400 if path == MESSAGES and given != 50 else 200)
    (asked,) = rig.prefilled()
    sent = asked.json["sampling_params"] if path == GENERATE else asked.json
    assert {limit: sent.get(limit) for limit in LIMITS[path]} == LIMITS[path]
    assert not asked.json["stream"]
    assert "stream_options" not in asked.json
    assert asked.json["kv_transfer_params"]["do_remote_decode"] is True


def test_what_shapes_the_prompt_is_the_same_on_both_legs(rig: Rig) -> None:
    """Case 18: tool schemas keep their order and spelling, or the prompts would differ."""
    tools = (
        b'[{"type":"function","function":{"name":"z","parameters":{"type":"object","properties":'
        b'{"zeta":{"type":"number","default":1.0},"alpha":{"type":"string"}},"required":["zeta"]}}}]'
    )
    messages = b'[{"role":"user","content":"%b caf\\u00e9 \\/"}]' % prompt(400).encode()
    extra = b'"chat_template_kwargs":{"z":1,"a":2},"cache_salt":"s"'
    body = b'{"model":"sim","max_tokens":8,"messages":%b,"tools":%b,%b}' % (messages, tools, extra)
    answer = rig.post(CHAT, body)
    assert answer.status == 200
    assert answer.decision.startswith("remote")
    for leg in (*rig.prefilled(), *rig.decoded()):
        for part in (messages, tools, extra):
            assert part in leg.body
    assert rig.decode.counter("prompt_tokens_external_kv_transfer") > 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_what_could_end_the_prompt_early_is_not_asked_of_prefill(rig: Rig, path: str) -> None:
    """Cases 6 and 16: no stop criterion, no minimum, no stream options on the prefill leg; decode gets them all."""
    more: dict[str, Any] = {"min_tokens": 4, "stop_token_ids": [5]}
    if path == GENERATE:
        body = generate(sampling=more, stream=True, stream_options={"include_usage": True})
    else:
        more |= {"stop": ["\n\n"], "n": 1}
        body = APIS[path](**more, stream=True, stream_options={"include_usage": True})
    answer = rig.post(path, body)
    assert answer.status == 200
    (prefill,), (decode,) = rig.prefilled(), rig.decoded()
    sent = prefill.json.get("sampling_params", prefill.json)
    assert not {"stop", "stop_token_ids", "min_tokens", "n"} & sent.keys()
    assert sent["ignore_eos"] is True
    assert "stream_options" not in prefill.json
    got = decode.json.get("sampling_params", decode.json)
    assert more.items() <= got.items()
    assert decode.json["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_tokens": 0}], ids=["absent", "null", "zero"])
def test_limit_at_decode_is_the_clients(rig: Rig, limit: dict[str, Any]) -> None:
    """Case 17: absent stays absent, null null; 0 stays 0 and the engine's 400 is relayed."""
    body = completion()
    del body["max_tokens"]
    body |= limit
    answer = rig.post(COMPLETIONS, body)
    (decode,) = rig.decoded()
    assert {key: decode.json[key] for key in ("max_tokens",) if key in decode.json} == limit
    direct = rig.ask_engine("POST", COMPLETIONS, body)
    assert answer.status == direct.status == (400 if limit.get("max_tokens") == 0 else 200)
    assert answer.status == 200 or answer.body == direct.body
    if answer.status == 400:  # the prompt has been prefilled, and nobody will read its blocks
        eventually(lambda: released(rig.decode) == 1)


def test_stream_options_without_stream(rig: Rig) -> None:
    """Case 16: decode's own 400, not one of prefill's."""
    body = completion(stream_options={"include_usage": True})
    answer = rig.post(COMPLETIONS, body)
    assert answer.status == 400
    assert answer.body == rig.ask_engine("POST", COMPLETIONS, body).body
    assert all(one.status == 200 for one in rig.prefilled())


def test_prefill_stores_no_response(rig: Rig) -> None:
    """Case 19: `store` is false on the prefill leg; the answer that the client sees is the decode engine's."""
    answer = rig.post(RESPONSES, responses(store=True))
    (prefill,), (decode,) = rig.prefilled(), rig.decoded()
    assert prefill.json["store"] is False
    assert decode.json["store"] is True
    assert answer.text == rig.expected(RESPONSES, responses(input=decode.json["input"]))


# -- what stays local ----------------------------------------------------------------------------------------

LOCAL: list[tuple[str, str, dict[str, Any]]] = [
    ("several prompts", COMPLETIONS, {"prompt": ["a" * 2000, "b" * 2000]}),
    ("nested token lists", COMPLETIONS, {"prompt": [[1] * 400, [2] * 400]}),
    ("n", COMPLETIONS, {"n": 2}),
    ("best_of", COMPLETIONS, {"best_of": 2}),
    ("beam search", COMPLETIONS, {"use_beam_search": True}),
    ("prompt_logprobs", COMPLETIONS, {"prompt_logprobs": 1}),
    ("echo", COMPLETIONS, {"echo": True}),
    ("n", CHAT, {"n": 2}),
    ("prompt_logprobs", CHAT, {"prompt_logprobs": 0}),
    ("n", GENERATE, {"sampling_params": {"n": 2, "max_tokens": 2}}),
    (
        "media",
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x" * 2000},
                        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                    ],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(("name", "path", "fields"), LOCAL, ids=[f"{name}-{path}" for name, path, _ in LOCAL])
def test_shapes_that_stay_local(rig: Rig, name: str, path: str, fields: dict[str, Any]) -> None:
    """Cases 4, 5 and 20: prefill is left alone."""
    body = {**APIS[path](), **fields}
    answer = rig.post(path, body)
    assert answer.decision == "local; reason=shape"
    assert not rig.prefilled()
    (asked,) = rig.decoded()
    assert asked.json == body


def test_shapes_that_may_be_split(rig: Rig) -> None:
    """Case 4: a flat list of token ids is one prompt. Case 20: media inside the request are the same on both
    legs."""
    assert rig.post(COMPLETIONS, completion(prompt=list(range(1, 500)))).decision.startswith("remote")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": prompt(400)}, image]}
    answer = rig.post(CHAT, chat(messages=[message]))
    assert answer.decision.startswith("remote")
    assert answer.status == 200


def test_media_that_never_change_may_be_split(rigged: Callable[..., Rig]) -> None:
    """`--split-remote-media`: both engines fetch them, the body is the same on both."""
    rig = rigged("--split-remote-media", "on")
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    message = {"role": "user", "content": [{"type": "text", "text": prompt(400)}, image]}
    answer = rig.post(CHAT, chat(messages=[message]))
    assert answer.decision.startswith("remote")
    (prefill,), (decode,) = rig.prefilled(), rig.decoded()
    assert prefill.json["messages"] == decode.json["messages"] == [message]
    assert "return_token_ids" not in prefill.json, "ids say nothing of the media"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_of_a_splittable_path_are_the_engines(rig: Rig, method: str) -> None:
    answer = rig.sidecar.ask(method, COMPLETIONS, headers=rig.headers())
    assert answer.status == 405
    assert answer.header("x-pd-decision") is None


# -- headers -------------------------------------------------------------------------------------------------


def test_what_each_leg_is_told_of_the_headers(rig: Rig) -> None:
    given = [
        ("X-Custom-Thing", "a"),
        ("x-custom-thing", "b"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "a=b"),
        ("x-data-parallel-rank", "0"),
        ("Cookie", "c=d"),
        ("Proxy-Authorization", "Basic zzz"),
        ("x-data-parallel-host-port", "1.2.3.4:5"),
        ("x-kv-cache-source-host-port", "1.2.3.4:5"),
        ("Connection", "keep-alive, X-Private"),
        ("X-Private", "hop"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("Proxy-Connection", "keep-alive"),
    ]
    assert rig.post(COMPLETIONS, completion(), given).status == 200
    (prefill,), (decode,) = rig.prefilled(), rig.decoded()
    for leg in (prefill, decode):
        names = [name for name, _ in leg.headers]
        assert [(name, value) for name, value in leg.headers if name.lower() == b"x-custom-thing"] == [
            (b"X-Custom-Thing", b"a"),
            (b"x-custom-thing", b"b"),
        ]
        assert leg.header("authorization") == KEY
        for name, value in given[2:5]:
            assert leg.header(name) == value
        gone = {"x-prefiller-host-port", *(name.lower() for name, _ in given[7:9]), "x-private", "keep-alive", "te"}
        assert not {name.decode().lower() for name in names} & (gone | {"proxy-connection"})
        assert leg.header("content-length") == str(len(leg.body))
        assert leg.header("transfer-encoding") is None
    assert decode.header("cookie") == "c=d"
    assert decode.header("proxy-authorization") == "Basic zzz"
    assert decode.header("host") == "sidecar"
    assert prefill.header("cookie") is prefill.header("proxy-authorization") is None
    assert prefill.header("host") == rig.prefill.address


def test_the_target_keeps_its_spelling_on_both_legs(rig: Rig) -> None:
    """A path is what it means; how it is written is the client's business."""
    target = "/v1/%63ompletions?a=%2F&b=%zz&c"
    assert rig.post(target, completion()).decision.startswith("remote")
    assert [one.target for one in (*rig.prefilled(), *rig.decoded())] == [target] * 2


@pytest.mark.parametrize("given", ["abc-DEF_1.2", "x" * 128])
def test_request_id_of_the_client_is_kept(rig: Rig, given: str) -> None:
    answer = rig.post(COMPLETIONS, completion(), [("X-Request-Id", given)])
    assert answer.header("x-request-id") == given
    assert [one.header("x-request-id") for one in (*rig.prefilled(), *rig.decoded())] == [given] * 2


@pytest.mark.parametrize("given", [None, "a,b", "x" * 129, "a b", "", "\xe9"])
def test_request_id_is_made_where_the_engines_could_not_live_with_it(rig: Rig, given: str | None) -> None:
    """A comma in it breaks the renewal of leases."""
    headers = [("X-Request-Id", given)] if given is not None else []
    answer = rig.post(COMPLETIONS, completion(), headers)
    made = answer.header("x-request-id")
    assert made
    assert made != given
    assert [one.header("x-request-id") for one in (*rig.prefilled(), *rig.decoded())] == [made] * 2


def test_same_request_id_from_several_clients_at_once(rig: Rig) -> None:
    """Case 13: each gets its own text; the id that prefill returned is what counts."""
    bodies = [completion(400 + 16 * i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: rig.post(COMPLETIONS, body, [("x-request-id", "same")]), bodies))
    assert all(answer.decision.startswith("remote") for answer in answers)
    rig.decode.restart()
    assert [answer.text for answer in answers] == [rig.expected(COMPLETIONS, body) for body in bodies]
    assert rig.prefill.held_blocks == 0


def test_the_clients_key_reaches_both_engines(rigged: Callable[..., Rig]) -> None:
    """Case 21: on every path; and the 401 of an engine is relayed, not retried."""
    keyed = {"api_key": KEY.removeprefix("Bearer ")}
    rig = rigged(prefill=keyed, decode=keyed)
    for path, make in APIS.items():
        answer = rig.post(path, make())
        assert (answer.status, answer.decision.split(";")[0]) == (200, "remote")
    assert rig.sidecar.ask("GET", "/v1/models", headers=rig.headers()).status == 200
    asked = len(rig.prefilled())
    with rig.sidecar.connect() as client:
        client.request("POST", COMPLETIONS, completion(), [("x-prefiller-host-port", rig.target)])
        answer = client.answer("POST")
    assert (answer.status, answer.json) == (401, {"error": "Unauthorized"})
    assert len(rig.prefilled()) == asked + 1
    assert rig.sidecar.ask("GET", "/v1/models").status == 401


def test_data_parallel_rank(rigged: Callable[..., Rig]) -> None:
    """Case 42: the same on both legs; out of range is the engine's 400."""
    ranks = {"data_parallel_size": 2}
    rig = rigged(prefill={**ranks, "side_channel_port": free_ports(2)}, decode=ranks)
    for rank in (0, 1, 1):
        assert rig.post(COMPLETIONS, completion(), [("x-data-parallel-rank", str(rank))]).status == 200
    assert [core.counters["prompt_tokens_external_kv_transfer"] for core in rig.decode.cores] == [400, 800]
    assert [core.counters["generation_tokens_total"] for core in rig.prefill.cores] == [1, 2]
    answer = rig.post(COMPLETIONS, completion(), [("x-data-parallel-rank", "7")])
    assert answer.status == 400
    assert "out of range" in answer.json["error"]["message"]


# -- cached tokens -------------------------------------------------------------------------------------------


def without_count(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}


def cached_tokens(body: bytes, *, stream: bool) -> int:
    """The count of cached tokens that the answer names, wherever its API has it, the same each time."""
    parts = [json.loads(event) for event in events(body) if event != b"[DONE]"] if stream else [json.loads(body)]
    found = set(counts(parts))
    assert len(found) == 1
    return found.pop()


def counts(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("cached_tokens", "cache_read_input_tokens") and item is not None:
                yield item
            else:
                yield from counts(item)
    elif isinstance(value, list):
        for item in value:
            yield from counts(item)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@streamed_or_not
@pytest.mark.parametrize("engine_knows", [True, False], ids=["told", "corrected"])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "event by event"])
def test_cached_tokens_are_those_of_prefill(
    rigged: Callable[..., Rig], path: str, stream: bool, engine_knows: bool, ragged: bool
) -> None:
    """Case 26: what prefill had cached, in JSON and SSE, however the events are cut; never what was pulled."""
    rig = rigged(prefill={"num_blocks": 4096})
    if not engine_knows:
        rig.prefill.fault(Fault(handoff=without_count), path=path)
    if ragged:
        rig.decode.fault(Fault(ragged=True), path=path)
    fields: dict[str, Any] = {"stream": True} if stream else {}
    if stream and path in (COMPLETIONS, CHAT):
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    body = APIS[path](**fields)
    counted = []
    for _ in range(2):
        answer = rig.post(path, body)
        assert answer.decision.startswith("remote")
        assert answer.text
        counted.append(cached_tokens(answer.body, stream=stream))
        rig.decode.restart()
    assert counted[0] == 0
    assert counted[1] == rig.prefill.counter("prefix_cache_hits_total") > 300


@pytest.mark.parametrize("engine_knows", [True, False], ids=["told", "corrected"])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "event by event"])
def test_trailers_pass_where_the_count_may_be_corrected(
    rigged: Callable[..., Rig], engine_knows: bool, ragged: bool
) -> None:
    """As they do where nothing is looked into."""
    rig = rigged()
    if not engine_knows:
        rig.prefill.fault(Fault(handoff=without_count), path=CHAT)
    rig.decode.fault(Fault(ragged=ragged, trailers=[("X-Sum", "1"), ("x-other", "caf\xc3\xa9")]), path=CHAT)
    answer = rig.post(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    assert answer.decision.startswith("remote")
    assert answer.trailers == [(b"X-Sum", b"1"), (b"x-other", "caf\xc3\xa9".encode())]
    assert answer.header("x-sum") is None
    assert events(answer.body)[-1] == b"[DONE]"


def test_cached_tokens_after_a_fallback_are_the_decode_engines(rig: Rig) -> None:
    """Case 26: nothing is corrected where nothing was pulled."""
    body = completion()
    rig.expected(COMPLETIONS, body)  # decode has it in its cache now
    rig.prefill.fault(Fault(handoff_absent=True), path=COMPLETIONS)
    answer = rig.post(COMPLETIONS, body)
    assert answer.decision.startswith("recompute")
    assert cached_tokens(answer.body, stream=False) > 300


# -- the admin port tells of it ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["prefill", ""], ids=["remote", "local"])
def test_time_between_tokens(target: str, rig: Rig) -> None:
    """One observation for a stream, whichever way its pieces went."""
    rig.target = rig.prefill.address if target else ""
    before = rig.sidecar.metrics()
    rig.decode.engine.limits.seconds_per_token = 0.1
    try:
        assert rig.post(CHAT, chat(stream=True)).status == 200
        assert rig.post(CHAT, chat()).status == 200
    finally:
        rig.decode.engine.limits.seconds_per_token = 0.0
    decision = "remote" if target else "local"

    def gain(name: str) -> float:
        return rig.sidecar.metrics()(name, decision=decision) - before(name, decision=decision)

    eventually(lambda: gain("ttft_seconds_count") == 2)
    assert gain("itl_seconds_count") == 1
    assert 0.06 < gain("itl_seconds_sum") < 0.4  # eight tokens and [DONE]; 0.8 if they were taken for one piece


@pytest.mark.parametrize("stage", ["prefill", "pull"])
def test_time_lost_on_an_engine_that_fails_is_not_the_sidecars(rigged: Callable[..., Rig], stage: str) -> None:
    rig = rigged("--prefill-timeout", "1", "--pull-timeout", "1")
    before = rig.sidecar.metrics()
    if stage == "prefill":
        rig.prefill.fault(Fault(silence=True), path=CHAT)
    else:
        rig.decode.faults.once(Fault(delay_head_seconds=1.0, status=500), path=CHAT)
    answer = rig.post(CHAT, chat())
    assert answer.decision.startswith("recompute")

    def gain(name: str) -> float:
        return rig.sidecar.metrics()(name) - before(name)

    eventually(lambda: gain("ttft_seconds_count") == 1)
    assert gain("ttft_seconds_sum") > 0.9
    assert gain("overhead_seconds_sum") < 0.5


def test_metrics_and_decisions(rigged: Callable[..., Rig]) -> None:
    rig = rigged("--log-format", "json", "--decision-header", "off")
    before = rig.sidecar.metrics()
    answer = rig.post(CHAT, chat(stream=True))
    rig.target = ""
    rig.post(CHAT, chat())

    def gain(name: str, **labels: str) -> float:
        return rig.sidecar.metrics()(name, **labels) - before(name, **labels)

    eventually(lambda: gain("requests_total", api="chat") == 2)
    assert gain("requests_total", api="chat", decision="remote", reason="on", status="200") == 1
    assert gain("requests_total", api="chat", decision="local", reason="no_target", status="200") == 1
    assert gain("prefill_attempts_total", outcome="ok") == 1
    assert gain("handoffs_total", outcome="used") == 1
    assert gain("ttft_seconds_count", decision="remote") == 1
    assert gain("prefill_seconds_count") == 1
    assert gain("decode_first_byte_seconds_count") == 2
    assert gain("overhead_seconds_count") == 2
    assert gain("overhead_seconds_sum") < 0.5
    record = rig.decision_on(answer)
    assert record["api"] == "chat"
    assert (record["decided"], record["decision"], record["status"]) == ("remote", "remote", 200)
    assert record["prefill"] == rig.prefill.address
    assert record["estimated_prompt_tokens"] >= 400
    assert record["handoffs"] == ["used"]


def test_decision_header_can_be_switched_off(rigged: Callable[..., Rig]) -> None:
    rig = rigged("--log-format", "json", "--decision-header", "off")
    answer = rig.chat()
    assert answer.status == 200
    assert answer.header("x-pd-decision") is None
    assert answer.header("x-request-id")
    assert all(json.loads(line)["message"] for line in rig.sidecar.log.splitlines())
