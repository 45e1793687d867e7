"""Prompts that no engine has seen, of a chosen length, in plain English. It must not know who sends them."""

from __future__ import annotations

import random

TOKENS_PER_SENTENCE = 28
"""About, with the tokenizer of SmolLM2."""
PEOPLE = ("harbour master", "pilot", "clerk", "lighthouse keeper", "sailmaker", "ferryman", "widow", "smith")
DEEDS = (
    "counted the boats at first light and wrote the number into a book with a green cover",
    "went out in a small boat, read the wind on the water and brought the ship past both sandbanks",
    "said that the tide would be late, and that whoever did not believe it might ask the gulls",
    "lent three coils of rope to a stranger and never heard of the rope or of the stranger again",
    "painted the door blue because the barrel of blue paint had come ashore and belonged to nobody",
    "kept a lamp in the window all winter, although the road had been closed since the flood",
)


def make_prompt(sentences: int, number: int) -> str:
    """A prompt that no engine has seen: the number comes first, so no block of it is in a prefix cache."""
    draw = random.Random(number)
    story = [f"On day {day} the {draw.choice(PEOPLE)} {draw.choice(DEEDS)}." for day in range(1, sentences + 1)]
    if not story:
        return f"{number} is my lucky number. What is the capital of France?"
    return f"Story {number}. {' '.join(story)} Say in one sentence what this story is about."
