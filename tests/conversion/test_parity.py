"""Live parity with transformers on tiny random models: logits and a greedy continuation.

Every family over its options, one at a time and some together, both padding sides included. The
weights go through files, so that names and layouts are tested as well.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.conversion import load_params, open_checkpoint
from cam_jax.models.decoder import forward, init_cache, logits

pytestmark = pytest.mark.slow

VOCAB, LENGTH, NEW = 61, 11, 64
TOLERANCE = 1e-3  # of logits whose standard deviation is near 1

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_parameters": PLAIN,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Olmoe": {"intermediate_size": 12, "num_experts": 6, "rope_parameters": PLAIN},
    "Mixtral": {"intermediate_size": 12, "num_local_experts": 6, "rope_parameters": PLAIN},
    "Qwen2Moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "num_experts": 6,
        "rope_parameters": PLAIN,
    },
    "Qwen3Moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 12,
        "num_experts": 6,
        "head_dim": 12,
        "rope_parameters": PLAIN,
    },
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT | {"n_group": 1, "topk_group": 1},
}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Olmoe", {}),
    ("Olmoe", {"norm_topk_prob": True}),
    ("Olmoe", {"clip_qkv": 0.5}),
    ("Olmoe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("Olmoe", {"rope_parameters": YARN, "num_key_value_heads": 4}),
    ("Mixtral", {}),
    ("Mixtral", {"sliding_window": 5}),
    ("Mixtral", {"head_dim": 12}),
    ("Mixtral", {"tie_word_embeddings": True}),
    ("Mixtral", {"num_experts_per_tok": 1, "num_key_value_heads": 4}),
    # YaRN in transformers takes Mixtral's head_dim of null for a number.
    ("Mixtral", {"rope_parameters": YARN, "head_dim": 8}),
    ("Mixtral", {"rope_parameters": LINEAR, "rms_norm_eps": 1e-2}),
    ("Qwen2Moe", {}),
    ("Qwen2Moe", {"norm_topk_prob": True}),
    ("Qwen2Moe", {"qkv_bias": False}),
    ("Qwen2Moe", {"decoder_sparse_step": 2}),
    ("Qwen2Moe", {"mlp_only_layers": [0, 2]}),
    ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    (
        "Qwen2Moe",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    ("Qwen2Moe", {"use_sliding_window": False, "sliding_window": 5}),
    ("Qwen2Moe", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("Qwen3Moe", {}),
    ("Qwen3Moe", {"norm_topk_prob": True}),
    ("Qwen3Moe", {"attention_bias": True}),
    ("Qwen3Moe", {"head_dim": 8, "num_key_value_heads": 1}),
    ("Qwen3Moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("Qwen3Moe", {"mlp_only_layers": [1]}),
    ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 5}),
    ("Qwen3Moe", {"use_sliding_window": False, "sliding_window": 5}),
    ("Qwen3Moe", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("DeepseekV2", {}),
    ("DeepseekV2", {"q_lora_rank": 10}),
    ("DeepseekV2", {"q_lora_rank": 10, "attention_bias": True}),
    ("DeepseekV2", {"topk_method": "group_limited_greedy", **GROUPS}),
    ("DeepseekV2", {"routed_scaling_factor": 2.5, "first_k_dense_replace": 0}),
    ("DeepseekV2", {"rope_parameters": YARN}),
    ("DeepseekV2", {"rope_parameters": MSCALE}),
    (
        "DeepseekV2",
        {
            "q_lora_rank": 10,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            **GROUPS,
        },
    ),
    ("DeepseekV2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "n_shared_experts": 1}),
    ("DeepseekV3", {}),
    ("DeepseekV3", {"q_lora_rank": 10}),
    ("DeepseekV3", {"q_lora_rank": 10, "attention_bias": True}),
    ("DeepseekV3", GROUPS),
    ("DeepseekV3", {"norm_topk_prob": False, **GROUPS}),
    ("DeepseekV3", {"routed_scaling_factor": 1.0, "first_k_dense_replace": 2}),
    ("DeepseekV3", {"rope_interleave": False}),
    ("DeepseekV3", {"rope_interleave": False, "rope_parameters": MSCALE, **GROUPS}),
    ("DeepseekV3", {"rope_parameters": MSCALE, "q_lora_rank": 10, **GROUPS}),
    ("DeepseekV3", {"tie_word_embeddings": True, "n_shared_experts": 1, "n_routed_experts": 12}),
    ("DeepseekV3", {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}),
]


def reference(family: str, options: dict[str, Any]) -> Any:
    """A random transformers model; norms, biases and selection bias are not left as they start."""
    import torch
    import transformers

    torch.manual_seed(0)
    values = BASE | FAMILIES[family] | options
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name == "lm_head.weight" or name.endswith("embed_tokens.weight"):
                tensor.copy_(torch.randn_like(tensor) * 0.5)
    return model


# Programs run once: compiling them without optimisation takes a fraction of the time.
compiled = partial(
    jax.jit,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)


@compiled
def prefill(config, params, ids, valid, cache):
    hidden, cache, _ = forward(config, params, ids, valid=valid, cache=cache)
    return logits(config, params, hidden), cache


@compiled
def decode(config, params, token, cache):
    """NEW greedy tokens from the first one, [B, NEW], and the smallest lead of a choice."""

    def step(carry, _):
        token, cache = carry
        hidden, cache, _ = forward(config, params, token[:, None], cache=cache)
        scores = logits(config, params, hidden[:, -1])
        best = jax.lax.top_k(scores, 2)[0]
        following = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return (following, cache), (token, best[:, 0] - best[:, 1])

    _, (tokens, lead) = jax.lax.scan(step, (token, cache), length=NEW)
    return tokens.T, lead.min()


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Six rows: whole, padded on the left and padded on the right (ids, mask)."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, VOCAB, (6, LENGTH))
    mask = np.ones_like(ids)
    mask[2, :3] = mask[3, :7] = mask[4, -3:] = mask[5, -7:] = 0
    return np.where(mask > 0, ids, 0), mask


def compare(model: Any, directory: Path) -> tuple[float, float]:
    """(largest difference of logits, smallest lead in the continuation); asserts the tokens."""
    import torch

    opened = open_checkpoint(directory)
    params = load_params(opened, dtype="f32")
    ids, mask = batch()
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        expected = model(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(positions),
        ).logits.numpy()
        theirs = model.generate(
            torch.tensor(ids[:2]),
            attention_mask=torch.ones(2, LENGTH, dtype=torch.long),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        ).numpy()[:, LENGTH:]
    with jax.default_matmul_precision("highest"):
        cache = init_cache(opened.config, len(ids), LENGTH + NEW)
        found, cache = prefill(
            opened.config, params, jnp.asarray(ids, jnp.int32), jnp.asarray(mask, bool), cache
        )
        first = jnp.argmax(found[:, -1], axis=-1).astype(jnp.int32)
        tokens, lead = decode(opened.config, params, first, cache)
    worst = float(np.abs(np.asarray(found) - expected)[mask > 0].max())
    np.testing.assert_array_equal(np.asarray(tokens)[:2], theirs)
    return worst, float(lead)


@pytest.mark.parametrize(("family", "options"), CASES)
def test_parity(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = reference(family, options)
    model.save_pretrained(tmp_path)
    worst, lead = compare(model, tmp_path)
    print(f"\nparity {family} {options}: {worst:.2e}, lead {lead:.2e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parity_of_fused_experts(family: str, tmp_path: Path) -> None:
    model = reference(family, {})
    model.save_pretrained(tmp_path, save_original_format=False)
    assert open_checkpoint(tmp_path).plan.layout == "fused"
    worst, _ = compare(model, tmp_path)
    assert worst <= TOLERANCE


# transformers has no DeepSeek-MoE (V1). With a zero gate, which halves the shared expert's output,
# and no biases, Qwen2-MoE is the same arithmetic.
FIRST_DENSE = {"qkv_bias": False, "mlp_only_layers": [0]}
V1_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (FIRST_DENSE, {}),
    (FIRST_DENSE | {"norm_topk_prob": True}, {"norm_topk_prob": True}),
    ({"qkv_bias": False}, {"first_k_dense_replace": 0}),
    ({"qkv_bias": False, "mlp_only_layers": [0, 1]}, {"moe_layer_freq": 2}),
    (
        FIRST_DENSE | {"num_key_value_heads": 4, "rope_parameters": LINEAR},
        {"num_key_value_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
]


@pytest.mark.parametrize(("theirs", "options"), V1_CASES)
def test_parity_of_the_first_deepseek(
    theirs: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = reference("Qwen2Moe", theirs | {"shared_expert_intermediate_size": 24})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("shared_expert_gate.weight"):
                parameter.zero_()
    model.save_pretrained(tmp_path / "theirs")
    tensors = {}
    for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items():
        if name.endswith("shared_expert.down_proj.weight"):
            tensor = tensor * 0.5
        if not name.endswith("shared_expert_gate.weight"):
            tensors[name.replace(".shared_expert.", ".shared_experts.")] = tensor
    (tmp_path / "ours").mkdir()
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    config = BASE | {
        "model_type": "deepseek",
        "intermediate_size": 40,
        "moe_intermediate_size": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config | options))
    worst, lead = compare(model, tmp_path / "ours")
    print(f"\nparity Deepseek {options}: {worst:.2e}, lead {lead:.2e}")
    assert worst <= TOLERANCE
