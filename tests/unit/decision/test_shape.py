"""Which requests can be split at all, and how long their prompts are."""

import json
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.decision import shape
from sidecar.decision.shape import (
    Media,
    conversation,
    exact_tokens,
    is_text,
    is_token_ids,
    keeps_local,
    media_in,
    prompt_bytes,
)
from sidecar.exchange.apis import APIS, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Api
from sidecar.exchange.splice import NotAnObject, fields

SPLITTABLE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hello"},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "responses": {"input": "Hello"},
    "messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    "generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}},
}


def why(api: Api, **changes: Any) -> str:
    body = {**SPLITTABLE[api.name], **changes}
    return why_raw(api, json.dumps({k: v for k, v in body.items() if v is not ...}))


def why_raw(api: Api, body: str) -> str:
    found = keeps_local(api, fields(body.encode()), media_in(api, body.encode()))
    assert found == keeps_local(api, fields(body.encode())), "the look at the whole body has missed something"
    return found


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_plain_requests_can_be_split(api: Api) -> None:
    assert why(api) == ""
    assert why(api, stream=True, temperature=0, user="me", unknown={"a": 1}) == ""


@pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=lambda api: api.name)
@pytest.mark.parametrize(
    ("name", "value", "local"),
    [
        # Case 4: several samples.
        *[("n", value, local) for value, local in ((1, False), (None, False), (2, True), (0, True), ("1", True))],
        *[("best_of", value, local) for value, local in ((1, False), (None, False), (3, True))],
        *[("use_beam_search", value, local) for value, local in ((False, False), (None, False), (True, True))],
        # Case 5: logits of the prompt are needed here.
        *[("echo", value, local) for value, local in ((False, False), (None, False), (True, True), (1, True))],
        *[("prompt_logprobs", value, local) for value, local in ((None, False), (0, True), (5, True), (-1, True))],
        *[("truncate_prompt_tokens", value, local) for value, local in ((None, False), (-1, True), (100, True))],
        *[("logprobs", 5, False), ("stop", ["a"], False), ("min_tokens", 9, False), ("ignore_eos", True, False)],
    ],
)
def test_fields_that_keep_a_request_local(api: Api, name: str, value: object, local: bool) -> None:
    assert why(api, **{name: value}) == (name if local else "")


@pytest.mark.parametrize("spelling", ["1", " 1 ", "\t1\n"])
def test_white_space_around_a_value_is_none_of_it(spelling: str) -> None:
    assert why_raw(CHAT, f'{{"messages":[],"n":{spelling},"echo": false , "best_of":\nnull}}') == ""


def test_spellings_of_one_that_are_not_one_stay_local() -> None:
    """`1.0` is no integer to every engine: the doubt goes to the local side."""
    assert why_raw(CHAT, '{"messages":[],"n":1.0}') == "n"
    assert why_raw(CHAT, '{"messages":[],"n":1e0}') == "n"


def test_last_of_a_repeated_key_counts() -> None:
    assert why_raw(CHAT, '{"messages":[],"n":2,"n":1}') == ""
    assert why_raw(CHAT, '{"messages":[],"n":1,"\\u006e":2}') == "n"


@pytest.mark.parametrize("name", ["n", "prompt_logprobs"])
def test_generate_is_judged_by_its_sampling_params(name: str) -> None:
    assert why(GENERATE, sampling_params={name: 2}) == name
    assert why(GENERATE, sampling_params={name: None}) == ""
    assert why(GENERATE, **{name: 2}) == ""


@pytest.mark.parametrize("value", [..., None, "x", [], 1])
def test_generate_without_sampling_params_is_left_to_the_engine(value: object) -> None:
    assert why(GENERATE, sampling_params=value) == "sampling_params"


def test_generate_with_multimodal_features() -> None:
    assert why(GENERATE, features={"mm_hashes": {}}) == "features"
    assert why(GENERATE, features=None) == ""


# -- prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
@pytest.mark.parametrize("value", [..., None, True, False])
def test_without_a_prompt_there_is_nothing_to_split(api: Api, value: object) -> None:
    assert why(api, **{api.prompt[0]: value}) == api.prompt[0]


