"""Endpoints at a time of the test's choosing, and what was heard of them."""

from sidecar.prefill.address import AllowList, parse
from sidecar.prefill.endpoints import Endpoint, Endpoints


class Known(Endpoints):
    """Those that are configured, and those that requests name."""

    def __init__(self, *configured: str, allow: tuple[str, ...] = ("any",)) -> None:
        self.clock = 0.0
        self.heard: list[tuple[str, str]] = []
        super().__init__(
            [parse(text) for text in configured],
            AllowList(list(allow)),
            lambda: self.clock,
            learned=lambda endpoint: self.heard.append(("learned", endpoint.label)),
            forgotten=lambda endpoint: self.heard.append(("forgotten", endpoint.label)),
        )

    def pick(self, *tried: Endpoint, ordered: bool = False, may_repeat: bool = False) -> Endpoint | None:
        return self.choose(self.configured, list(tried), ordered=ordered, may_repeat=may_repeat)

    def broken(self, endpoint: Endpoint) -> None:
        self.failed(endpoint, at_once=True, trial=0)


class Discovered(Known):
    """And those that discovery brings."""

    def tell(self, *ready: str, unready: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        present = {parse(text): True for text in ready} | {parse(text): False for text in unready}
        joined, left = self.discovered(present)
        return [str(one) for one in joined], [str(one) for one in left]

    def labels(self, header: str = "") -> list[str]:
        return [one.label for one in self.candidates([header.encode()] if header else [])]
