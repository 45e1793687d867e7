"""What an engine answers about its LoRA adapters: one script for real and for simulated engines.

The engine serves the adapter `a`, may load others while it runs, and has two slots.
"""

from __future__ import annotations

import re
from typing import Any

from tests.engine.cases import completion
from tests.engine.record import record, send

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
_ROW = re.compile(r"^vllm:lora_requests_info(\{.*\}) ", re.MULTILINE)


def loras(url: str, path: str) -> dict[str, Any]:
    """The record, by case. `path`: where there is another adapter."""
    b = {"lora_name": "b", "lora_path": path}
    calls: list[tuple[str, str, Any, str]] = [
        ("models", "/v1/models", None, "GET"),
        ("ask for what only POST has", LOAD, None, "GET"),
        ("not loaded", COMPLETIONS, completion(model="b"), "POST"),
        ("load", LOAD, b, "POST"),
        ("load again", LOAD, b, "POST"),
        ("load in place", LOAD, {**b, "load_inplace": True}, "POST"),
        ("load from nowhere", LOAD, {"lora_name": "c", "lora_path": "/no/such/path"}, "POST"),
        ("load as the model", LOAD, {"lora_name": "tiny", "lora_path": path}, "POST"),
        ("load without path", LOAD, {"lora_name": "c"}, "POST"),
        ("load with an empty path", LOAD, {"lora_name": "c", "lora_path": ""}, "POST"),
        ("load with a number", LOAD, {"lora_name": 5, "lora_path": path}, "POST"),
        ("load a list", LOAD, [], "POST"),
        ("load garbage", LOAD, b"{", "POST"),
        ("loaded", COMPLETIONS, completion(model="b"), "POST"),
        ("models with b", "/v1/models", None, "GET"),
        ("unload", UNLOAD, {"lora_name": "b"}, "POST"),
        ("unload again", UNLOAD, {"lora_name": "b"}, "POST"),
        ("unload nothing", UNLOAD, {}, "POST"),
        ("unload an empty name", UNLOAD, {"lora_name": ""}, "POST"),
        ("unload the model", UNLOAD, {"lora_name": "tiny"}, "POST"),
        ("unloaded", COMPLETIONS, completion(model="b"), "POST"),
        ("static", COMPLETIONS, completion(model="a"), "POST"),
    ]
    found: dict[str, Any] = {name: record(send(url, path, body, method)) for name, path, body, method in calls}
    one = send(url, "/metrics/?name[]=vllm:lora_requests_info", method="GET")
    found["rows"] = {"status": one.status, "rows": sorted(_ROW.findall(one.body.decode()))}
    none = send(url, "/metrics/?name[]=vllm:no_such_family", method="GET")
    found["no rows"] = {"status": none.status, "body": none.body.decode()}
    return found
