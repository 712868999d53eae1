"""Small configurations and shared jitted functions for the tests of the decoder."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cam_jax.models import decoder
from cam_jax.models.config import DecoderConfig
from cam_jax.models.registry import read_config

OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.3,
}

_SHARED: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.3,
    "torch_dtype": "bfloat16",
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "attention_bias": False,
    "routed_scaling_factor": 1.5,
    "ep_size": 1,
    "pretraining_tp": 1,
}

# A tiny configuration of every family, as transformers 4 writes it.
TINY: dict[str, dict[str, Any]] = {
    "olmoe": OLMOE,
    "mixtral": _SHARED
    | {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "num_local_experts": 6,
        "sliding_window": None,
    },
    "qwen2_moe": _SHARED
    | {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "num_experts": 6,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 21,
    },
    "qwen3_moe": _SHARED
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "moe_intermediate_size": 8,
        "num_experts": 6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
    },
    "deepseek": _SHARED
    | {
        "model_type": "deepseek",
        "num_key_value_heads": 4,
        "intermediate_size": 20,
        "moe_intermediate_size": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    "deepseek_v2": _SHARED
    | _LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    "deepseek_v3": _SHARED
    | _LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 10,
        "topk_method": "noaux_tc",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
}


def tiny(family: str, **changes: Any) -> DecoderConfig:
    """The family's tiny model with these fields of its configuration changed."""
    return read_config(TINY[family] | changes)


def olmoe(**changes: Any) -> DecoderConfig:
    """A tiny OLMoE; its weights are large enough for every part to show in the logits."""
    return read_config(OLMOE | changes)


def leaves_of(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 leaves by path; norms lie around one, biases are not zero."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, spec in decoder.param_specs(config).items():
        draw = config.initializer_range * rng.normal(size=spec.shape)
        leaves[path] = (draw + 1.0 if path.endswith("norm") else draw).astype(np.float32)
    return leaves


def params_of(config: DecoderConfig, seed: int = 0) -> Any:
    """Random parameters, drawn on the host: nothing is compiled."""
    return decoder.stack_params(config, leaves_of(config, seed))


@partial(jax.jit, static_argnames=("config", "policy", "virtual_devices"))
def run(config, params, ids, valid=None, *, policy=None, virtual_devices=1):
    """Logits of every position and the load statistics, without a cache."""
    hidden, _, load = decoder.forward(
        config, params, ids, valid=valid, policy=policy, virtual_devices=virtual_devices
    )
    return decoder.logits(config, params, hidden), load


@partial(jax.jit, static_argnames=("config",))
def step(config, params, ids, cache, valid=None):
    """Logits of every position and the grown cache."""
    hidden, cache, _ = decoder.forward(config, params, ids, valid=valid, cache=cache)
    return decoder.logits(config, params, hidden), cache


def tokens(rows: int, length: int, seed: int = 0, vocabulary: int = 50) -> jax.Array:
    """Random token ids, [rows, length] int32."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    return jnp.asarray(ids, jnp.int32)
