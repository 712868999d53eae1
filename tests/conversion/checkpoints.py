"""Tiny OLMoE checkpoints for the tests, written without the code under test.

L=3 layers, E=5 experts, D=8, F=6, two heads, one key and value head, vocabulary 11: no two sizes
are equal, so that swapped axes cannot go unnoticed.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int32": "I32",
}
LAYERS, EXPERTS, D, F, VOCAB = 3, 5, 8, 6, 11


def tiny_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": VOCAB,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {**config, **changes}


def tiny_tensors(
    *,
    dtype: Any = BF16,
    fused: bool = False,
    bias: bool = False,
    head: bool = True,
    rng: np.random.Generator | None = None,
) -> dict[str, np.ndarray]:
    """HF name -> random tensor; the fused form holds the same numbers as the other one."""
    rng = rng or np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, D), "model.norm.weight": draw(D)}
    if head:
        tensors["lm_head.weight"] = draw(VOCAB, D)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[f"{at}input_layernorm.weight"] = draw(D)
        tensors[f"{at}post_attention_layernorm.weight"] = draw(D)
        for name, out in {"q": D, "k": D // 2, "v": D // 2, "o": D}.items():
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(out, D)
            if bias:
                tensors[f"{at}self_attn.{name}_proj.bias"] = draw(out)
        tensors[f"{at}self_attn.q_norm.weight"] = draw(D)
        tensors[f"{at}self_attn.k_norm.weight"] = draw(D // 2)
        tensors[f"{at}mlp.gate.weight"] = draw(EXPERTS, D)
        experts = {
            name: [draw(*shape) for _ in range(EXPERTS)]
            for name, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items()
        }
        if fused:
            gate_up = [
                np.concatenate(pair) for pair in zip(experts["gate"], experts["up"], strict=True)
            ]
            tensors[f"{at}mlp.experts.gate_up_proj"] = np.stack(gate_up)
            tensors[f"{at}mlp.experts.down_proj"] = np.stack(experts["down"])
        else:
            for name, parts in experts.items():
                for expert, part in enumerate(parts):
                    tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = part
    return tensors


def encode(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header at all: bytes as they are, else JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        begin, data = len(data), data + tensor.tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(data)],
        }
    path.write_bytes(encode(header, data))
    return path


def write_config(directory: Path, config: Mapping[str, Any] | None = None) -> None:
    (directory / "config.json").write_text(json.dumps(config or tiny_config()))


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """A checkpoint directory; its tensors are dealt out over the shards in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, config)
    if shards == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        write_file(directory / name, part)
        weight_map.update(dict.fromkeys(part, name))
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Mapping[str, Any]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit, type and shape included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
