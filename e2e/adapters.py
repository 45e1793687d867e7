"""Tiny LoRA adapters for the tiny model, made on the spot: random numbers, strong enough to change every text.

The format is that of peft: `adapter_config.json` and `adapter_model.safetensors`, which is a header of JSON behind
its length (8 bytes, little-endian), and the tensors one after the other. Standard library only; knows no engine.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

RANK = 2


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter for the model in folder `model`, made in `folder`, some 10 KB. The same seed makes the same."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, width = config["hidden_size"], config["head_dim"]
    draw = random.Random(seed)
    header: dict[str, object] = {}
    data = b""
    for layer in range(config["num_hidden_layers"]):
        for module, heads in (("q_proj", "num_attention_heads"), ("v_proj", "num_key_value_heads")):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (config[heads] * width, RANK))):
                numbers = [draw.gauss(0, 1) for _ in range(shape[0] * shape[1])]
                tensor = struct.pack(f"<{len(numbers)}f", *numbers)
                offsets = [len(data), len(data) + len(tensor)]
                header[f"{name}.{part}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
                data += tensor
    head = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
