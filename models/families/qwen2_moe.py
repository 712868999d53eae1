"""Qwen1.5-MoE and Qwen2-MoE (`model_type: qwen2_moe`): biases, and a shared expert behind a gate.

Source: transformers `models/qwen2_moe`, arXiv 2407.10671.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.errors import ConfigError
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
    """The decoder that a Qwen2-MoE config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that the family does not
            have.
    """
    fields = Fields(values)
    refuse_unbuilt(fields)
    fields.only("attention_bias", False)
    # Configurations from before the field was there are of models with biases.
    attention = read_attention(fields, qkv_bias=fields.flag("qkv_bias", default=True))
    return assemble(
        fields,
        family="qwen2_moe",
        attention=attention,
        rope=read_rope(
            fields,
            dim=attention.head_dim,
            max_positions=fields.integer("max_position_embeddings"),
        ),
        layers=sparse_layers(fields, _windows(fields)),
        moe=MoEConfig(
            expert_size=fields.integer("moe_intermediate_size"),
            router=read_router(
                fields,
                "num_experts",
                "num_local_experts",
                normalize=fields.flag("norm_topk_prob"),
            ),
            shared_size=fields.integer("shared_expert_intermediate_size"),
            shared_gated=True,
        ),
    )


def _windows(fields: Fields) -> list[int | None]:
    """Each layer's window: named by layer_types, else every other one below max_window_layers.

    A window that `use_sliding_window` does not switch on is not used.
    """
    layers = fields.integer("num_hidden_layers")
    types = fields.raw("layer_types")
    enabled = fields.flag("use_sliding_window", default=False)
    known = {"full_attention", "sliding_attention"}
    if types is not None and (
        not isinstance(types, list | tuple) or len(types) != layers or not set(types) <= known
    ):
        raise ConfigError(
            f"config: layer_types must be {layers} names out of {sorted(known)}, got {types!r}"
        )
    if types is None:
        last = fields.integer("max_window_layers", minimum=0) if enabled else 0
        local = [enabled and layer % 2 == 0 and layer < last for layer in range(layers)]
    else:
        local = [name == "sliding_attention" for name in types]
    if any(local) and not enabled:
        raise ConfigError(
            "config: layer_types asks for sliding_attention, but use_sliding_window is false"
        )
    window = fields.integer("sliding_window") if any(local) else None
    return [window if here else None for here in local]
