"""What a request is as far as splitting goes: can it be split, and about how many tokens is its prompt?

Pure functions of the top-level members of the body. Values are looked at as bytes; a value is decoded only where
its meaning is needed and it is small or rare.
"""

import re
import zlib
from enum import Enum
from typing import Any

import msgspec

from sidecar.exchange.apis import COMPLETIONS, FALSE, NULL, RESPONSES, Api
from sidecar.exchange.splice import Fields, NotAnObject, fields, is_object

BYTES_PER_TOKEN = 4.0
"""A usual figure for English text and code under BPE vocabularies, until prompts have told."""


_BEFORE_USER_BYTES = 65536
_CONVERSATION_BYTES = 1024
"""Enough to tell one document from another, and little enough to be there from the first turn on."""
_LEAST_WORDS_BYTES = 16

_MAY_BE_IDS = ("prompt", "token_ids")

_URL_KEY = b'url"'
"""Ends every key behind which the APIs have a URL, or an object with one."""
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
"""A key may be spelled with these (`"image_\\u0075rl"`). No usual encoder writes them."""
_URLS_LOOKED_AT = 1000
_WINDOW_BYTES = 32768
_PICTURE_BYTES = 262144


class _Tool(msgspec.Struct):
    type: str = "function"


class Media(Enum):
    """What a body holds besides text, as far as its bytes tell."""

    NONE = 0
    INLINE = 1
    """Data URLs at most."""
    PERHAPS_FETCHED = 2
    """A URL that may be a prompt's."""


def media_in(api: Api, body: bytes | bytearray | memoryview) -> Media:
    """Looks at the whole body where it lies, since a copy of an image costs as much as sending it. What is not in
    the body is not in its prompt either; what is may be elsewhere."""
    if not api.media_url:
        return Media.NONE
    if isinstance(body, memoryview) or _escapes_letters(body):
        return Media.PERHAPS_FETCHED
    at = _rfind_key(body, _URL_KEY, len(body))
    if at < 0:
        return Media.NONE
    for _ in range(_URLS_LOOKED_AT):
        if _names(body, at + len(_URL_KEY)):
            break
        at = _rfind_key(body, _URL_KEY, at)
        if at < 0:
            return Media.INLINE if _rfind_key(body, b'file_id"', len(body)) < 0 else Media.PERHAPS_FETCHED
    return Media.PERHAPS_FETCHED


def _escapes_letters(body: bytes | bytearray) -> bool:
    """Looks at windows that begin with a backslash (a picture holds none), from behind, which is four times as
    fast."""
    at = body.find(b"\\")
    while at >= 0:
        end = at + _WINDOW_BYTES
        if body.rfind(b"\\u00", at, end + 3) >= 0 and _ESCAPED_LETTER.search(body, at, end + 4) is not None:
            return True
        at = body.find(b"\\", end)
    return False


def _rfind_key(body: bytes | bytearray, key: bytes, end: int) -> int:
    """`body.rfind(key, 0, end)` of a key with its last quote: a picture, which holds none, is passed by at twenty
    times the speed."""
    while (quote := body.rfind(b'"', 0, end)) >= 0:
        begin = max(quote - _WINDOW_BYTES, 0)
        at = body.rfind(key, begin, quote + 1)
        if at >= 0 or not begin:
            return at
        end = begin + len(key) - 1  # it may lie across the window's edge
    return -1


def _names(body: bytes | bytearray, behind: int) -> bool:
    """Whether a string stands there as a key's value, which is no data URL. (Within a string the key's quote would
    be escaped.)"""
    colon, _, value = bytes(body[behind : behind + 64]).lstrip().partition(b":")
    return not colon and not value.lstrip().startswith((b'"data:', b"{", b"[", b"n"))


def keeps_local(
    api: Api, members: Fields, media: Media = Media.PERHAPS_FETCHED, *, remote_media: bool = False
) -> str:
    """Why this request cannot be split, or "". The engine, not we, refuses what is no valid request at all.
    `remote_media`: media behind URLs are the same whoever fetches them."""
    for name in api.never:
        value = members.get(name)
        if value is not None and bytes(value) not in (NULL, FALSE):
            return name
    inner = members
    if api.sampling:
        sampling = members.get(api.sampling)
        if sampling is None or not is_object(sampling):
            return api.sampling
        inner = fields(sampling)
    for name, harmless in api.single:
        value = inner.get(name)
        if value is not None and bytes(value) != NULL and bytes(value) not in harmless:
            return name
    return _prompt_keeps_local(api, members, not remote_media and media is Media.PERHAPS_FETCHED)


