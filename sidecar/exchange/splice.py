"""JSON bodies, changed without being decoded: what we do not name is copied byte for byte.

Key order, number spelling, escapes and white space of everything that is not ours survive, so both legs mean
the same prompt. A key is what it means to the engine's parser: `"\\u006bv_transfer_params"` is ours too, and of
a repeated key the last counts. This file knows JSON and nothing else.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from sidecar.exchange.apis import FORBIDDEN, FORBIDDEN_INSIDE, Api

Fields = dict[str, msgspec.Raw]
Body = bytes | bytearray | memoryview

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode


class NotAnObject(ValueError):
    """The body is not a JSON object that we are sure to read as the engine would."""


def fields(body: Body | msgspec.Raw) -> Fields:
    """Top-level members of a JSON object; the values are views into `body`.

    Raises `NotAnObject` for everything else, also for what the engine's own parser would let pass (NaN, a lone
    surrogate, another encoding, nesting beyond ours): what we could not read must not be relayed unread.
    """
    try:
        return _decode_object(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotAnObject(str(error)) from None
    except RecursionError:
        raise NotAnObject("nested too deeply") from None


def fields_if_object(body: Body) -> Fields:
    """Top-level members of a body on a path that we do not know; empty if it is no JSON object.

    Raises `NotAnObject` for what may be one to a more lenient parser and names what a client may never set.
    """
    if not body:
        return {}
    try:
        return fields(body)
    except NotAnObject:
        plain = bytes(body).replace(b"\0", b"")  # UTF-16 and UTF-32 are JSON to Python's parser
        begins = plain.lstrip(b"\xef\xbb\xbf\xff\xfe \t\n\r")[:1]  # behind a byte order mark
        if begins == b"{" and (b"transfer_params" in plain or b"\\u" in plain):
            raise
        return {}


def is_object(value: msgspec.Raw) -> bool:
    """Whether this member's value is a JSON object."""
    return bytes(memoryview(value)[:1]) == b"{"


# -- what a client may never set -----------------------------------------------------------------------------


def _members_to_remove(top: Fields) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(key,) for key in FORBIDDEN if key in top]
    for path in FORBIDDEN_INSIDE:
        inner: Fields | None = top
        for name in path:
            raw = inner.get(name) if inner is not None else None
            # A value that is no object holds no keys; the engine refuses it by itself.
            inner = fields(raw) if raw is not None and is_object(raw) else None
        if inner is not None:
            found += [(*path, key) for key in FORBIDDEN if key in inner]
    return found


def without_forbidden(body: Body, top: Fields) -> bytes | None:
    """`body` without the members that a client may never set, or None if it holds none of them."""
    paths = _members_to_remove(top)
    return remove(body, paths) if paths else None


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
_SPACE = b" \t\n\r"
_BRACE = re.compile(rb"\{")
_EMPTY = re.compile(rb"\{[ \t\n\r]*\}")


def _members(body: bytes | bytearray, start: int) -> tuple[list[tuple[str, int, int, int]], int]:
    """(key, offset of the key, offset of the value, end of the value) of the object at `start`, and its end."""
    found: list[tuple[str, int, int, int]] = []
    depth = 0
    key, key_at, value_at = "", -1, 0
    last_end = start + 1
    for token in _TOKEN.finditer(body, start):
        char = body[token.start()]
        if depth == 1 and key_at < 0 and char == 0x22:  # the first string of a member is its key
            key, key_at = _decode_string(token.group()), token.start()
            value_at = body.index(b":", token.end()) + 1
            while body[value_at] in _SPACE:
                value_at += 1
            last_end = value_at
            continue
        if char in b"{[":
            depth += 1
        elif char in b"}]":
            depth -= 1
        if depth == 0 or (depth == 1 and char == 0x2C):
            if key_at >= 0:
                end = token.start()
                while body[end - 1] in _SPACE:
                    end -= 1
                found.append((key, key_at, value_at, max(end, last_end)))
                key_at = -1
            if depth == 0:
                return found, token.end()
    raise NotAnObject("object does not end")


def remove(body: Body, paths: Iterable[tuple[str, ...]]) -> bytes:
    """`body` (valid JSON) without every member that one of `paths` names; all other bytes stay.

    A repeated or escaped spelling of a key is removed as well. With the member goes one comma and the white
    space around it.
    """
    if isinstance(body, memoryview):
        body = bytes(body)
    start = 0
    while body[start] in _SPACE:
        start += 1
    cuts: list[tuple[int, int]] = []
    _cuts(body, start, tuple(paths), cuts)
    view = memoryview(body)  # a body may be large: one copy is enough
    out, at = [], 0
    for begin, end in sorted(cuts):
        out.append(view[at:begin])
        at = end
    out.append(view[at:])
    return b"".join(out)


