"""LoRA adapters of a simulated engine: loaded and unloaded while it runs, or when a request names one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.engine.apis.schema import ApiError, boolean, check, nullable, parse_json, string
from tests.engine.http_messages import Answer

if TYPE_CHECKING:
    from tests.engine.engine import Engine
    from tests.engine.http_messages import Received


class Adapters:
    """What the engine has of adapters (entrypoints/openai/models/serving.py:OpenAIServingModels).

    loaded      name -> path
    max_loras   slots; 0: the engine was started without --enable-lora
    runtime     VLLM_ALLOW_RUNTIME_LORA_UPDATING: the two paths exist
    files       paths at which there is an adapter
    resolvable  names that a resolver plugin finds; only with `runtime`
    """

    def __init__(
        self, loaded: dict[str, str], max_loras: int, *, runtime: bool, files: set[str], resolvable: set[str]
    ) -> None:
        self._static = dict(loaded)
        self.loaded = loaded
        self.max_loras = max_loras
        self.runtime = runtime
        self.files = files
        self.resolvable = resolvable
        self.rows: dict[str, float] = {}
        """Adapters that had requests at one time -> when that was seen last (v1/metrics/loggers.py)."""

    def forget(self) -> None:
        """The engine starts anew."""
        self.loaded = dict(self._static)
        self.rows.clear()

    def finds(self, name: str) -> bool:
        if name not in self.loaded and self.runtime and name in self.resolvable:
            self.loaded[name] = f"/resolved/{name}"
        return name in self.loaded

    def step(self, names: list[str]) -> None:
        """The engine made a step for requests of these adapters."""
        self.rows[",".join(dict.fromkeys(names))] = time.time()

    def exposition(self) -> list[str]:
        """Both labels hold every adapter with a request, running or waiting (v1/metrics/stats.py)."""
        if not self.rows:
            return []
        name = "vllm:lora_requests_info"
        return [
            f"# HELP {name} Running stats on lora requests.",
            f"# TYPE {name} gauge",
            *(
                f'{name}{{max_lora="{self.max_loras}",running_lora_adapters="{names}",'
                f'waiting_lora_adapters="{names}"}} {when!r}'
                for names, when in self.rows.items()
            ),
        ]


_FIELDS = {
    "lora_name": string(),
    "lora_path": string(),
    "load_inplace": boolean,
    "is_3d_lora_weight": boolean,
    "lora_int_id": nullable(lambda value: value),
}


def _said(text: str) -> Answer:
    return Answer(body=text.encode())


async def load(engine: Engine, received: Received) -> Answer:
    body = check(parse_json(received), _FIELDS, ("lora_name", "lora_path"))
    name, path = body["lora_name"], body["lora_path"]
    adapters = engine.adapters
    if not name or not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    if name in engine.served_models:
        raise ApiError(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
    if name in adapters.loaded and not body.get("load_inplace"):
        message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
        raise ApiError(400, message + "set 'load_inplace' to True.", "InvalidUserInput")
    if path not in adapters.files:
        raise ApiError(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
    adapters.loaded[name] = path
    return _said(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(engine: Engine, received: Received) -> Answer:
    name = check(parse_json(received), _FIELDS, ("lora_name",))["lora_name"]
    if not name:
        message = "'lora_name' needs to be provided to unload a LoRA adapter."
        raise ApiError(400, message, "InvalidUserInput")
    if name not in engine.adapters.loaded:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    del engine.adapters.loaded[name]
    return _said(f"Success: LoRA adapter '{name}' removed successfully.")
