"""OLMoE's configuration."""

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.config import AttentionConfig, LayerKind
from cam_jax.models.registry import read_config
from cam_jax.models.rope import RopeConfig
from cam_jax.router import RouterConfig
from tests.models.tiny import OLMOE, olmoe

# The figures of allenai/OLMoE-1B-7B-0924.
PUBLISHED = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 50304,
}


def test_the_published_model():
    config = olmoe(**PUBLISHED)
    assert config.attention == AttentionConfig(
        num_heads=16, num_kv_heads=16, head_dim=128, scale=128**-0.5, qk_norm="full"
    )
    assert config.rope == RopeConfig(dim=128, theta=10000.0)
    assert config.layers == (LayerKind(moe=True),) * 16
    assert config.moe is not None
    assert config.moe.expert_size == 1024
    assert config.moe.router == RouterConfig(num_experts=64, top_k=8)
    assert (config.vocab_size, config.hidden_size, config.max_positions) == (50304, 2048, 4096)
    assert config.norm_eps == 1e-5
    assert not config.tie_embeddings


def test_what_transformers_5_writes_reads_the_same():
    old = dict(OLMOE)
    new = {key: value for key, value in OLMOE.items() if not key.startswith("rope_")}
    new |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float32"}
    new["num_local_experts"] = new.pop("num_experts")
    assert olmoe(**old) == read_config(new)


@pytest.mark.parametrize("normalize", [True, False])
def test_normalisation_is_read(normalize):
    assert olmoe(norm_topk_prob=normalize).moe.router.normalize is normalize


def test_options():
    config = olmoe(attention_bias=True, clip_qkv=8, tie_word_embeddings=True)
    assert config.attention.qkv_bias
    assert config.attention.out_bias
    assert config.attention.clip == 8.0
    assert config.tie_embeddings
    assert olmoe(num_key_value_heads=None).attention.num_kv_heads == 4


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "norm_topk_prob",
    ],
)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=field):
        read_config({key: value for key, value in OLMOE.items() if key != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "gptq"}),
        ("head_dim", 8),
        ("num_experts_per_tok", 7),
        ("hidden_size", 18),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("clip_qkv", -1.0),
        ("norm_topk_prob", "yes"),
        ("tie_word_embeddings", 1),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("vocab_size", 10.5),
    ],
)
def test_what_is_not_supported_or_malformed_is_named(field, value):
    word = "rope_type" if field == "rope_scaling" else field
    with pytest.raises(ConfigError, match=word):
        olmoe(**{field: value})
