from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engine import tokens


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_text_survives_the_tokens(text: str) -> None:
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert all(0 <= token < tokens.VOCAB_SIZE for token in ids)


@given(st.text(st.characters(codec="ascii", exclude_characters="\0")))
def test_four_bytes_are_one_token(text: str) -> None:
    assert len(tokens.encode(text)) == -(-len(text) // 4)


def test_a_word_of_an_answer_is_one_token_and_follows_from_the_seed() -> None:
    first = [word for _, word in zip(range(100), tokens.words(b"a"), strict=False)]
    assert all(len(tokens.encode(word)) == 1 for word in first)
    assert first == [word for _, word in zip(range(100), tokens.words(b"a"), strict=False)]
    assert first != [word for _, word in zip(range(100), tokens.words(b"b"), strict=False)]
