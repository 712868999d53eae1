"""OLMoE (`model_type: olmoe`): RMSNorm over all heads of query and key, experts in every layer.

Source: transformers `models/olmoe`, arXiv 2409.02060. Its `intermediate_size` is the size of one
expert.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.config import AttentionConfig, DecoderConfig, LayerKind, MoEConfig
from cam_jax.models.reading import Fields, head_size, read_rope
from cam_jax.router import RouterConfig


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that an OLMoE config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that OLMoE does not have.
    """
    fields = Fields(values)
    fields.only("hidden_act", "silu")
    fields.only("sliding_window")
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    dim = head_size(fields, hidden=hidden, heads=heads)
    fields.only("head_dim", dim)  # the norm spans hidden_size features, so heads cannot be wider
    max_positions = fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias", default=False)
    return DecoderConfig(
        family="olmoe",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", default=heads),
            head_dim=dim,
            scale=dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="full",
            clip=fields.number("clip_qkv", default=None),
        ),
        rope=read_rope(fields, dim=dim, max_positions=max_positions),
        layers=(LayerKind(moe=True),) * fields.integer("num_hidden_layers"),
        moe=MoEConfig(
            expert_size=fields.integer("intermediate_size"),
            router=_read_router(fields),
        ),
        initializer_range=fields.number("initializer_range", default=0.02),
    )


def _read_router(fields: Fields) -> RouterConfig:
    """Softmax over all experts, then the top k, normalised if the configuration says so."""
    experts = fields.integer("num_experts", "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"config: num_experts_per_tok={top_k} is more than num_experts={experts}")
    return RouterConfig(
        num_experts=experts,
        top_k=top_k,
        score="softmax",
        normalize=fields.flag("norm_topk_prob"),
    )
