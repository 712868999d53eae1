"""DeepSeek-V3 and R1 (`model_type: deepseek_v3`): sigmoid scores, a bias that only selects.

Source: transformers `models/deepseek_v3`, arXiv 2412.19437. Layers for multi-token prediction,
which stand behind the decoder's in a checkpoint, are not part of it.
"""

from collections.abc import Mapping
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.config import DecoderConfig
from cam_jax.models.families.deepseek_v2 import latent_decoder
from cam_jax.models.families.parts import read_groups, read_router
from cam_jax.models.reading import Fields


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a DeepSeek-V3 config.json describes.

    Raises:
        ConfigError: a field is missing, malformed or asks for something that the family does not
            have.
    """
    fields = Fields(values)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    # Read for its form alone: the weight table leaves out that many layers.
    fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0)
    experts = fields.integer("n_routed_experts", "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    groups, chosen = read_groups(fields, experts=experts, top_k=top_k)
    if experts < 2 * groups:
        raise ConfigError(
            f"config: n_group={groups} groups of n_routed_experts={experts} hold fewer than the "
            "two experts whose scores are summed"
        )
    router = read_router(
        fields,
        "n_routed_experts",
        "num_local_experts",
        score="sigmoid",
        normalize=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        num_groups=groups,
        top_groups=chosen,
        group_score="top2",
    )
    return latent_decoder(
        fields,
        family="deepseek_v3",
        router=router,
        interleaved=fields.flag("rope_interleave", default=True),
        selection_bias=True,
    )