@pytest.mark.parametrize(
    ("prompt", "local"),
    [
        ('"text"', False),
        ('""', False),
        ("[1,2,3]", False),
        ("[ 1 , 2\n]", False),
        ("[1]", False),
        ("[]", True),
        ('["a","b"]', True),
        ('["a"]', True),
        ("[[1,2],[3]]", True),
        ("[[1,2]]", True),
        ("[ [1] ]", True),
        ('[{"prompt":"a"}]', True),
    ],
)
def test_flat_list_of_token_ids_is_one_prompt(prompt: str, local: bool) -> None:
    """Case 4."""
    assert why_raw(COMPLETIONS, f'{{"prompt":{prompt}}}') == ("several prompts" if local else "")


def test_prompt_embeddings_stay_local() -> None:
    assert why(COMPLETIONS, prompt_embeds="AAAA") == "prompt_embeds"


# -- media (case 20) -------------------------------------------------------------------------------------------

DATA = "data:image/png;base64,AAAA"
URL = "https://example.com/cat.png"


def _content(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]


@pytest.mark.parametrize(
    ("part", "local"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, True),
        ({"type": "image_url", "image_url": {"url": DATA}}, False),
        ({"type": "image_url", "image_url": URL}, True),
        ({"type": "image_url", "image_url": DATA}, False),
        ({"image_url": {"url": "http://10.0.0.1/x"}}, True),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, True),
        ({"type": "video_url", "video_url": {"url": URL}}, True),
        ({"type": "audio_url", "audio_url": {"url": URL}}, True),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, False),
        ({"type": "text", "text": f"see {URL} or image_url"}, False),
        ({"type": "text", "text": '{"image_url":{"url":"https://x"}}'}, False),
    ],
)
def test_media_of_chat(part: dict[str, Any], local: bool) -> None:
    assert why(CHAT, messages=_content(part)) == ("remote media" if local else "")


@pytest.mark.parametrize(
    ("part", "local"),
    [
        ({"type": "image", "source": {"type": "url", "url": URL}}, True),
        ({"type": "image", "source": {"type": "base64", "data": "AA", "media_type": "image/png"}}, False),
        ({"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}, True),
        ({"type": "text", "text": URL}, False),
    ],
)
def test_media_of_messages(part: dict[str, Any], local: bool) -> None:
    assert why(MESSAGES, messages=_content(part)) == ("remote media" if local else "")


@pytest.mark.parametrize(
    ("part", "local"),
    [
        ({"type": "input_image", "image_url": URL}, True),
        ({"type": "input_image", "image_url": DATA}, False),
        ({"type": "input_file", "file_url": URL}, True),
        ({"type": "input_text", "text": URL}, False),
    ],
)
def test_media_of_responses(part: dict[str, Any], local: bool) -> None:
    assert why(RESPONSES, input=_content(part)) == ("remote media" if local else "")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {"url": URL}}]}]}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_media_behind_urls_that_never_change(api: Api, body: dict[str, Any]) -> None:
    """`--split-remote-media`; everything else keeps a request local as before."""
    assert keeps_local(api, fields(json.dumps(body))) == "remote media"
    assert keeps_local(api, fields(json.dumps(body)), remote_media=True) == ""
    assert keeps_local(CHAT, fields(json.dumps({"messages": [], "n": 2})), remote_media=True) == "n"


