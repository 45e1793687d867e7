"""What a prompt costs here and there, in seconds, learnt from what the sidecar sees. No I/O, no clock.

    local  = wait here + T(u, c)                         T(u, c) = a0 + a1 u + a2 u (u/2 + c)
    remote = wait there + T_there(n, 0) + x0 + x1 (n - c)
    stall  = T(u, c) - a0
    local if local + price * streams * stall <= remote
    price  = weight * max(used^4, stall / 3 s), at most weight

n: prompt tokens, c: of which the decode engine holds the KV, u = n - c; all in thousands below. The stall is what
each running stream loses while the prompt is computed between its tokens: all but a0, in which the prompt waits for
the step that runs when it comes, and for one of its own. Attention makes the cost of a token grow with those before
it, hence the quadratic term. `used` is how much of the allowance of long gaps is used up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

FORGET = 0.98
"""Weight of a sample after each later one: the last fifty count."""
HALF_LIFE_S = 20.0
"""And half as much after so long, as far as no less than `SAMPLES_TO_KNOW` of them is left: where few prompts come,
fifty are minutes, and what an engine takes has changed since."""
SAMPLES_TO_KNOW = 8
PRIOR_S2 = 1e-6
"""A coefficient twice as large as the prior's, or 0, weighs as much as an error of 1 ms in one sample."""
SOLVED_EVERY = 4
"""Samples, once it is known, or `SOLVED_AFTER_S`."""
SOLVED_AFTER_S = 1.0
REACH = 4.0
"""A fit is trusted for prompts up to so many times the longest that it has seen."""
FIRST_REACH_TOKENS = 1024
TRIED_BESIDE_STREAMS_TOKENS = 256
"""What is computed here to learn what it costs while streams run is no longer than this."""
TRIED_EVERY, TRIED_EVERY_MAX = 32, 256
"""Prompts in a row that are computed here because remote is dearer, until one is sent there all the same; doubled
each time that it still is. Nothing else would tell that it no longer is."""
DOUBTED = 0.02
"""Of a sample, what all those before count for when the next one is such a prompt's."""
OUTLIER = 4.0
"""A sample counts for at most so many times the usual error: one stalled step must not bend the fit."""
HYSTERESIS = 0.1
"""The other side must be cheaper by this share before decisions change sides."""
UNBEARABLE_S = 3.0
"""A stall of so many seconds has its full price however rare it is; shorter ones in proportion."""


