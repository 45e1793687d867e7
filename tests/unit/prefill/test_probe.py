"""What an engine says of its health, and its metrics of its KV cache."""

from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
import pytest

from sidecar.connectors.connector import EngineFacts
from sidecar.decision.signals import Load
from sidecar.prefill.probe import EngineProbe, parse_facts
from sidecar.prefill.served import Served
from sidecar.prefill.slots import Slots
from tests.unit import clock

LINE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",cpu_offload_gb="0",'
    'enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",num_cpu_blocks="None",'
    'num_gpu_blocks="2048",num_gpu_blocks_override="None"} 1.0'
)


@pytest.mark.parametrize(
    ("metrics", "facts"),
    [
        (f"# HELP x\n{LINE}\n", EngineFacts(16, 2048, ranks=1)),
        (f"{LINE}\n", EngineFacts(16, 2048, ranks=1)),
        (LINE.replace('"2048"', '"None"'), EngineFacts(16, 0, ranks=1)),
        (LINE.replace('block_size="16"', 'block_size=""'), EngineFacts(0, 2048, ranks=1)),
        (LINE.replace('"16"', '"-16"'), EngineFacts(0, 2048, ranks=1)),
        (LINE.replace('"16"', '"1.6"'), EngineFacts(0, 2048, ranks=1)),
        (LINE.replace('"16"', '"\u0661"'), EngineFacts(0, 2048, ranks=1)),
        (LINE.replace('"16"', f'"{2**64}"'), EngineFacts(0, 2048, ranks=1)),
        (LINE.replace('"16"', f'"{"9" * 5000}"'), EngineFacts(0, 2048, ranks=1)),
        ("", EngineFacts()),
        ("vllm:cache_config_info{} 1.0", EngineFacts()),
        ("x" + LINE, EngineFacts()),
        ("vllm:num_requests_running 0\n" * 1000 + LINE, EngineFacts(16, 2048, ranks=1)),
        (
            f"{LINE}\n" + LINE.replace('"2048"', '"1024"').replace('engine="0"', 'engine="1"'),
            EngineFacts(16, 2048, ranks=2),
        ),
    ],
    ids=range(14),
)
def test_facts(metrics: str, facts: EngineFacts) -> None:
    assert parse_facts(metrics) == facts


class Engine:
    """An aiohttp session that reaches one engine, and its response."""

    def __init__(self, status: int = 200, body: bytes = b"", error: Exception | None = None) -> None:
        self.status = status
        self.body = body
        self.error = error
        self.urls: list[str] = []
        self.headers: dict[str, str] | None = None
        self.content = self

    def get(
        self,
        url: str,
        *,
        timeout: aiohttp.ClientTimeout,
        allow_redirects: bool,
        headers: dict[str, str] | None = None,
    ) -> Self:
        assert timeout.total == 2.5
        assert not allow_redirects, "an engine may not send us elsewhere"
        self.urls.append(url)
        self.headers = headers
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        """As it comes from the network: in pieces."""
        for begin in range(0, len(self.body), 65536):
            yield self.body[begin : begin + 65536]

    async def __aenter__(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def ask(engine: Engine, what: str) -> Any:
    answers: list[Any] = []

    async def main() -> None:
        probe = EngineProbe(engine, "http://[fd00::1]:8000")  # type: ignore[arg-type]
        answers.append(await getattr(probe, what)(2.5))

    clock.run(main())
    return answers[0]


ERRORS = {
    "Connection refused": aiohttp.ClientOSError(111, "Connection refused"),
    "ServerDisconnectedError": aiohttp.ServerDisconnectedError(),
    "No route to host": OSError(113, "No route to host"),
    "2.5 s": TimeoutError(),
}


@pytest.mark.parametrize(
    ("status", "problem"), [(200, ""), (503, "says 503"), (204, "says 204"), (302, "says 302")]
)
def test_health(status: int, problem: str) -> None:
    engine = Engine(status)
    answer = ask(engine, "healthy")
    assert problem in answer
    assert bool(answer) is bool(problem)
    assert engine.urls == ["http://[fd00::1]:8000/health"]


@pytest.mark.parametrize("hint", ERRORS)
def test_engines_that_do_not_answer(hint: str) -> None:
    assert hint in ask(Engine(error=ERRORS[hint]), "healthy")
    assert ask(Engine(error=ERRORS[hint]), "facts") == EngineFacts()


@pytest.mark.parametrize("status", [200, 404, 500, 302])
def test_facts_over_http(status: int) -> None:
    engine = Engine(status, LINE.encode() + b"\n\xff")
    assert ask(engine, "facts") == (EngineFacts(16, 2048, ranks=1) if status == 200 else EngineFacts())
    assert engine.urls == ["http://[fd00::1]:8000/metrics"]


def test_metrics_that_come_in_pieces() -> None:
    engine = Engine(body=b"x 1\n" * 50_000 + LINE.encode() + b"\nvllm:num_requests_running 3.0\n")
    assert ask(engine, "facts") == EngineFacts(16, 2048, ranks=1)
    assert ask(engine, "load") == Load(3, 0)
    assert ask(Engine(404), "load") is None


def test_endless_metrics() -> None:
    """What lies beyond 8 MiB is not read."""
    assert ask(Engine(body=b"x 1\n" * (3 << 20) + LINE.encode()), "facts") == EngineFacts()


# -- models and adapters -----------------------------------------------------------------------------------------

MODELS = b'{"object":"list","data":[{"id":"base","parent":null},{"id":"french","parent":"base"}]}'
SLOTS = b'vllm:lora_requests_info{max_lora="1",running_lora_adapters="french",waiting_lora_adapters=""} 1.0\n'


@pytest.mark.parametrize("status", [200, 401, 404, 500, 302])
def test_models_and_slots_over_http(status: int) -> None:
    engine = Engine(status, MODELS)
    served = Served(frozenset({"base"}), frozenset({"french"}))
    assert ask(engine, "served") == (served if status == 200 else None)
    assert engine.urls == ["http://[fd00::1]:8000/v1/models"]
    assert engine.headers == {"connection": "close"}, "it would be idle until the engine closes it"
    engine = Engine(status, SLOTS)
    assert ask(engine, "slots") == (Slots(1, frozenset({"french"})) if status == 200 else None)
    assert engine.urls == ["http://[fd00::1]:8000/metrics/?name[]=vllm:lora_requests_info"]


@pytest.mark.parametrize(("status", "loads"), [(404, False), (405, True), (401, True), (200, True), (500, True)])
def test_whether_an_engine_may_load_by_name(status: int, loads: bool) -> None:
    assert ask(Engine(status), "loads_adapters") is loads


@pytest.mark.parametrize("hint", ERRORS)
def test_engines_that_do_not_answer_tell_nothing_of_models(hint: str) -> None:
    assert ask(Engine(error=ERRORS[hint]), "served") is None
    assert ask(Engine(error=ERRORS[hint]), "slots") is None
    assert ask(Engine(error=ERRORS[hint]), "loads_adapters") is True


def test_endless_lists() -> None:
    assert ask(Engine(body=MODELS + b" " * (5 << 20)), "served") is None
    assert ask(Engine(body=SLOTS + b"x 1\n" * (1 << 18)), "slots") is None