def _prompt_keeps_local(api: Api, members: Fields, may_fetch: bool) -> str:
    prompt = members.get(api.prompt[0])
    if prompt is None or bytes(memoryview(prompt)[:1]) in (b"n", b"t", b"f"):
        return api.prompt[0]
    if api is COMPLETIONS and bytes(memoryview(prompt)[:1]) == b"[" and not _is_flat(bytes(prompt)):
        return "several prompts"
    if api is RESPONSES and _has_server_tools(members.get("tools")):
        return "tools"
    if may_fetch and api.media_url and _fetches_media(api, prompt):
        return "remote media"
    return ""


def _is_flat(array: bytes) -> bool:
    """A list of token ids is one prompt; a list that holds strings or lists is several."""
    return array.find(b'"') < 0 and array.find(b"[", 1) < 0 and array.find(b"{") < 0 and len(array) > 2


def _has_server_tools(tools: msgspec.Raw | None) -> bool:
    """Tools that the engine runs itself make it generate several times with one handoff."""
    if tools is None or bytes(tools) == NULL:
        return False
    try:
        return any(tool.type != "function" for tool in msgspec.json.decode(tools, type=list[_Tool]))
    except (msgspec.MsgspecError, RecursionError):
        return True


def _may_hold_media(api: Api, prompt: msgspec.Raw) -> bool:
    """Whether more than text may be in it; looks at the bytes alone."""
    text = bytes(prompt)
    return text.rfind(api.media_url) >= 0 or _escapes_letters(text)


def is_text(api: Api, members: Fields, media: Media) -> bool:
    """Whether its token ids are all that there is of this prompt."""
    if media is Media.NONE:
        return True
    # A key that ends like a medium's may be a tool's. In what is this large it is a picture's, most likely.
    prompt = members[api.prompt[0]]
    return len(memoryview(prompt)) < _PICTURE_BYTES and not _may_hold_media(api, prompt)


def _fetches_media(api: Api, prompt: msgspec.Raw) -> bool:
    """Media that each leg would fetch for itself may change in between; data URLs cannot."""
    if not _may_hold_media(api, prompt):
        return False
    try:
        return _holds_url(msgspec.json.decode(prompt))
    except (msgspec.MsgspecError, RecursionError):
        return True


def _holds_url(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            (key in ("url", "image_url", "video_url", "audio_url", "file_url", "file_id") and _is_fetched(item))
            or _holds_url(item)
            for key, item in value.items()
            if key != "text"
        )
    return isinstance(value, list) and any(map(_holds_url, value))


def _is_fetched(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("data:")


def is_token_ids(api: Api, members: Fields) -> bool:
    """Whether the prompt is a list of token ids, so that its length is known exactly."""
    value = members.get(api.prompt[0])
    return value is not None and api.prompt[0] in _MAY_BE_IDS and bytes(memoryview(value)[:1]) == b"["


def exact_tokens(api: Api, members: Fields) -> int:
    """How many tokens a list of token ids has."""
    return bytes(members[api.prompt[0]]).count(b",") + 1


def prompt_bytes(api: Api, members: Fields) -> int:
    """Size of what makes up the prompt, as JSON."""
    return sum(len(memoryview(members[name])) for name in api.prompt if name in members)


def conversation(api: Api, members: Fields) -> int:
    """What requests have in common that share KV, as a number above 0: where the first user's words begin, else the
    prompt."""
    prompt = bytes(memoryview(members[api.prompt[0]])[:_BEFORE_USER_BYTES])
    begin = max(prompt.find(b'"user"'), 0)  # within a string its quotes would be escaped
    end = prompt.find(b'"}', begin, begin + _CONVERSATION_BYTES)  # the message's; what follows it is another turn's
    if 0 <= end < begin + _LEAST_WORDS_BYTES:  # the role stands behind the words
        begin, end = 0, -1
    return zlib.crc32(prompt[begin : begin + _CONVERSATION_BYTES if end < 0 else end]) or 1


__all__ = [
    "Media",
    "NotAnObject",
    "conversation",
    "exact_tokens",
    "is_text",
    "is_token_ids",
    "keeps_local",
    "media_in",
    "prompt_bytes",
]
