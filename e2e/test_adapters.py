"""LoRA adapters on real engines: pulled KV is the adapter's, and what only one side has ends well.

The engines load adapters while they run, so a prefill engine without one may still be able to load it by name: it
has no resolver, and says so with 404.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e import models
from e2e.adapters import make_adapter
from e2e.asking import APIS, COMPLETIONS, Api, ask, eventually, local_text, prompt_for, request_body, text_of
from e2e.install import engine_python
from e2e.pair import LEASE_S, Pair, idle, paired
from e2e.rig import Rig
from tests.engine.record import Reply, send

PROMPT_TOKENS = 400
TOLD_WITHIN_S = 30.0
"""An endpoint with adapters is asked every 20 to 24 s."""


class Folders(NamedTuple):
    french: Path
    german: Path


@pytest.fixture(scope="module")
def folders() -> Iterator[Folders]:
    model = models.model_path("tiny", engine_python())
    with tempfile.TemporaryDirectory() as folder:
        yield Folders(
            *(make_adapter(Path(folder) / name, model, seed) for seed, name in enumerate(Folders._fields))
        )


@pytest.fixture(scope="module")
def adapter_rig(folders: Folders) -> Iterator[Rig]:
    """Engines with the adapter `french` and two slots."""
    flags = (
        "--enable-lora",
        "--max-loras",
        "2",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        f"french={folders.french}",
    )
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Rig("tiny", prefill=1, decode=1, lease_seconds=LEASE_S, extra_flags=flags, extra_env=environment) as rig:
        yield rig


@pytest.fixture
def pair(adapter_rig: Rig) -> Iterator[Pair]:
    with paired(adapter_rig.prefill[0], adapter_rig.decode[0]) as pair:
        yield pair


def load(url: str, name: str, path: Path) -> Reply:
    return send(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


@pytest.mark.parametrize("api", APIS, ids=str)
def test_the_adapters_own_kv_is_pulled(pair: Pair, api: Api) -> None:
    sidecar = pair.serve()
    before = pair.pulled_tokens()
    body = {**request_body(api, prompt_for(api, PROMPT_TOKENS)), "model": "french"}
    answer = ask(sidecar, api, body)
    assert answer.decision == f"remote; prefill={pair.prefill.address}"
    assert pair.pulled_tokens() - before >= PROMPT_TOKENS // 2
    assert text_of(answer) == local_text(pair.decode, api, body)
    assert text_of(answer) != local_text(pair.decode, api, {**body, "model": "tiny"})
    idle(sidecar)


def test_an_adapter_is_loaded_on_one_side_and_then_on_the_other(pair: Pair, folders: Folders) -> None:
    """Through the sidecar on decode; there it is used at once. On prefill behind its back."""
    sidecar = pair.serve()

    def decision() -> str:
        body = {**request_body(COMPLETIONS, prompt_for(COMPLETIONS, PROMPT_TOKENS)), "model": "german"}
        answer = ask(sidecar, COMPLETIONS, body)
        assert answer.status == 200, answer.body
        assert text_of(answer) == local_text(pair.decode, COMPLETIONS, body)
        return answer.decision.partition("; prefill")[0]

    eventually(lambda: '"adapters"' in sidecar.admin("GET", "/endpoints")[1])
    assert load(f"http://127.0.0.1:{sidecar.port}", "german", folders.german).status == 200
    # Nobody has told yet, and the prefill engine may have it. It does not, and the client knows nothing of it.
    assert [decision() for _ in range(3)] == ["local; reason=model"] * 3
    assert load(pair.prefill.url, "german", folders.german).status == 200
    eventually(lambda: decision() == "remote", TOLD_WITHIN_S)
    assert "german" not in sidecar.metrics().text
    unload = {"lora_name": "german"}
    assert send(f"http://127.0.0.1:{sidecar.port}", "/v1/unload_lora_adapter", unload).status == 200
    body = {**request_body(COMPLETIONS, prompt_for(COMPLETIONS, PROMPT_TOKENS)), "model": "german"}
    assert ask(sidecar, COMPLETIONS, body).status == 404
    assert send(pair.prefill.url, "/v1/unload_lora_adapter", unload).status == 200
    idle(sidecar)


def test_slots_are_known_from_one_family_of_metrics(pair: Pair) -> None:
    body = {**request_body(COMPLETIONS, prompt_for(COMPLETIONS, 40)), "model": "french"}
    assert ask(pair.prefill, COMPLETIONS, body).status == 200
    one = send(pair.prefill.url, "/metrics/?name[]=vllm:lora_requests_info", method="GET").body.decode()
    assert 'max_lora="2"' in one
    assert 'running_lora_adapters="french"' in one
    assert {line.split("{")[0] for line in one.splitlines() if line[0] != "#"} == {"vllm:lora_requests_info"}