@pytest.mark.parametrize(
    ("api", "body", "media"),
    [
        (CHAT, '{"messages":[{"content":"a url, please"}]}', Media.NONE),
        (CHAT, '{"messages":[{"content":"a url"}]}', Media.INLINE),
        (CHAT, '{"messages":[{"content":"{\\"url\\":\\"http://x\\"}"}]}', Media.NONE),
        (CHAT, '{"messages":[{"role":"url","content":"x"}]}', Media.INLINE),
        (CHAT, '{"messages":[{"image_url":{"url" : "data:,"}}]}', Media.INLINE),
        (CHAT, '{"messages":[{"image_url" :null}]}', Media.INLINE),
        (CHAT, '{"messages":[{"image_url":{"url":%s"http://x"}}]}' % (" " * 100), Media.PERHAPS_FETCHED),
        (CHAT, '{"messages":[{"image_url":{"url":"d\\u0061ta:,"}}]}', Media.PERHAPS_FETCHED),
        (CHAT, '{"messages":[],"metadata":{"callback_url":"http://x"}}', Media.PERHAPS_FETCHED),
        (CHAT, '{{"messages":[{}]}}'.format(",".join(['{"url":{}}'] * 2000)), Media.PERHAPS_FETCHED),
        (RESPONSES, '{"input":[{"image_url":"data:,"},{"file_id":"f"}]}', Media.PERHAPS_FETCHED),
        (COMPLETIONS, '{"prompt":"x","image_url":"http://x"}', Media.NONE),
        (CHAT, '{"messages":[{"image_\\u0075rl":{"ur\\u006C":"http://x"}}]}', Media.PERHAPS_FETCHED),
        (CHAT, '{"messages":[{"image_url":{"url":"data:,"}},{"image\\u005furl":"x"}]}', Media.PERHAPS_FETCHED),
        (CHAT, '{"messages":[{"content":"caf\\u00e9 \\u003c\\u0027 \\u0000"}]}', Media.NONE),
    ],
)
def test_what_the_bytes_of_a_body_tell_of_media(api: Api, body: str, media: Media) -> None:
    assert media_in(api, body.encode()) is media_in(api, bytearray(body.encode())) is media
    assert media_in(CHAT, memoryview(b"{}")) is Media.PERHAPS_FETCHED, "a view cannot be searched"


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (CHAT, '{"messages":[{"content":[{"image\\u005furl":{"u\\u0072l":"%s"}}]}]}'),
        (CHAT, '{"messages":[{"content":[{"image_ur\\u006c":{"url":"%s"}}]}]}'),
        (CHAT, '{"messages":[{"content":[{"image_url":{"url":"data:,"}},{"\\u0069mage_\\u0075rl":"%s"}]}]}'),
        (RESPONSES, '{"input":[{"content":[{"type":"input_image","image_\\u0075rl":"%s"}]}]}'),
        (MESSAGES, '{"messages":[{"content":[{"source":{"type":"\\u0075rl","ur\\u006c":"%s"}}]}]}'),
    ],
)
def test_a_key_is_what_it_means(api: Api, body: str) -> None:
    """What each leg fetches for itself may have changed in between: decode would compute another prompt."""
    raw = body % URL
    assert why_raw(api, raw) == "remote media"
    assert not is_text(api, fields(raw.encode()), media_in(api, raw.encode()))


PIECES = [b"u", b"r", b"l", b'"', b"url", b'url"', b"\\", b"\\u00", b"6", b"c", b"0", b"-" * 7]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.integers(4, 12), st.data())
def test_searching_in_windows_is_searching(body: bytes, window: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(body)))
    with patch.object(shape, "_WINDOW_BYTES", window):
        assert shape._rfind_key(body, b'url"', end) == body.rfind(b'url"', 0, end)
        assert shape._escapes_letters(body) is bool(re.search(rb"\\u00[4-7]", body))


def test_urls_beside_the_prompt_do_not_keep_it_local() -> None:
    assert why(CHAT, metadata={"callback_url": URL}) == ""
    assert why(CHAT, metadata={"callback_url": URL}, messages=_content({"image_url": {"url": DATA}})) == ""


# -- responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("previous_response_id", "resp_1"),
        ("previous_input_messages", []),
        ("conversation", "c"),
        ("prompt", {"id": "p"}),
    ],
)
def test_what_one_engine_alone_remembers_stays_local(name: str, value: object) -> None:
    assert why(RESPONSES, **{name: value}) == name
    assert why(RESPONSES, **{name: None}) == ""


