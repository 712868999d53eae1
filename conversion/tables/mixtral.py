"""Mixtral (model_type "mixtral"): `block_sparse_moe` with w1, w2, w3, or transformers 5's names.

w1 is the gate, w3 the up and w2 the down projection. Transformers 5 writes these names too, unless
told to store what its modules hold (`save_original_format=False`).
"""

from cam_jax.conversion.tables.common import (
    LAYER,
    ROPE_BUFFERS,
    attention_rules,
    fused_rules,
    outer_rules,
    router_rule,
)
from cam_jax.conversion.tables.table import Rule, WeightTable

_EXPERTS = ("num_local_experts", "intermediate_size", "hidden_size")
_ROUTER = ("num_local_experts", "hidden_size")


def _per_expert() -> tuple[Rule, ...]:
    block = f"{LAYER}.block_sparse_moe"
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return (
        Rule(leaf="layers.{l}.moe.router", tensor=f"{block}.gate.weight", fields=_ROUTER),
        *(
            Rule(
                leaf=f"layers.{{l}}.moe.experts.{leaf}",
                tensor=f"{block}.experts.{{e}}.{name}.weight",
                fields=_EXPERTS,
            )
            for leaf, name in names.items()
        ),
    )


TABLE = WeightTable(
    family="mixtral",
    rules=(*outer_rules(), *attention_rules()),
    layouts={
        "per_expert": _per_expert(),
        "fused": (router_rule(*_ROUTER), *fused_rules(*_EXPERTS)),
    },
    ignored=ROPE_BUFFERS,
)
