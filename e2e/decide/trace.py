"""The mixed load: short chats, long documents, later turns of conversations, bursts. Data; it must not know by
which way anything goes.

Prompts are token ids, so that everybody knows exactly how long they are and what of them is cached: the question is
what a rule makes of that, not how well it guesses. Prompts of one seed are the same in every run.
"""

from __future__ import annotations

import random

from e2e.latency.driver import Client, Turn

CHAT, DOCUMENT, FIRST_TURN, LATER_TURN, BURST = "chat", "document", "first turn", "later turn", "burst"
KINDS = (CHAT, DOCUMENT, FIRST_TURN, LATER_TURN, BURST)
WINDOW_S = 20.0
_IDS = (300, 2000)
"""Within every vocabulary that is used here, and past its control tokens."""


def _turn(draw: random.Random, tokens: tuple[int, int], answer: tuple[int, int]) -> Turn:
    ids = tuple(draw.randrange(*_IDS) for _ in range(draw.randint(*tokens)))
    return Turn("", draw.randint(*answer), ids)


def mixed(seed: int) -> list[Client]:
    """About 31 requests in 20 s: nine chats and three documents at random times, three conversations of three turns
    whose later ones bring few new tokens, two bursts of five chats at once."""
    draw = random.Random(seed)
    clients = []
    for number in range(9):
        at_s = (number + draw.random()) * WINDOW_S / 9
        clients.append(Client(CHAT, (_turn(draw, (40, 160), (48, 96)),), at_s))
    for number in range(3):
        at_s = (number + draw.random()) * WINDOW_S / 3
        clients.append(Client(DOCUMENT, (_turn(draw, (1000, 1800), (48, 64)),), at_s))
    for number in range(3):
        turns = (
            _turn(draw, (250, 600), (48, 80)),
            *(_turn(draw, (6, 40), (48, 80)) for _ in range(2)),
        )
        pause_s = draw.uniform(0.8, 2.0)
        at_s = (number + draw.random()) * WINDOW_S / 4
        clients.append(Client(FIRST_TURN, turns, at_s, pause_s, remembers=True, later_kind=LATER_TURN))
    for number in range(2):
        at_s = (number + 0.3 + 0.4 * draw.random()) * WINDOW_S / 2
        clients += [Client(BURST, (_turn(draw, (60, 200), (48, 96)),), at_s) for _ in range(5)]
    return sorted(clients, key=lambda client: client.at_s)
