"""Who may be kept: the top-k, Expanded Drop's local experts, less the experts Expert Drop skips."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import PolicyError
from cam_jax.router import Selection, one_hot_any


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Assignments that compete for slots, all [T, E] bool.

    Attributes:
        original: the top-k of valid, finite tokens (a masked expert is nobody's choice).
        top_k: ``original`` without the experts that Expert Drop skips.
        all: ``top_k`` and the expanded ones.
        selectable: assignments that rerouting may make.
        most_extra: static, at most this many expanded candidates per token.
    """

    original: Bool[Array, "T E"]
    top_k: Bool[Array, "T E"]
    all: Bool[Array, "T E"]
    selectable: Bool[Array, "T E"]
    most_extra: int


def find_candidates(
    selection: Selection,
    policy: CapacityPolicy,
    *,
    valid: Bool[Array, " T"],
    demand: Int[Array, " E"] | None,
    ep_size: int,
    ep_rank: int | Int[Array, "*T"],
    local: Bool[Array, "*T E"] | None,
) -> Candidates:
    """The candidates of a group, before any ceiling. See `cam_jax.route` for the arguments."""
    num_experts = selection.scores.shape[-1]
    possible = (valid & selection.finite)[:, None] & (selection.choice > -jnp.inf)
    original = one_hot_any(selection.experts, num_experts) & possible

    skip_count = math.floor(policy.expert_drop * num_experts + 0.5)  # round half up
    if skip_count:
        if skip_count >= num_experts:
            raise PolicyError(
                f"expert_drop={policy.expert_drop} skips all {num_experts} experts: use less"
            )
        wanted = original.sum(0, dtype=jnp.int32) if demand is None else demand
        possible &= ~_least_demanded(wanted, skip_count)
    top_k = original & possible

    if policy.expand is None:
        return Candidates(
            original=original, top_k=top_k, all=top_k, selectable=possible, most_extra=0
        )
    if local is None:
        per_device = -(-num_experts // ep_size)
        experts = jnp.arange(num_experts, dtype=jnp.int32)
        local = experts // per_device == jnp.asarray(ep_rank)[..., None]
    else:
        per_device = num_experts
    offered = possible & local
    most = per_device if policy.expand == "local" else min(policy.expand, per_device)
    if most < per_device:
        best, experts = jax.lax.top_k(jnp.where(offered, selection.choice, -jnp.inf), most)
        offered = one_hot_any(jnp.where(best > -jnp.inf, experts, num_experts), num_experts)
    return Candidates(
        original=original,
        top_k=top_k,
        all=top_k | offered,
        selectable=possible,
        most_extra=min(most, num_experts - selection.experts.shape[-1]),
    )


def _least_demanded(demand: Int[Array, " E"], count: int) -> Bool[Array, " E"]:
    """The ``count`` experts with the least demand; ties: the lower id is skipped first."""
    order = jnp.argsort(demand, stable=True)[:count]
    return jnp.zeros(demand.shape, bool).at[order].set(True)
