"""DeepSeek-MoE-16B (`model_type: deepseek`): ordinary attention, shared experts without a gate.

Source: the modeling_deepseek.py published with deepseek-ai/deepseek-moe-16b-base, arXiv 2401.06066.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.models.config import DecoderConfig, LayerKind, MoEConfig
from cam_jax.models.families.parts import assemble, read_attention, read_router, refuse_unbuilt
from cam_jax.models.reading import Fields, read_rope


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a DeepSeek-MoE config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that the family does not
            have.
    """
    fields = Fields(values)
    refuse_unbuilt(fields)
    fields.only("scoring_func", "softmax")
    fields.only("routed_scaling_factor", 1)
    bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, qkv_bias=bias, out_bias=bias)
    first = fields.integer("first_k_dense_replace", minimum=0)
    every = fields.integer("moe_layer_freq", default=1)
    normalize = fields.flag("norm_topk_prob")
    size = fields.integer("moe_intermediate_size")
    return assemble(
        fields,
        family="deepseek",
        attention=attention,
        rope=read_rope(
            fields,
            dim=attention.head_dim,
            max_positions=fields.integer("max_position_embeddings"),
        ),
        layers=tuple(
            LayerKind(moe=layer >= first and layer % every == 0)
            for layer in range(fields.integer("num_hidden_layers"))
        ),
        moe=MoEConfig(
            expert_size=size,
            router=read_router(
                fields,
                "n_routed_experts",
                # The published code does not normalise the weight of a single expert.
                normalize=normalize and fields.integer("num_experts_per_tok") > 1,
            ),
            shared_size=size * fields.integer("n_shared_experts", default=0, minimum=0),
        ),
    )
