"""OLMoE (model_type "olmoe"): names of transformers' modeling_olmoe, versions 4 and 5.

Version 4, and version 5 by default, store every expert's projections apart. Version 5 can store
them as its modules hold them (`save_original_format=False`): `gate_up_proj` [E, 2F, D] with the
gate first (`linear(x, gate_up_proj[e]).chunk(2, dim=-1)`), `down_proj` [E, D, F], both without
`.weight`.
"""

from cam_jax.conversion.tables.table import Ignored, Rule, WeightTable

_LAYER = "model.layers.{l}"
_HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads")
_EXPERTS = ("num_experts", "intermediate_size", "hidden_size")


def _attention() -> tuple[Rule, ...]:
    rules = []
    for letter in "qkvo":
        leaf, tensor = f"layers.{{l}}.attn.{letter}", f"{_LAYER}.self_attn.{letter}_proj"
        rules.append(Rule(leaf=leaf, tensor=f"{tensor}.weight", fields=_HEADS))
        rules.append(Rule(leaf=f"{leaf}_bias", tensor=f"{tensor}.bias", fields=_HEADS))
    for norm in ("q_norm", "k_norm"):
        leaf, tensor = f"layers.{{l}}.attn.{norm}", f"{_LAYER}.self_attn.{norm}.weight"
        rules.append(Rule(leaf=leaf, tensor=tensor, fields=_HEADS))
    return tuple(rules)


def _one_by_one() -> tuple[Rule, ...]:
    return tuple(
        Rule(
            leaf=f"layers.{{l}}.moe.experts.{name}",
            tensor=f"{_LAYER}.mlp.experts.{{e}}.{name}_proj.weight",
            fields=_EXPERTS,
        )
        for name in ("gate", "up", "down")
    )


def _fused() -> tuple[Rule, ...]:
    leaf, tensor = "layers.{l}.moe.experts.", f"{_LAYER}.mlp.experts."
    gate_up = f"{tensor}gate_up_proj"
    return (
        Rule(leaf=f"{leaf}gate", tensor=gate_up, axis=1, part=0, parts=2, fields=_EXPERTS),
        Rule(leaf=f"{leaf}up", tensor=gate_up, axis=1, part=1, parts=2, fields=_EXPERTS),
        Rule(leaf=f"{leaf}down", tensor=f"{tensor}down_proj", fields=_EXPERTS),
    )


TABLE = WeightTable(
    family="olmoe",
    rules=(
        Rule(
            leaf="embed", tensor="model.embed_tokens.weight", fields=("vocab_size", "hidden_size")
        ),
        Rule(leaf="final_norm", tensor="model.norm.weight", fields=("hidden_size",)),
        Rule(
            leaf="lm_head",
            tensor="lm_head.weight",
            fields=("vocab_size", "hidden_size"),
            tied_to="embed",
        ),
        Rule(
            leaf="layers.{l}.attn_norm",
            tensor=f"{_LAYER}.input_layernorm.weight",
            fields=("hidden_size",),
        ),
        Rule(
            leaf="layers.{l}.ffn_norm",
            tensor=f"{_LAYER}.post_attention_layernorm.weight",
            fields=("hidden_size",),
        ),
        *_attention(),
        Rule(
            leaf="layers.{l}.moe.router",
            tensor=f"{_LAYER}.mlp.gate.weight",
            fields=("num_experts", "hidden_size"),
        ),
    ),
    layouts={"per_expert": _one_by_one(), "fused": _fused()},
    ignored=(
        Ignored(
            tensor=f"{_LAYER}.self_attn.rotary_emb.inv_freq",
            reason="RoPE frequencies are computed from the config (old transformers stored them)",
        ),
        Ignored(
            tensor="model.rotary_emb.inv_freq",
            reason="RoPE frequencies are computed from the config",
        ),
    ),
)
