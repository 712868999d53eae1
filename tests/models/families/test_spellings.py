"""Every family: what transformers 4 and 5 write, nesting, missing and unknown fields."""

from typing import Any

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.registry import FAMILIES, read_config
from tests.models.tiny import TINY, tiny

NEW = sorted(set(TINY) - {"olmoe"})
COMMON = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
}
NEEDED = {
    "mixtral": {"intermediate_size", "num_local_experts"},
    "qwen2_moe": {
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts",
        "norm_topk_prob",
    },
    "qwen3_moe": {"moe_intermediate_size", "num_experts", "norm_topk_prob"},
    "deepseek": {
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
    },
    "deepseek_v2": {
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "first_k_dense_replace",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "topk_method",
    },
    "deepseek_v3": {
        "n_routed_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
        "q_lora_rank",
    },
}


def as_transformers_5(values: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with the spellings of transformers 5."""
    old = {"rope_theta", "rope_scaling", "torch_dtype"}
    new = {key: value for key, value in values.items() if key not in old}
    scaling = values["rope_scaling"] or {"type": "default"}
    rope = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    new["rope_parameters"] = rope | {"rope_theta": values["rope_theta"]}
    new["dtype"] = "bfloat16"
    if values["model_type"] == "qwen3_moe":
        new["num_local_experts"] = new.pop("num_experts")
    if "qk_rope_head_dim" in values:
        new["head_dim"] = values["qk_rope_head_dim"]
        new["qk_head_dim"] = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]
    return new


def test_every_family_is_here():
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ],
)
def test_both_versions_read_the_same(family, scaling):
    values = TINY[family] | {"rope_scaling": scaling}
    assert read_config(as_transformers_5(values)) == read_config(values)


@pytest.mark.parametrize("family", NEW)
def test_a_nested_text_config_is_found(family):
    nested = {"model_type": "wrapper", "text_config": TINY[family]}
    assert read_config(nested) == tiny(family)


@pytest.mark.parametrize(
    ("family", "field"), [(f, field) for f in NEW for field in sorted(NEEDED[f] | COMMON)]
)
def test_a_missing_field_is_named(family, field):
    values = {key: value for key, value in TINY[family].items() if key != field}
    with pytest.raises(ConfigError, match=field):
        read_config(values)


ANY = {
    "hidden_act": "gelu",
    "quantization_config": {"quant_method": "fp8"},
    "rope_scaling": {"type": "llama3", "factor": 2.0},
    "num_experts_per_tok": 9,
    "num_hidden_layers": 0,
    "tie_word_embeddings": "no",
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {
        "norm_topk_prob": False,
        "attention_bias": True,
        "sliding_window": 0,
        "hidden_size": 18,
        "num_key_value_heads": 3,
    },
    "qwen2_moe": {
        "attention_bias": True,
        "qkv_bias": 1,
        "mlp_only_layers": [3],
        "layer_types": ["sliding_attention"] * 3,
        "decoder_sparse_step": 0,
        "shared_expert_intermediate_size": 0,
    },
    "qwen3_moe": {"mlp_only_layers": "0", "decoder_sparse_step": 0, "head_dim": 5},
    "deepseek": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.0, "n_shared_experts": -1},
    "deepseek_v2": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 2,
        "mlp_bias": True,
        "num_key_value_heads": 2,
        "rope_interleave": False,
        "sliding_window": 8,
        "qk_rope_head_dim": 3,
    },
    "deepseek_v3": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 3,
        "topk_group": 5,
        "moe_layer_freq": 2,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": -1,
    },
}


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [(f, field, value) for f in NEW for field, value in (ANY | OWN[f]).items()],
)
def test_what_is_not_supported_or_malformed_is_named(family, field, value):
    words = {"rope_scaling": "rope_type", "qk_rope_head_dim": "even", "head_dim": "even"}
    with pytest.raises(ConfigError, match=words.get(field, field)):
        tiny(family, **{field: value})


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_two_spellings_that_disagree_are_refused(family):
    other = "num_experts" if "num_local_experts" in TINY[family] else "num_local_experts"
    with pytest.raises(ConfigError, match="must agree"):
        tiny(family, **{other: 5})
