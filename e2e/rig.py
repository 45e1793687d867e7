"""A rig: prefill and decode engines that belong together, started at once, and ended with all their processes.

    with Rig(model="tiny", prefill=1, decode=1) as rig:
        rig.prefill[0].address, rig.decode[0].metrics(), rig.prefill[0].kill(), rig.prefill[0].restart()

Blocking; `async with` works too and does the waiting in a thread. It must not know the sidecar.
By hand: `python -m e2e.rig --prefill 1 --decode 1 --model tiny`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from e2e import models
from e2e.engines import HOST, NOTHING_BESIDE, QUIET_ENV, Beside, Engine, Place, RigError, Role, Zygote
from e2e.install import cache_root, engine_python, say
from tests.ports import free_ports

# The path of a Unix socket ends at 107 bytes; vLLM's sockets have names of 37, our folders in between take 20.
LONGEST_BASE = 50
# Room for about 32,000 tokens (1 KB each) and 11,000 tokens (46 KB each).
KV_CACHE_BYTES = {"tiny": 32 << 20, "smollm2": 512 << 20}


class Rig:
    """The engines, by these.

    model                `tiny`, `smollm2`, or a folder; PD_E2E_MODEL overrides it
    prefill, decode      how many engines of each
    pin                  each engine on one core: prefill on the first half of the cores, decode on the other
    block_size           tokens in a KV block
    kv_cache_bytes       size of each engine's KV cache (default by model)
    lease_seconds        how long a prefill engine keeps blocks for a reader (vLLM's own default is 30)
    load_failure_policy  what a decode engine does when KV cannot be loaded (vLLM's own default is `fail`)
    prog_thread          keep NIXL's busy progress thread: for all engines, or for one role. Tests that freeze
                         or expire an otherwise idle prefill engine need it
    kv_connector         the connector's name in vLLM, or None for engines without one
    connector_config     its kv_connector_extra_config, beside what the rig sets
    extra_flags          for all; prefill_flags and decode_flags for one role; later ones override earlier
    extra_env            environment of all engines
    tls                  how to speak to engines whose flags name a certificate
    prefill_place        the network namespace of the prefill engines, if it is not that of the rig
    consecutive          the decode engines listen on consecutive ports, like the ranks of a pod
    beside               packages and libraries that engines find besides those of their environment
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        prefill: int = 1,
        decode: int = 1,
        pin: bool = True,
        block_size: int = 32,
        kv_cache_bytes: int | None = None,
        lease_seconds: int | None = None,
        load_failure_policy: Literal["recompute", "fail"] = "recompute",
        prog_thread: bool | Role = False,
        kv_connector: str | None = "NixlConnector",
        connector_config: Mapping[str, Any] | None = None,
        extra_flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        prefill_place: Place | None = None,
        consecutive: bool = False,
        beside: Beside = NOTHING_BESIDE,
    ) -> None:
        self.model = os.environ.get("PD_E2E_MODEL") or model
        self.model_name = Path(self.model).name  # what requests say in "model"
        self.block_size = block_size
        self._kv_cache_bytes = kv_cache_bytes
        self._lease_seconds = lease_seconds
        self._load_failure_policy = load_failure_policy
        self._kv_connector = kv_connector
        self._connector_config = dict(connector_config or {})
        self._flags = {"prefill": [*extra_flags, *prefill_flags], "decode": [*extra_flags, *decode_flags]}
        self._env = dict(extra_env or {})
        self._tls = tls
        self._places: dict[Role, Place | None] = {"prefill": prefill_place, "decode": None}
        self._decode_ports = free_ports(decode) if consecutive else 0
        self._beside = beside
        self._counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
        self._pin = pin
        self._prog_thread = prog_thread
        self.folder = Path()  # logs and sockets, made by start
        self.engines: list[Engine] = []

    @property
    def prefill(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == "prefill"]

    @property
    def decode(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == "decode"]

    def start(self) -> Self:
        """Starts all engines at once and waits for them; ends them again if one fails (RigError)."""
        plain = Zygote.shared(self._beside).plain
        path = str(models.model_path(self.model, engine_python()))
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="pd-rig-", dir=base if len(base) < LONGEST_BASE else "/tmp"))
        try:
            for role, count in self._counts.items():
                for index in range(count):
                    self.engines.append(self._engine(role, index, path, plain=plain))
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.wait_healthy()
        except BaseException:
            self.close(keep_logs=True)
            raise
        return self

    def close(self, *, keep_logs: bool = False) -> None:
        """Ends every process of every engine, and says so if one could not be ended (RigError)."""
        for engine in self.engines:
            engine.kill()
        left = [pid for engine in self.engines for pid in engine.pids()]
        if not keep_logs and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
        if left:
            raise RigError(f"engines: processes {left} of {self.folder} could not be ended")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # not Ctrl-C
        self.close(keep_logs=failed)
        if failed:
            say(f"the engines' logs are kept in {self.folder}")

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *reason: object) -> None:
        await asyncio.to_thread(self.__exit__, *reason)  # type: ignore[arg-type]

    def _engine(self, role: Role, index: int, path: str, *, plain: bool) -> Engine:
        name = f"{role}-{index}"
        number = len(self.engines)
        flags = [*self._flags[role], *shlex.split(os.environ.get("VLLM_ENGINE_FLAGS", ""))]
        # A server with data parallelism has one side channel for each rank, on consecutive ports.
        side_channel_port = free_ports(_data_parallel_size(flags))
        p2p_port, bootstrap_port = free_ports(_data_parallel_size(flags)), free_ports()
        place = self._places[role]
        host = place.host if place else HOST
        port = self._decode_ports + index if self._decode_ports and role == "decode" else free_ports()
        temporary = self.folder / f"{role[0]}{index}"  # short: socket paths end at 107 bytes
        env = {
            **QUIET_ENV,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
            "VLLM_P2P_SIDE_CHANNEL_HOST": host,
            "VLLM_P2P_SIDE_CHANNEL_PORT": str(p2p_port),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
            "TMPDIR": str(temporary),
            "VLLM_RPC_BASE_PATH": str(temporary),
            **self._env,
            **dict(_own_env(number)),
        }
        if not plain:
            cache = cache_root()
            env = {
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
                "HF_HOME": str(cache / "huggingface"),
                **env,
            }
        prog_thread = self._prog_thread is True or self._prog_thread == role
        return Engine(
            role=role,
            name=name,
            port=port,
            side_channel_port=side_channel_port,
            p2p_port=p2p_port,
            bootstrap_port=bootstrap_port,
            log_path=self.folder / f"{name}.log",
            args=[*self._args(role, host, port, path, plain=plain), *flags],
            env=env,
            cores=self._cores(role, index) if self._pin and not plain else [],
            prog_thread=prog_thread,
            tls=self._tls,
            place=place,
            beside=self._beside,
        )

    def _args(self, role: Role, host: str, port: int, path: str, *, plain: bool) -> list[str]:
        args = ["--model", path, "--served-model-name", self.model_name, "--host", host, "--port", str(port)]
        args += ["--block-size", str(self.block_size), "--max-model-len", str(models.MAX_MODEL_LEN)]
        args += ["--enforce-eager", *models.FLAGS.get(self.model, [])]
        # Usage with cached tokens, and /render, /inference/v1/generate, /inference/v1/abort_requests.
        args += ["--enable-prompt-tokens-details", "--enable-scale-out"]
        size = self._kv_cache_bytes or (None if plain else KV_CACHE_BYTES.get(self.model, 512 << 20))
        if size:
            args += ["--kv-cache-memory-bytes", str(size)]
        if self._kv_connector:
            extra: dict[str, Any] = dict(self._connector_config)
            if self._lease_seconds is not None:
                extra["kv_lease_duration"] = self._lease_seconds
            config: dict[str, Any] = {
                "kv_connector": self._kv_connector,
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_load_failure_policy": self._load_failure_policy,
                "kv_connector_extra_config": extra,
            }
            if not plain:
                config["kv_buffer_device"] = "cpu"
                extra["num_threads"] = 0  # UCX worker threads beside the one that vLLM drives: none
            args += ["--kv-transfer-config", json.dumps(config)]
        return args

    @staticmethod
    def _cores(role: Role, index: int) -> list[int]:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        if half == 0:
            return cores
        mine = cores[:half] if role == "prefill" else cores[half:]
        return [mine[index % len(mine)]]


