"""Reroute: unplaced assignments are offered to experts that still have free slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from cam_jax import capacity_pass
from cam_jax.candidates import Candidates
from cam_jax.capacity import CapacityPolicy
from cam_jax.router import Selection, one_hot_any


def reroute(
    selection: Selection,
    candidates: Candidates,
    kept: Bool[Array, "T E"],
    keys: capacity_pass.Keys,
    *,
    ceiling: Int[Array, ""],
    width: int,
    policy: CapacityPolicy,
) -> Bool[Array, "T E"]:
    """Places what it can of the unplaced original assignments; what was kept stays.

    In each of ``policy.reroute_rounds`` rounds a token with j unplaced original assignments
    proposes itself to its j best selectable experts (by selection score) that had a free slot at
    the start of the round and do not hold it, and every expert fills its free slots in capacity
    order. No token is brought above K experts. Expanded candidates do not reroute, and neither do
    assignments to experts that Expert Drop skips: those are dropped, not unplaced.
    """
    num_tokens, num_experts = kept.shape
    top_k = selection.experts.shape[-1]
    placed_so_far = jnp.zeros(num_tokens, jnp.int32)
    unplaced = (candidates.top_k & ~kept).sum(-1, dtype=jnp.int32)
    for _ in range(policy.reroute_rounds):
        free = jnp.maximum(ceiling - kept.sum(0, dtype=jnp.int32), 0)
        room = jnp.maximum(top_k - kept.sum(-1, dtype=jnp.int32), 0)
        wanted = jnp.minimum(unplaced - placed_so_far, room)
        open_to = candidates.selectable & ~kept & (free > 0)
        best, experts = jax.lax.top_k(jnp.where(open_to, selection.choice, -jnp.inf), top_k)
        asked = (jnp.arange(top_k) < wanted[:, None]) & (best > -jnp.inf)
        proposals = one_hot_any(jnp.where(asked, experts, num_experts), num_experts)
        order = capacity_pass.fill(
            proposals.T, tuple(key.T for key in keys), limit=free, width=width
        )
        placed = capacity_pass.mark(order, num_tokens).T
        kept |= placed
        placed_so_far += placed.sum(-1, dtype=jnp.int32)
    return kept
