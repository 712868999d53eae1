"""A plain NumPy MoE layer to test the real ones against, and small layers to test with."""

import jax
import jax.numpy as jnp
import numpy as np

from cam_jax.experts import ExpertWeights, MoEParams, SharedExpert


def make_params(
    *,
    num_experts: int = 8,
    features: int = 6,
    hidden: int = 5,
    shared: str | None = None,
    dtype=jnp.float32,
    seed: int = 0,
) -> MoEParams:
    """Random weights of unit-sized outputs. ``shared``: None, "plain" or "gated"."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    def ffn(*lead: int) -> dict[str, jax.Array]:
        return {
            "gate": weights(*lead, hidden, features),
            "up": weights(*lead, hidden, features),
            "down": weights(*lead, features, hidden),
        }

    common = None
    if shared is not None:
        common = SharedExpert(**ffn(), router=weights(1, features) if shared == "gated" else None)
    return MoEParams(
        router=3 * weights(num_experts, features),
        experts=ExpertWeights(**ffn(num_experts)),
        shared=common,
    )


def swiglu(x, gate, up, down) -> np.ndarray:
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    hidden = x @ gate.T
    return (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T


def moe(x, weights, experts: ExpertWeights) -> np.ndarray:
    """[T, D] from tokens [T, D] and what each token takes of each expert, weights [T, E]."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out = np.zeros_like(x)
    for e in range(weights.shape[1]):
        mine = weights[:, e] != 0
        y = swiglu(x[mine], experts.gate[e], experts.up[e], experts.down[e])
        out[mine] += weights[mine, e, None] * y
    return out


def plan_weights(plan) -> np.ndarray:
    """[T, E]: what each token takes of each expert by ``plan`` (of one group)."""
    out = np.zeros((plan.num_tokens, plan.num_experts + 1))
    tokens = np.arange(plan.num_tokens)[:, None]
    np.add.at(out, (tokens, np.asarray(plan.choice_expert)), np.asarray(plan.choice_weight))
    return out[:, :-1]
