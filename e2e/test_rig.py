"""The rig itself on real engines: KV moves, the tiny model betrays wrong KV, and nothing is left behind.

It must not know the sidecar; what that does with real engines is tested beside it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.models import REPOSITORY
from e2e.rig import Rig
from e2e.zygote import SHARED_MEMORY, session_pids, shared_memory_prefix

if TYPE_CHECKING:
    from e2e.engines import Engine

SENTENCE = "The licensee may reproduce and distribute copies of the work in any medium. "


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tiny", prefill=1, decode=1) as rig:
        yield rig


def complete(engine: Engine, rig: Rig, prompt: str | list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {"model": rig.model_name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    response = engine.request("POST", "/v1/completions", body)
    assert response.status == 200, response.body
    answer: dict[str, Any] = response.json()
    return answer


def hand_off(rig: Rig, prompt: str | list[int], tokens: int = 16) -> str:
    """Prefill and decode as a sidecar would, by hand; the text."""
    first = complete(rig.prefill[0], rig, prompt, 1, kv_transfer_params={"do_remote_decode": True})
    second = complete(rig.decode[0], rig, prompt, tokens, kv_transfer_params=first["kv_transfer_params"])
    text: str = second["choices"][0]["text"]
    return text


def eventually(condition: Callable[[], bool], timeout_seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("repeat", [1, 60], ids=["short", "long"])
def test_a_handoff_moves_the_prompt_over_nixl_and_gives_the_same_text(rig: Rig, repeat: int) -> None:
    prompt = f"number {repeat}: {SENTENCE * repeat}"
    decode = rig.decode[0]
    before = decode.prompt_tokens_by_source()
    remote = hand_off(rig, prompt)
    after = decode.prompt_tokens_by_source()
    local = complete(decode, rig, prompt, cache_salt="not the pulled blocks")
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == local["usage"]["prompt_tokens"]
    assert after["local_compute"] == before["local_compute"]
    assert remote == local["choices"][0]["text"]


def test_a_frozen_engine_goes_on_where_it_was(rig: Rig) -> None:
    prefill = rig.prefill[0]
    prefill.stop()
    assert not prefill.healthy()
    assert prefill.alive()
    prefill.cont()
    assert eventually(prefill.healthy)


def test_a_killed_engine_comes_back_on_the_same_ports(rig: Rig) -> None:
    prefill = rig.prefill[0]
    address, old = prefill.address, prefill.pids()
    prefill.kill()
    assert prefill.pids() == []
    assert not prefill.alive()
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in old)
    prefill.restart()
    assert prefill.address == address
    before = rig.decode[0].prompt_tokens_by_source()["external_kv_transfer"]
    hand_off(rig, f"after a restart: {SENTENCE}")
    assert rig.decode[0].prompt_tokens_by_source()["external_kv_transfer"] > before


def test_the_metrics_tell_size_and_use_of_the_kv_cache(rig: Rig) -> None:
    (labels,) = rig.decode[0].metrics().labels("vllm:cache_config_info")
    assert int(labels["block_size"]) == rig.block_size
    assert int(labels["num_gpu_blocks"]) * rig.block_size >= 8192
    assert eventually(lambda: rig.decode[0].kv_usage() == 0.0)


def test_other_prompts_give_other_texts(rig: Rig) -> None:
    """Else "the same text" would say nothing about the KV that was read: one wrong block of 32 must show."""
    decode = rig.decode[0]
    prompt = [300 + (n * 7919) % 1700 for n in range(1024)]
    texts = {complete(decode, rig, prompt)["choices"][0]["text"]}
    for block in range(0, 32, 4):
        wrong = prompt.copy()
        wrong[block * 32 : block * 32 + 31] = [300 + (n * 104729) % 1700 for n in range(31)]
        texts.add(complete(decode, rig, wrong)["choices"][0]["text"])
    assert len(texts) == 9


def test_an_expired_lease_frees_the_blocks() -> None:
    with Rig("tiny", decode=0, lease_seconds=2, prog_thread="prefill") as rig:
        prefill = rig.prefill[0]
        complete(prefill, rig, SENTENCE * 20, 1, kv_transfer_params={"do_remote_decode": True})
        assert prefill.kv_usage() > 0
        assert eventually(lambda: prefill.kv_usage() == 0.0)


def test_a_load_failure_is_an_error_where_the_policy_says_so() -> None:
    with Rig("tiny", load_failure_policy="fail") as rig:
        first = complete(rig.prefill[0], rig, SENTENCE, 1, kv_transfer_params={"do_remote_decode": True})
        handoff = first["kv_transfer_params"] | {"remote_engine_id": "another"}
        body = {"model": rig.model_name, "prompt": SENTENCE, "max_tokens": 4, "kv_transfer_params": handoff}
        assert rig.decode[0].request("POST", "/v1/completions", body).status == 500


def test_nothing_is_left_after_the_end() -> None:
    with Rig("tiny", decode=1, prefill=0) as rig:
        session, folder = rig.decode[0].session, rig.folder
        assert len(session_pids(session)) >= 3  # server, engine core, worker
        assert shared_memory(session)
    assert session_pids(session) == []
    assert not shared_memory(session)
    assert not folder.exists()


def test_nothing_is_left_of_an_engine_that_crashed() -> None:
    with Rig("tiny", decode=1, prefill=0) as rig:
        decode = rig.decode[0]
        # A handoff that names no blocks ends vLLM 0.32's engine core, and that the server.
        body = {"model": rig.model_name, "prompt": SENTENCE, "kv_transfer_params": {"do_remote_prefill": True}}
        assert decode.request("POST", "/v1/completions", body).status == 500
        assert eventually(lambda: decode.pids() == [])
        session = decode.session
        decode.restart()
        assert not shared_memory(session)
        assert decode.healthy()


def shared_memory(session: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{shared_memory_prefix(session)}*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_engines_do_not_outlive_whoever_started_them(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "e2e.rig", "--prefill", "0", "--decode", "1"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as by_hand:
        try:
            assert by_hand.stdout is not None
            while "Ctrl-C" not in (line := by_hand.stdout.readline()):
                assert line, "it ended before its engine was up"
            started = descendants(by_hand.pid)
            assert len(started) >= 4  # zygote, server, engine core, worker
            by_hand.send_signal(number)
            by_hand.wait(20)
        finally:
            by_hand.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in started), 5)
    assert not any(shared_memory(pid) for pid in started)


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def test_the_real_model_knows_the_capital_of_france() -> None:
    with Rig("smollm2", prefill=0, kv_connector=None) as rig:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": rig.model_name, "messages": question, "max_tokens": 24, "temperature": 0}
        response = rig.decode[0].request("POST", "/v1/chat/completions", body)
        assert "Paris" in response.json()["choices"][0]["message"]["content"]