@pytest.mark.parametrize(
    ("tools", "local"),
    [
        (None, False),
        ([], False),
        ([{"type": "function", "name": "f", "parameters": {}}], False),
        ([{"name": "f"}], False),
        ([{"type": "function", "name": "f"}, {"type": "web_search_preview"}], True),
        ([{"type": "mcp", "server_label": "x"}], True),
        ([{"type": "code_interpreter", "container": {"type": "auto"}}], True),
        ([{"type": 5}], True),
        (["x"], True),
        ({}, True),
    ],
)
def test_tools_that_the_engine_runs_itself_stay_local(tools: object, local: bool) -> None:
    assert why(RESPONSES, tools=tools) == ("tools" if local else "")


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
@pytest.mark.parametrize("depth", [100, 900, *range(970, 1000)])
def test_depth_that_was_read_is_judged_without_an_exception(api: Api, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    texts = {
        "completions": f'{{"prompt":"a","x":{deep}}}',
        "chat": f'{{"messages":[{{"image_url":{deep}}}]}}',
        "responses": f'{{"input":"a","tools":[{{"type":"function","x":{deep}}}]}}',
        "messages": f'{{"messages":[{{"url":{deep}}}]}}',
        "generate": f'{{"token_ids":[1],"sampling_params":{{"x":{deep}}}}}',
    }
    try:
        members = fields(texts[api.name].encode())
        keeps_local(api, members)
    except NotAnObject:
        assert depth > 400


# -- length ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "body", "size"),
    [
        (COMPLETIONS, '{"prompt":[1,2,3]}', "3 tokens"),
        (COMPLETIONS, '{"prompt":[ 1 , 2 ]}', "2 tokens"),
        (COMPLETIONS, '{"prompt":[7]}', "1 tokens"),
        (GENERATE, '{"token_ids":[1,2,3,4,5],"sampling_params":{}}', "5 tokens"),
        (COMPLETIONS, '{"prompt":"%s"}' % ("x" * 398), "400 bytes"),
        (COMPLETIONS, "{}", "0 bytes"),
        (CHAT, '{{"messages":[{}],"tools":[{}]}}'.format("1" * 98, "2" * 298), "400 bytes"),
        (RESPONSES, '{{"input":"{}","instructions":"{}"}}'.format("a" * 98, "b" * 98), "200 bytes"),
        (MESSAGES, '{{"messages":[{}],"system":"{}"}}'.format("1" * 98, "2" * 98), "200 bytes"),
        (CHAT, '{"model":"%s","messages":[]}' % ("m" * 1000), "2 bytes"),
    ],
)
def test_size_of_the_prompt(api: Api, body: str, size: str) -> None:
    members = fields(body.encode())
    if is_token_ids(api, members):
        assert size == f"{exact_tokens(api, members)} tokens"
    else:
        assert size == f"{prompt_bytes(api, members)} bytes"


# -- conversations ---------------------------------------------------------------------------------------------

QUESTIONS = [f"Question {number}: what is in the document? " + "x" * 2000 for number in range(50)]
SYSTEM = {"role": "system", "content": "Be brief. " * 300}


def number_of(api: Api, **members: Any) -> int:
    return conversation(api, fields(json.dumps(members)))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["dense", "spaced"])
@pytest.mark.parametrize("question", ["Who?", 'Is "} in it? And "user"?', QUESTIONS[0]])
def test_turns_of_a_conversation_share_a_number(question: str, separators: tuple[str, str]) -> None:
    messages = [SYSTEM, {"role": "user", "content": question}]
    numbers = set()
    for turn in range(5):
        numbers.add(conversation(CHAT, fields(json.dumps({"messages": messages}, separators=separators))))
        messages = [
            *messages,
            {"role": "assistant", "content": f"Answer {turn}"},
            {"role": "user", "content": f"And {turn}?"},
        ]
    assert len(numbers) == 1
    assert numbers != {0}


@pytest.mark.parametrize(
    ("api", "members"),
    [
        (CHAT, lambda text: {"messages": [SYSTEM, {"role": "user", "content": text}]}),
        (CHAT, lambda text: {"messages": [{"content": text, "role": "user"}]}),
        (CHAT, lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        (MESSAGES, lambda text: {"messages": [{"role": "user", "content": text}]}),
        (RESPONSES, lambda text: {"input": text}),
        (COMPLETIONS, lambda text: {"prompt": text}),
        (COMPLETIONS, lambda text: {"prompt": list(text.encode())}),
        (GENERATE, lambda text: {"token_ids": list(text.encode())}),
    ],
)
def test_conversations_differ(api: Api, members: Callable[[str], dict[str, Any]]) -> None:
    """Under the same system prompt too; and what follows a long beginning does not matter."""
    numbers = [number_of(api, **members(question)) for question in QUESTIONS]
    assert len(set(numbers)) == len(QUESTIONS)
    assert [number_of(api, **members(question + "and more")) for question in QUESTIONS] == numbers


@pytest.mark.parametrize(
    ("messages", "tools", "text"),
    [
        (_content({"type": "text", "text": "x"}), None, True),
        (
            _content({"type": "text", "text": "x"}),
            [{"function": {"parameters": {"url": {"type": "string"}}}}],
            True,
        ),
        (_content({"image_url": {"url": DATA}}), None, False),
        ([{"role": "user", "content": "x" * 300_000}], None, True),
        ([{"role": "user", "content": "x" * 300_000}], [{"function": {"parameters": {"url": {}}}}], False),
    ],
    ids=["text", "a tool with a url", "picture", "large text", "large, and a tool with a url: not worth a copy"],
)
def test_prompts_that_are_text_alone(messages: Any, tools: Any, text: bool) -> None:
    body = json.dumps({"messages": messages, "tools": tools}).encode()
    assert is_text(CHAT, fields(body), media_in(CHAT, body)) is text
