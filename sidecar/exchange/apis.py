"""The APIs that can be split, as data: where each keeps its prompt, its output caps and its token counts.

Everything that differs between the APIs stands in `APIS`; no other file asks which API a request uses.
Field names are those of vLLM 0.32 (entrypoints/openai/*/protocol.py, anthropic/protocol.py,
scale_out/token_in_token_out/protocol.py). This file knows nothing of connections or connectors.
"""

from dataclasses import dataclass, field

FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")
"""What a client may never set: the engine acts on these unchecked, and some values end its process."""

FORBIDDEN_INSIDE = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Objects in which the engine reads the forbidden keys as well."""

TRUE, FALSE, ONE, NULL = b"true", b"false", b"1", b"null"


@dataclass(frozen=True, slots=True)
class Api:
    """One API that can be split.

    `caps` is written into the prefill body (an existing value is replaced in place, a missing one is added),
    `drop` is left out of it. Both apply to the object named by `sampling`, or to the top level if that is "".
    `outer_caps` and `outer_drop` always apply to the top level.
    """

    name: str
    """Label value in metrics."""
    path: bytes
    prompt: tuple[str, ...]
    """Fields that make up the prompt; their size gives the estimate of its length in tokens."""
    caps: dict[str, bytes]
    drop: frozenset[str]
    sampling: str = ""
    outer_caps: dict[str, bytes] = field(default_factory=dict)
    outer_drop: frozenset[str] = frozenset()
    single: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    """(field, values that leave the request splittable besides absent and null); read where `caps` apply."""
    never: tuple[str, ...] = ()
    """Top-level fields whose mere presence (other than null, false) keeps the request local."""
    media_url: bytes = b""
    """What a prompt that names media by URL must contain; looked for before anything is decoded."""
    preamble: tuple[bytes, ...] = ()
    """SSE event types that may stand before an error, so they do not prove that the pull worked."""
    preamble_data: bytes = b""
    """The same for APIs without event types: what such an event's data contains."""
    passes_token_ids: bool = False
    """The engine gives the prompt's token ids back for `return_token_ids`, and takes them in place of the prompt in
    `kv_transfer_params.prompt_token_ids` (renderers/online_renderer.py), if it is text."""
    streams_from_first_token: bool = False
    """The first byte of a streamed answer means that a token is there (others begin with what says nothing)."""
    cached_tokens: bytes = b'"cached_tokens":'
    """Where the answer's usage names the prompt tokens that came from a cache."""


_STOP = frozenset({"n", "stop", "stop_token_ids", "min_tokens", "stream_options"})
_ONE_SAMPLE = (("n", (b"1",)), ("best_of", (b"1",)), ("use_beam_search", (FALSE,)))
# truncate_prompt_tokens: the engine truncates to what the output cap leaves, and the caps of the legs differ.
_NEEDS_LOCAL = ("echo", "prompt_logprobs", "truncate_prompt_tokens")

COMPLETIONS = Api(
    name="completions",
    path=b"/v1/completions",
    prompt=("prompt",),
    caps={"stream": FALSE, "max_tokens": ONE, "ignore_eos": TRUE},
    drop=_STOP,
    single=_ONE_SAMPLE,
    never=(*_NEEDS_LOCAL, "prompt_embeds"),
    streams_from_first_token=True,
)
CHAT = Api(
    name="chat",
    path=b"/v1/chat/completions",
    prompt=("messages", "tools"),
    caps={"stream": FALSE, "max_tokens": ONE, "max_completion_tokens": ONE, "ignore_eos": TRUE},
    drop=_STOP,
    single=_ONE_SAMPLE,
    never=_NEEDS_LOCAL,
    media_url=b'_url"',
    preamble_data=b'"delta":{"role":"assistant","content":""',
    passes_token_ids=True,
    streams_from_first_token=True,
)
RESPONSES = Api(
    name="responses",
    path=b"/v1/responses",
    prompt=("input", "instructions", "tools"),
    caps={"stream": FALSE, "max_output_tokens": ONE, "store": FALSE, "ignore_eos": TRUE},
    drop=frozenset({"stop", "stop_token_ids", "stream_options"}),
    # What the engine looks up in its own memory, or runs beyond one generation, exists on one engine only.
    never=("background", "previous_response_id", "previous_input_messages", "conversation", "prompt"),
    media_url=b'_url"',
    preamble=(b"response.created", b"response.in_progress"),
)
MESSAGES = Api(
    name="messages",
    path=b"/v1/messages",
    prompt=("messages", "system", "tools"),
    caps={"stream": FALSE, "max_tokens": ONE},
    drop=frozenset({"stop_sequences"}),
    media_url=b'"url"',
    preamble=(b"message_start", b"ping", b"content_block_start"),
    cached_tokens=b'"cache_read_input_tokens":',
)
GENERATE = Api(
    name="generate",
    path=b"/inference/v1/generate",
    prompt=("token_ids",),
    sampling="sampling_params",
    caps={"max_tokens": ONE, "ignore_eos": TRUE},
    drop=frozenset({"n", "stop", "stop_token_ids", "min_tokens"}),
    outer_caps={"stream": FALSE},
    outer_drop=frozenset({"stream_options"}),
    single=(("n", (b"1",)), ("prompt_logprobs", ())),
    never=("features",),
    streams_from_first_token=True,
)

APIS: dict[bytes, Api] = {api.path: api for api in (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)}
