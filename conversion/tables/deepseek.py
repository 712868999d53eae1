"""DeepSeek-MoE, V2 and V3 (model_type "deepseek", "deepseek_v2", "deepseek_v3").

V3's multi-token prediction layers stand behind the decoder's, as many as the config counts; they
repeat a layer's names and the embedding's, and transformers does not load them either.
"""

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
from cam_jax.conversion.tables.table import Ignored, Rule, WeightTable

_EXPERTS = ("n_routed_experts", "moe_intermediate_size", "hidden_size")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "hidden_size")
_QUERY = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank")
_LAYOUTS = {"per_expert": per_expert_rules(*_EXPERTS), "fused": fused_rules(*_EXPERTS)}


def _mlp_rules() -> tuple[Rule, ...]:
    """Dense layers, router and shared experts."""
    return (
        *dense_rules(),
        router_rule("n_routed_experts", "hidden_size"),
        *swiglu_rules(
            "moe.shared",
            "mlp.shared_experts",
            "n_shared_experts",
            "moe_intermediate_size",
            "hidden_size",
        ),
    )


def _latent_rules() -> tuple[Rule, ...]:
    """MLA's projections, the queries' with and without a latent."""

    def rule(leaf: str, tensor: str, *fields: str) -> Rule:
        return Rule(
            leaf=f"layers.{{l}}.attn.{leaf}", tensor=f"{LAYER}.self_attn.{tensor}", fields=fields
        )

    return (
        rule("q", "q_proj.weight", *_QUERY),
        rule("q_a", "q_a_proj.weight", "q_lora_rank", "hidden_size"),
        rule("q_a_bias", "q_a_proj.bias", "q_lora_rank"),
        rule("q_a_norm", "q_a_layernorm.weight", "q_lora_rank"),
        rule("q_b", "q_b_proj.weight", *_QUERY),
        rule("kv_a", "kv_a_proj_with_mqa.weight", *_LATENT),
        rule("kv_a_bias", "kv_a_proj_with_mqa.bias", *_LATENT),
        rule("kv_a_norm", "kv_a_layernorm.weight", "kv_lora_rank"),
        rule(
            "kv_b",
            "kv_b_proj.weight",
            "num_attention_heads",
            "qk_nope_head_dim",
            "v_head_dim",
            "kv_lora_rank",
        ),
        rule("o", "o_proj.weight", "num_attention_heads", "v_head_dim", "hidden_size"),
        rule("o_bias", "o_proj.bias", "hidden_size"),
    )


DEEPSEEK = WeightTable(
    family="deepseek",
    rules=(*outer_rules(), *attention_rules(), *_mlp_rules()),
    layouts=_LAYOUTS,
    ignored=ROPE_BUFFERS,
)

DEEPSEEK_V2 = WeightTable(
    family="deepseek_v2",
    rules=(*outer_rules(), *_latent_rules(), *_mlp_rules()),
    layouts=_LAYOUTS,
    ignored=ROPE_BUFFERS,
)

DEEPSEEK_V3 = WeightTable(
    family="deepseek_v3",
    rules=(
        *outer_rules(),
        *_latent_rules(),
        *_mlp_rules(),
        Rule(
            leaf="layers.{l}.moe.bias",
            tensor=f"{LAYER}.mlp.gate.e_score_correction_bias",
            fields=("n_routed_experts",),
            wide=True,  # rounded to bfloat16 it would choose other experts
        ),
    ),
    layouts=_LAYOUTS,
    ignored=(
        *ROPE_BUFFERS,
        Ignored(
            tensor=f"{LAYER}.{{rest}}",
            reason="multi-token prediction layers are not part of the decoder",
            extra_layers=("num_nextn_predict_layers", "num_mtp_layers"),
        ),
    ),
)
