"""Mixtral (`model_type: mixtral`): experts in every layer, weights always normalised.

Source: transformers `models/mixtral`, arXiv 2401.04088. Its `intermediate_size` is the size of one
expert. There is no norm_topk_prob: the softmax over the chosen logits is the normalised top-k of
the softmax over all.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.models.config import DecoderConfig, LayerKind, MoEConfig
from cam_jax.models.families.parts import assemble, read_attention, read_router, refuse_unbuilt
from cam_jax.models.reading import Fields, read_rope


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Mixtral config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that Mixtral does not have.
    """
    fields = Fields(values)
    refuse_unbuilt(fields)
    fields.only("attention_bias", False)
    fields.only("norm_topk_prob", True)
    attention = read_attention(fields)
    window = fields.integer("sliding_window", default=None)
    return assemble(
        fields,
        family="mixtral",
        attention=attention,
        rope=read_rope(
            fields,
            dim=attention.head_dim,
            max_positions=fields.integer("max_position_embeddings"),
        ),
        layers=(LayerKind(moe=True, window=window),) * fields.integer("num_hidden_layers"),
        moe=MoEConfig(
            expert_size=fields.integer("intermediate_size"),
            router=read_router(fields, "num_local_experts", "num_experts", normalize=True),
        ),
    )
