"""Qwen2-MoE and Qwen3-MoE (model_type "qwen2_moe", "qwen3_moe"), transformers 4 and 5."""

from cam_jax.conversion.tables.common import (
    LAYER,
    ROPE_BUFFERS,
    attention_rules,
    dense_rules,
    fused_rules,
    outer_rules,
    per_expert_rules,
    router_rule,
    swiglu_rules,
)
from cam_jax.conversion.tables.table import Rule, WeightTable

_EXPERTS = ("num_experts", "moe_intermediate_size", "hidden_size")

QWEN2_MOE = WeightTable(
    family="qwen2_moe",
    rules=(
        *outer_rules(),
        *attention_rules(),
        *dense_rules(),
        router_rule("num_experts", "hidden_size"),
        *swiglu_rules(
            "moe.shared", "mlp.shared_expert", "shared_expert_intermediate_size", "hidden_size"
        ),
        Rule(
            leaf="layers.{l}.moe.shared.router",
            tensor=f"{LAYER}.mlp.shared_expert_gate.weight",
            fields=("hidden_size",),
        ),
    ),
    layouts={"per_expert": per_expert_rules(*_EXPERTS), "fused": fused_rules(*_EXPERTS)},
    ignored=ROPE_BUFFERS,
)

QWEN3_MOE = WeightTable(
    family="qwen3_moe",
    rules=(
        *outer_rules(),
        *attention_rules("q_norm", "k_norm"),
        *dense_rules(),
        router_rule("num_experts", "hidden_size"),
    ),
    layouts={"per_expert": per_expert_rules(*_EXPERTS), "fused": fused_rules(*_EXPERTS)},
    ignored=ROPE_BUFFERS,
)