class Fit:
    """A linear function with coefficients that are not negative: least squares over samples that are forgotten in
    time. What these leave open, as those of prompts that are all of one length do, is shared out as in the prior.
    """

    def __init__(self, *prior: float) -> None:
        """`prior`: coefficients until samples say otherwise, in seconds, seconds per thousand tokens, ..."""
        self.coefficients = list(prior)
        self._prior = prior
        # The normal equations, in multiples of the prior's coefficients.
        size = range(len(prior))
        self._products = [[0.0 for _ in size] for _ in size]
        self._sums = [0.0 for _ in size]
        self._usual_error = 0.0
        self._weight = 0.0
        """What all samples together count for; the newest counts for 1."""
        self._at = 0.0
        self.samples = 0
        self.longest_tokens = 0

    def add(self, features: Sequence[float], seconds: float, tokens: int, at: float) -> None:
        """One measurement; `tokens` is how long the prompt was, `at` when that was, seconds of a steady clock."""
        expected = self.at(features)
        error = seconds - expected
        if self.samples >= SAMPLES_TO_KNOW:
            bound = OUTLIER * self._usual_error
            # In doubt whether it is still so slow, a quick one tells. (So many count for a bit less, as they fade.)
            is_doubted = self._weight < SAMPLES_TO_KNOW - 1
            error = min(error if is_doubted else max(error, -bound), bound)
        self._usual_error += (abs(error) - self._usual_error) / min(self.samples + 1, 20)
        age_s = max(at - self._at, 0.0)
        self._at = max(at, self._at)
        kept = FORGET
        if self._weight > SAMPLES_TO_KNOW:
            kept *= max(0.5 ** (age_s / HALF_LIFE_S), SAMPLES_TO_KNOW / self._weight)
        self._weight = kept * self._weight + 1
        shares = [a * b for a, b in zip(self._prior, features, strict=True)]
        for row, share in enumerate(shares):
            products = self._products[row]
            for column, other in enumerate(shares):
                products[column] = kept * products[column] + share * other
            self._sums[row] = kept * self._sums[row] + share * (expected + error)
        self.samples += 1
        self.longest_tokens = max(self.longest_tokens, tokens)
        if self._weight < SAMPLES_TO_KNOW or age_s >= SOLVED_AFTER_S or not self.samples % SOLVED_EVERY:
            self._solve()

    def doubt(self) -> None:
        """What it says may have changed since: the next sample counts for more than all before it."""
        kept = min(DOUBTED / self._weight, 1.0) if self._weight else 1.0
        self._weight *= kept
        self._products = [[kept * product for product in row] for row in self._products]
        self._sums = [kept * total for total in self._sums]

    def _solve(self) -> None:
        """Anew from all that is remembered, so that no error of arithmetic lives on."""
        free = list(range(len(self._prior)))
        multiples = self._multiples(free)
        while min(multiples) < 0:
            del free[multiples.index(min(multiples))]  # it is 0, for the others too
            multiples = self._multiples(free)
        self.coefficients = [0.0] * len(self._prior)
        for row, multiple in zip(free, multiples, strict=True):
            self.coefficients[row] = multiple * self._prior[row]

    def _multiples(self, free: Sequence[int]) -> list[float]:
        """Of the prior's coefficients, with all that are not `free` 0. Gaussian elimination; the prior's own weight
        makes every pivot positive."""
        rows = [[*(self._products[row][column] for column in free), self._sums[row] + PRIOR_S2] for row in free]
        for place, pivot in enumerate(rows):
            pivot[place] += PRIOR_S2
        for place, pivot in enumerate(rows):
            for row in rows[place + 1 :]:
                factor = row[place] / pivot[place]
                for column in range(place, len(row)):
                    row[column] -= factor * pivot[column]
        found: list[float] = []
        for place in reversed(range(len(rows))):
            *known, wanted = rows[place][place + 1 :]
            rest = sum(a * b for a, b in zip(known, found, strict=True))
            found.insert(0, (wanted - rest) / rows[place][place])
        return found

    def at(self, features: Sequence[float]) -> float:
        """Seconds."""
        return sum(a * b for a, b in zip(self.coefficients, features, strict=True))

    def knows(self, tokens: int) -> bool:
        """Whether it has seen enough to be asked about prompts of this length."""
        return self.samples >= SAMPLES_TO_KNOW and self.reaches(tokens)

    def reaches(self, tokens: int) -> bool:
        """Whether the prompt is not far longer than any that it has seen."""
        return tokens <= max(self.longest_tokens * REACH, FIRST_REACH_TOKENS)


class Inputs(msgspec.Struct, frozen=True):
    """What one decision rests on; no prompt. Recorded in `/decisions`."""

    tokens: int
    """n: prompt tokens."""
    cached: int = 0
    """c: of which the decode engine holds the KV."""
    streams: float = 0.0
    """Requests that the decode engine generates for, now or lately."""
    waiting: int = 0
    """Requests that wait at the decode engine."""
    local_ahead: int = 0
    """Prompt tokens that this sidecar has sent to the decode engine and that are not computed yet."""
    prefill_ahead: int = 0
    """The same of the least loaded prefill endpoint."""
    long_gaps_used: float = 1.0
    """Share of the gaps between tokens that local prompts may make long which they have, this one included; 1: all
    (`Allowance`)."""


class Verdict(msgspec.Struct, frozen=True):
    """Where, why, and what both ways are thought to cost (0: not known)."""

    remote: bool
    reason: str
    local_seconds: float = 0.0
    remote_seconds: float = 0.0
    stall_seconds: float = 0.0
    """What the running streams lose together if the prompt is computed here, before it is weighted."""
    static: str = ""
    """Why the static rule decided: `off`, `stale` (the engine does not tell its load), `unfitted` (samples are
    wanting) or `unseen` (remote is thought dear, and was not measured for long); "" if the costs did."""


def _prefill(new: int, cached: int = 0) -> tuple[float, float, float]:
    u, c = new / 1000, cached / 1000
    return 1.0, u, u * (u / 2 + c)


def price_share(long_gaps_used: float, stall_s: float) -> float:
    """Of the weight of what streams lose, what counts: little while long gaps are rare and this one is no very long
    one. The power leaves most of the allowance cheap, and the last of it to those who gain most."""
    return min(max(long_gaps_used**4, stall_s / UNBEARABLE_S), 1.0)


