"""Rules that families share: what decoders of the Llama kind are called in transformers."""

from cam_jax.conversion.tables.table import Ignored, Rule

LAYER = "model.layers.{l}"
HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def outer_rules() -> tuple[Rule, ...]:
    """Embedding, final norm, output head and the two norms of a layer."""
    table = ("vocab_size", "hidden_size")
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    return (
        Rule(leaf="embed", tensor="model.embed_tokens.weight", fields=table),
        Rule(leaf="final_norm", tensor="model.norm.weight", fields=("hidden_size",)),
        Rule(leaf="lm_head", tensor="lm_head.weight", fields=table, tied_to="embed"),
        *(
            Rule(
                leaf=f"layers.{{l}}.{leaf}",
                tensor=f"{LAYER}.{name}.weight",
                fields=("hidden_size",),
            )
            for leaf, name in norms.items()
        ),
    )


def attention_rules(*norms: str) -> tuple[Rule, ...]:
    """The projections with and without bias, and the norms named."""
    rules = []
    for letter in "qkvo":
        leaf, tensor = f"layers.{{l}}.attn.{letter}", f"{LAYER}.self_attn.{letter}_proj"
        rules.append(Rule(leaf=leaf, tensor=f"{tensor}.weight", fields=HEADS))
        rules.append(Rule(leaf=f"{leaf}_bias", tensor=f"{tensor}.bias", fields=HEADS))
    for norm in norms:
        leaf, tensor = f"layers.{{l}}.attn.{norm}", f"{LAYER}.self_attn.{norm}.weight"
        rules.append(Rule(leaf=leaf, tensor=tensor, fields=HEADS))
    return tuple(rules)


def swiglu_rules(leaf: str, tensor: str, *fields: str) -> tuple[Rule, ...]:
    """gate, up and down of one MLP: `leaf`.gate is `tensor`.gate_proj.weight."""
    return tuple(
        Rule(
            leaf=f"layers.{{l}}.{leaf}.{name}",
            tensor=f"{LAYER}.{tensor}.{name}_proj.weight",
            fields=fields,
        )
        for name in ("gate", "up", "down")
    )


def dense_rules() -> tuple[Rule, ...]:
    """The MLP of a layer without experts."""
    return swiglu_rules("mlp", "mlp", "intermediate_size", "hidden_size")


def router_rule(*fields: str) -> Rule:
    """The router's weight as `mlp.gate`."""
    return Rule(leaf="layers.{l}.moe.router", tensor=f"{LAYER}.mlp.gate.weight", fields=fields)


def per_expert_rules(*fields: str) -> tuple[Rule, ...]:
    """Every expert's projections apart."""
    return swiglu_rules("moe.experts", "mlp.experts.{e}", *fields)


def fused_rules(*fields: str) -> tuple[Rule, ...]:
    """Experts as the modules of transformers 5 hold them (`save_original_format=False`).

    `gate_up_proj` [E, 2F, D] with the gate first (`linear(x, gate_up_proj[e]).chunk(2, dim=-1)`),
    `down_proj` [E, D, F], both without `.weight`.
    """
    leaf, tensor = "layers.{l}.moe.experts.", f"{LAYER}.mlp.experts."
    gate_up = f"{tensor}gate_up_proj"
    return (
        Rule(leaf=f"{leaf}gate", tensor=gate_up, axis=1, part=0, parts=2, fields=fields),
        Rule(leaf=f"{leaf}up", tensor=gate_up, axis=1, part=1, parts=2, fields=fields),
        Rule(leaf=f"{leaf}down", tensor=f"{tensor}down_proj", fields=fields),
    )


ROPE_BUFFERS = (
    Ignored(
        tensor=f"{LAYER}.self_attn.rotary_emb.inv_freq",
        reason="RoPE frequencies are computed from the config (old transformers stored them)",
    ),
    Ignored(
        tensor="model.rotary_emb.inv_freq",
        reason="RoPE frequencies are computed from the config",
    ),
)
