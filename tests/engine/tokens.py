"""A tokeniser and a "model" that need no weights: four bytes are one token, and text follows from the KV read.

Knows nothing of requests, blocks on loan or HTTP. Token ids are `array('I')`, so that a prompt of a megabyte
is one buffer and not a quarter of a million objects.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator

VOCAB_SIZE = 2**31
EOS_TOKEN = 0
BYTES_PER_TOKEN = 4

_CONSONANTS = "bdfgklmnprst"
_VOWELS = "aeiou"
# 256 words of four bytes (a space and three letters), so that one word is one token both ways.
_WORDS = [f" {a}{b}{c}" for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS][:256]


def encode(text: str) -> array[int]:
    """The token ids of `text`: a little-endian word for each four bytes, the last one padded with NUL.

    A word whose top byte is not ASCII takes three bytes instead, so every id is below 2**31.
    """
    data = text.encode("utf-8", "surrogatepass")
    if data.isascii():
        return from_bytes(data + bytes(-len(data) % BYTES_PER_TOKEN))
    tokens = array("I")
    start = 0
    while start < len(data):
        word = data[start : start + 4]
        if len(word) == 4 and word[3] >= 0x80:
            word = word[:3]
        start += len(word)
        tokens.append(int.from_bytes(word, "little"))
    return tokens


def decode(tokens: Iterable[int]) -> str:
    data = b"".join(token.to_bytes(4, "little").rstrip(b"\0") for token in tokens)
    return data.decode("utf-8", "replace")


def from_bytes(data: bytes) -> array[int]:
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def to_bytes(tokens: array[int]) -> bytes:
    return tokens.tobytes()


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def words(seed: bytes) -> Iterator[str]:
    """The endless answer that follows from `seed`."""
    counter = 0
    while True:
        for byte in hashlib.blake2b(seed + counter.to_bytes(4, "little"), digest_size=64).digest():
            yield _WORDS[byte]
        counter += 1


def natural_length(seed: bytes) -> int:
    """How many words the answer has before the model itself ends it: 12 to 43."""
    return 12 + seed[0] % 32