@dataclass(slots=True)
class Costs:
    """The fits of one decode engine and of the prefill engines that it pulls from."""

    local: Fit
    prefill: Fit
    pull: Fit
    weight: float
    """How much a second that running streams lose counts against one that the new request waits."""
    was_remote: bool = True
    tries: int = 0
    declined: int = 0
    """Prompts in a row that were not sent remote because that is thought dearer."""
    declined_tokens: int = 0
    """Of all these."""
    patience: int = TRIED_EVERY

    @classmethod
    def make(cls, weight: float) -> "Costs":
        # Of an 8 B model on one accelerator, by orders of magnitude; eight samples outweigh them.
        return cls(Fit(0.02, 0.03, 0.0005), Fit(0.02, 0.03, 0.0005), Fit(0.02, 0.005), weight)

    # -- what was measured --

    def computed_here(self, new: int, cached: int, seconds: float, at: float = 0.0) -> None:
        """First token of a prompt that the decode engine computed with no other of ours before it."""
        self.local.add(_prefill(new, cached), seconds, new, at)

    def computed_there(self, new: int, seconds: float, at: float = 0.0) -> None:
        """Whole prefill leg of a prompt of which the prefill engine computed `new` tokens, with none before it."""
        self.prefill.add(_prefill(new), seconds, new, at)

    def pulled(self, tokens: int, seconds: float, at: float = 0.0) -> None:
        """First token of a prompt whose KV the decode engine pulled."""
        self.pull.add((1.0, tokens / 1000), seconds, tokens, at)

    # -- what follows --

    def weigh(self, inputs: Inputs) -> Verdict:
        """Local or remote. Reasons: `decode_idle`, `prefill_busy`, `cost` for local; `decode_busy`, `cost`, `long`
        for remote."""
        tokens, cached = inputs.tokens, inputs.cached
        new = tokens - cached
        is_idle = inputs.streams < 0.5 and not inputs.waiting
        is_rare = inputs.long_gaps_used < 1
        local_known = self.local.knows(new)
        if not (local_known and self.prefill.knows(tokens) and self.pull.knows(tokens)):
            may_try = is_idle or (is_rare and new <= TRIED_BESIDE_STREAMS_TOKENS)
            return self._unfitted(new, may_try=may_try and not local_known, is_idle=is_idle)
        compute_s = self.local.at(_prefill(new, cached))
        local_s = self.local.coefficients[1] * inputs.local_ahead / 1000 + inputs.waiting * compute_s + compute_s
        wait_there_s = self.prefill.coefficients[1] * inputs.prefill_ahead / 1000
        beyond_s = self.prefill.at(_prefill(tokens)) + self.pull.at((1.0, new / 1000))
        remote_s = wait_there_s + beyond_s
        each_s = compute_s - self.local.coefficients[0]
        stall_s = 0.0 if is_idle else inputs.streams * each_s
        all_local_s = local_s + self.weight * price_share(inputs.long_gaps_used, each_s) * stall_s
        bias = 1 + (HYSTERESIS if not self.was_remote else -HYSTERESIS)
        is_remote = all_local_s > remote_s * bias
        if is_remote:
            reason = "decode_busy" if local_s <= remote_s * bias else "cost"
        elif is_idle:
            reason = "decode_idle"
        else:
            reason = "prefill_busy" if all_local_s > beyond_s * bias else "cost"
        self.was_remote = is_remote
        if is_remote:
            self.declined = self.declined_tokens = 0
            if reason == "cost":  # quicker, and not only better for the streams
                self.patience = TRIED_EVERY
        elif reason != "prefill_busy" and self._tries_again(tokens):
            return Verdict(True, "long", local_s, remote_s, stall_s, static="unseen")
        return Verdict(is_remote, reason, local_s, remote_s, stall_s)

    def _tries_again(self, tokens: int) -> bool:
        """Whether a prompt goes remote though that is thought dearer: seldom, ever more so, and none that is longer
        than they are on average, so that it costs little however dear that is."""
        self.declined += 1
        self.declined_tokens += tokens
        if self.declined < self.patience or tokens * self.declined > self.declined_tokens:
            return False
        self.declined = self.declined_tokens = 0
        self.patience = min(2 * self.patience, TRIED_EVERY_MAX)
        self.prefill.doubt()
        self.pull.doubt()
        return True

    def _unfitted(self, new: int, *, may_try: bool, is_idle: bool) -> Verdict:
        """The static rule; where it costs nobody much, every other prompt is computed here, so that both ways get
        known. An engine that is never idle would else never be."""
        if may_try and self.local.reaches(new):
            self.tries += 1
            if self.tries % 2 == 0:
                return Verdict(remote=False, reason="decode_idle" if is_idle else "cost", static="unfitted")
        return Verdict(remote=True, reason="long", static="unfitted")
