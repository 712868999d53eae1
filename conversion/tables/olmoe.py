"""OLMoE (model_type "olmoe"): names of transformers' modeling_olmoe, versions 4 and 5.

Version 4, and version 5 by default, store every expert's projections apart.
"""

from cam_jax.conversion.tables.common import (
    ROPE_BUFFERS,
    attention_rules,
    fused_rules,
    outer_rules,
    per_expert_rules,
    router_rule,
)
from cam_jax.conversion.tables.table import WeightTable

_EXPERTS = ("num_experts", "intermediate_size", "hidden_size")

TABLE = WeightTable(
    family="olmoe",
    rules=(
        *outer_rules(),
        *attention_rules("q_norm", "k_norm"),
        router_rule("num_experts", "hidden_size"),
    ),
    layouts={"per_expert": per_expert_rules(*_EXPERTS), "fused": fused_rules(*_EXPERTS)},
    ignored=ROPE_BUFFERS,
)