def _own_env(number: int) -> Iterator[tuple[str, str]]:
    """VLLM_ENGINE_ENV: `NAME=value` separated by blanks, {n} the engine's number (prefill first, from 0)."""
    for item in shlex.split(os.environ.get("VLLM_ENGINE_ENV", "")):
        name, equals, value = item.partition("=")
        if not equals:
            raise RigError(f"engines: VLLM_ENGINE_ENV has {item!r}, which is not NAME=value")
        yield name, value.replace("{n}", str(number))


def _data_parallel_size(flags: list[str]) -> int:
    if "--data-parallel-size" in flags:
        return int(flags[flags.index("--data-parallel-size") + 1])
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.rig", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--lease-seconds", type=int)
    parser.add_argument("--load-failure-policy", choices=["recompute", "fail"], default="recompute")
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--prog-thread", action="store_true", help="keep NIXL's busy progress thread")
    parser.add_argument("--no-pin", action="store_true", help="leave the engines on all cores")
    parser.add_argument("flags", nargs="*", help="after --: more flags for every engine")
    options = parser.parse_args()
    rig = Rig(
        options.model,
        prefill=options.prefill,
        decode=options.decode,
        pin=not options.no_pin,
        block_size=options.block_size,
        lease_seconds=options.lease_seconds,
        load_failure_policy=options.load_failure_policy,
        prog_thread=options.prog_thread,
        kv_connector=options.connector,
        extra_flags=options.flags,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would have us ignore it
    try:
        with rig:
            for engine in rig.engines:
                say(
                    f"{engine.name}: {engine.url} (side channel {engine.side_channel_port}, up in "
                    f"{engine.start_seconds:.1f} s, {engine.memory_bytes() >> 20} MB, log {engine.log_path})"
                )
            say(f'model "{rig.model_name}"; Ctrl-C ends them')
            signal.pause()
    except KeyboardInterrupt:
        say("ended")
    except RuntimeError as error:  # RigError, InstallError, ModelError: the text is all that helps
        sys.exit(str(error))


if __name__ == "__main__":
    main()