def _cuts(
    body: bytes | bytearray, start: int, paths: tuple[tuple[str, ...], ...], cuts: list[tuple[int, int]]
) -> None:
    members, _ = _members(body, start)
    gone = {path[0] for path in paths if len(path) == 1}
    kept_end = -1
    for index, (key, key_at, value_at, end) in enumerate(members):
        if key not in gone:
            kept_end = end
            inner = tuple(path[1:] for path in paths if len(path) > 1 and path[0] == key)
            if inner and body[value_at : value_at + 1] == b"{":
                _cuts(body, value_at, inner, cuts)
        elif any(later[0] not in gone for later in members[index + 1 :]):
            cuts.append((key_at, members[index + 1][1]))
        else:  # nothing is kept behind it: the comma before it goes too
            cuts.append((kept_end if kept_end >= 0 else key_at, members[-1][3]))
            return


# -- the two legs --------------------------------------------------------------------------------------------


def _parts(members: Fields, replace: Mapping[str, bytes], drop: frozenset[str]) -> list[bytes | msgspec.Raw]:
    """A JSON object of `members`, with `replace` in place of (or after) theirs and without `drop`, in parts."""
    missing = dict(replace)
    parts: list[bytes | msgspec.Raw] = []
    for key, value in members.items():
        if key in drop:
            continue
        parts.append(_spelled(key))
        parts.append(missing.pop(key, value))
    for key, own in missing.items():
        parts.append(_spelled(key))
        parts.append(own)
    if not parts:
        return [b"{}"]
    parts[0] = b"{" + bytes(parts[0])[1:]  # in place of the comma
    parts.append(b"}")
    return parts


def _object(members: Fields, replace: Mapping[str, bytes], drop: frozenset[str]) -> bytes:
    return b"".join(_parts(members, replace, drop))


def _in_large_parts(parts: list[bytes | msgspec.Raw], size: int) -> list[bytes | memoryview]:
    """The same bytes in few parts: what is large stays where it is, what is small is joined. `size`: bytes of the
    body that `parts` are of."""
    if size < LARGE_BYTES:
        return [b"".join(parts)]
    out: list[bytes | memoryview] = []
    small: list[bytes | msgspec.Raw] = []
    for part in parts:
        view = memoryview(part)
        if len(view) < LARGE_BYTES:
            small.append(part)
            continue
        out += (b"".join(small), view)
        small.clear()
    out.append(b"".join(small))
    return out


def with_members(members: Fields, replacements: Mapping[str, bytes]) -> bytes:
    """A JSON object of `members` in which these values are replaced (or added)."""
    return _object(members, replacements, frozenset())


def replaced(body: bytes, replacements: Mapping[str, bytes]) -> bytes:
    """`with_members` of the object `body`, without decoding it where the members are plainly spelled."""
    if b"\\" in body:  # a key may be spelled in a way that only a decoder sees
        return with_members(fields(body), replacements)
    changed = body
    for key, own in replacements.items():
        name = b'"%b"' % key.encode()
        at = changed.find(name)
        value = _PLAIN_VALUE.match(changed, at + len(name)) if at >= 0 else None
        # Not there, or spelled twice, whatever the second one is: it may be the one that counts.
        if value is None or changed.rfind(name) != at:
            return with_members(fields(body), replacements)
        changed = b"%b%b:%b%b" % (changed[:at], name, own, changed[value.end() :])
    return changed


_PLAIN_VALUE = re.compile(rb'\s*:\s*(?:"[^"]*"|[0-9]+)')
"""Behind a key: a number, or a string without escapes."""

_spellings: dict[str, bytes] = {}
_MAX_SPELLINGS = 512

LARGE_BYTES = 32768
"""Of a JSON value: copying less is cheaper than one more buffer to send."""


def _spelled(key: str) -> bytes:
    """`,"key":`; remembered for the first keys seen, since clients use a few dozen."""
    spelling = _spellings.get(key)
    if spelling is None:
        spelling = b"," + msgspec.json.encode(key) + b":"
        if len(_spellings) < _MAX_SPELLINGS and len(key) <= 64:
            _spellings[key] = spelling
    return spelling


def prefill_body(
    api: Api, members: Fields, size: int, params: bytes, *, wants_token_ids: bool = False
) -> list[bytes | memoryview]:
    """The prefill leg's body in parts: one token, no stream, one sample, nothing that could end it early. `size` is
    the bytes that the client's body has (a large member of it is not copied), `params` the JSON that the connector
    puts into `kv_transfer_params`, b"" for none."""
    own = {"kv_transfer_params": params} if params else {}
    if wants_token_ids:
        own["return_token_ids"] = b"true"
    if not api.sampling:
        return _in_large_parts(_parts(members, {**api.caps, **own}, api.drop), size)
    inner = members.get(api.sampling)
    capped = _object(fields(inner) if inner is not None else {}, api.caps, api.drop)
    outer = {**api.outer_caps, api.sampling: capped, **own}
    return _in_large_parts(_parts(members, outer, api.outer_drop), size)


def decode_body(body: Body, params: bytes) -> tuple[bytes, memoryview]:
    """The decode leg's body in two parts: the client's own bytes with `kv_transfer_params` put in front of its
    first member. `body` is a JSON object without that key; it is not copied."""
    brace = _BRACE.search(body).start()  # type: ignore[union-attr]
    rest = memoryview(body)[brace + 1 :]
    empty = _EMPTY.match(body, brace) is not None
    return bytes(body[:brace]) + b'{"kv_transfer_params":' + params + (b"" if empty else b","), rest
