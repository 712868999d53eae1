"""Qwen3-MoE (`model_type: qwen3_moe`): RMSNorm of each query and key head, no shared expert.

Source: transformers `models/qwen3_moe`, arXiv 2505.09388. A head is not D / H wide in the published
models.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.models.config import DecoderConfig, MoEConfig
from cam_jax.models.families.parts import (
    assemble,
    read_attention,
    read_router,
    refuse_unbuilt,
    sparse_layers,
)
from cam_jax.models.reading import Fields, read_rope


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Qwen3-MoE config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that the family does not
            have.
    """
    fields = Fields(values)
    refuse_unbuilt(fields)
    bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qkv_bias=bias, out_bias=bias, qk_norm="head")
    # The window counts only where its flag is set, and then in every layer.
    enabled = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window") if enabled else None
    return assemble(
        fields,
        family="qwen3_moe",
        attention=attention,
        rope=read_rope(
            fields,
            dim=attention.head_dim,
            max_positions=fields.integer("max_position_embeddings"),
        ),
        layers=sparse_layers(fields, [window] * fields.integer("num_hidden_layers")),
        moe=MoEConfig(
            expert_size=fields.integer("moe_intermediate_size"),
            router=read_router(
                fields,
                "num_experts",
                "num_local_experts",
                normalize=fields.flag("norm_topk_prob"),
            ),
        ),
    )
