"""DeepSeek-V2 and V2-Lite (`model_type: deepseek_v2`): MLA, groups scored by their best expert.

Source: transformers `models/deepseek_v2`, arXiv 2405.04434. `latent_decoder` reads what V3 shares.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.config import DecoderConfig, LayerKind, MLAConfig, MoEConfig
from cam_jax.models.families.parts import assemble, read_groups, read_router, refuse_unbuilt
from cam_jax.models.reading import Fields, read_rope, softmax_mscale
from cam_jax.models.rope import RopeConfig
from cam_jax.router import RouterConfig


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a DeepSeek-V2 config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that the family does not
            have.
    """
    fields = Fields(values)
    fields.only("scoring_func", "softmax")
    fields.only("rope_interleave", True)
    # No two implementations agree on what normalised weights are scaled by, and no published
    # model has them.
    fields.only("norm_topk_prob", False)
    router = read_router(
        fields,
        "n_routed_experts",
        "num_experts",
        scale=fields.number("routed_scaling_factor", default=1.0),
        **_groups(fields),
    )
    return latent_decoder(fields, family="deepseek_v2", router=router)


def _groups(fields: Fields) -> dict[str, Any]:
    """The router's group options: none for "greedy", which leaves n_group unused."""
    method = fields.raw("topk_method")
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise ConfigError(
            f"config: topk_method={method!r} is not supported (only 'greedy', "
            "'group_limited_greedy')"
        )
    groups, chosen = read_groups(
        fields,
        experts=fields.integer("n_routed_experts", "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
    )
    return {"num_groups": groups, "top_groups": chosen, "group_score": "max"}


def latent_decoder(
    fields: Fields,
    *,
    family: str,
    router: RouterConfig,
    interleaved: bool = True,
    selection_bias: bool = False,
) -> DecoderConfig:
    """MLA, a few dense layers, then routed experts and ungated shared ones."""
    refuse_unbuilt(fields)
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)
    fields.only("sliding_window")
    rope = read_rope(
        fields,
        dim=fields.integer("qk_rope_head_dim"),
        max_positions=fields.integer("max_position_embeddings"),
        interleaved=interleaved,
    )
    first = fields.integer("first_k_dense_replace", minimum=0)
    size = fields.integer("moe_intermediate_size")
    return assemble(
        fields,
        family=family,
        attention=_read_attention(fields, rope),
        rope=rope,
        layers=tuple(
            LayerKind(moe=layer >= first) for layer in range(fields.integer("num_hidden_layers"))
        ),
        moe=MoEConfig(
            expert_size=size,
            router=router,
            selection_bias=selection_bias,
            shared_size=size * fields.integer("n_shared_experts", default=0, minimum=0),
        ),
    )


def _read_attention(fields: Fields, rope: RopeConfig) -> MLAConfig:
    """MLA's sizes; head_dim, which transformers sets to the rotated part's, is not among them."""
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    if not fields.given("q_lora_rank"):
        # null means one projection, and what an absent field means differs between versions.
        raise ConfigError("config: field q_lora_rank is missing (null where there is none)")
    nope = fields.integer("qk_nope_head_dim")
    scale = (nope + rope.dim) ** -0.5
    return MLAConfig(
        num_heads=heads,
        query_rank=fields.integer("q_lora_rank", default=None),
        latent_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope.dim,
        value_dim=fields.integer("v_head_dim"),
        scale=scale * softmax_mscale(fields, rope),
        bias=fields.flag("attention_bias", default=False),
    )
