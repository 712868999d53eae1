"""Sort what was kept by expert, then grouped matmul: work follows the kept assignments.

Without a ceiling nothing was dropped, hence the name. With one it serves the same plan (all of
scope="device" on one device, whose bins hold several experts); what the plan dropped stays dropped.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from cam_jax.dispatch import combine_rows, take_rows
from cam_jax.experts import ExpertWeights, expert_rows
from cam_jax.plan import RoutingPlan


def dropless(
    x: Float[Array, "G T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "G T D"]:
    """See `cam_jax.transports`. Uses the plan's choices only, never its slots."""
    num_experts = plan.num_experts
    groups, tokens, choices = plan.choice_expert.shape
    flat = groups * tokens
    expert = plan.choice_expert.reshape(flat * choices)
    # A ceiling bounds what can be kept, often far below N per token when N is large (expansion).
    rows = min(flat * choices, math.prod(plan.token.shape))

    order = _sort_by_expert(expert, num_experts)[:rows]
    row_of = jnp.full(flat * choices, rows, jnp.int32)
    row_of = row_of.at[order].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    row_of = jnp.where(expert < num_experts, row_of, rows).reshape(flat, choices)
    token = jnp.where(expert[order] < num_experts, order // choices, flat)
    weight = plan.choice_weight.reshape(-1)

    sizes = plan.load.load.sum(0)
    y = expert_rows(take_rows(x.reshape(flat, -1), token, row_of), experts, sizes)
    weight_of = plan.choice_weight.reshape(flat, choices)
    return combine_rows(y, token, weight[order], row_of, weight_of).reshape(x.shape)


def _sort_by_expert(expert: Int[Array, " M"], num_experts: int) -> Int[Array, " M"]:
    """The order that sorts assignments by expert, those without one (id E) last."""
    count = expert.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    if (num_experts + 1) * count <= np.iinfo(np.int32).max:
        # One key that holds both sorts in half the time of two operands.
        return lax.sort(expert * count + index, is_stable=False) % count
    return lax.sort((expert, index), num_keys=1, is_stable=True)[1]
