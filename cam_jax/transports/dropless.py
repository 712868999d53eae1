"""Sort what was kept by expert, then grouped matmul: work follows the kept assignments.

Without a ceiling nothing was dropped, hence the name. With one it serves the same plan (all of
scope="device" on one device, whose bins hold several experts); what the plan dropped stays dropped.
"""

import math
from collections.abc import Callable

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
    choices = plan.choice_expert.shape[-1]
    return sorted_by_expert(
        x.reshape(-1, x.shape[-1]),
        plan.choice_expert.reshape(-1, choices),
        plan.choice_weight.reshape(-1, choices),
        experts,
        # A ceiling bounds what can be kept, often far below N per token where experts expand.
        most=math.prod(plan.token.shape),
    ).reshape(x.shape)


def sorted_by_expert(
    x: Float[Array, "T D"],
    choice_expert: Int[Array, "T N"],
    choice_weight: Float[Array, "T N"],
    experts: ExpertWeights,
    *,
    most: int | None = None,
) -> Float[Array, "T D"]:
    """Every token through its experts; ids of E and more mean none.

    Args:
        most: no more than this many choices name an expert, if known.
    """

    def visit(rows: Array, sizes: Array) -> Array:
        return expert_rows(rows, experts, sizes)

    return visit_by_expert(
        x, choice_expert, choice_weight, visit, num_experts=experts.gate.shape[0], most=most
    )


def visit_by_expert(
    x: Float[Array, "T D"],
    choice_expert: Int[Array, "T N"],
    choice_weight: Float[Array, "T N"],
    visit: Callable[[Float[Array, "M D"], Int[Array, " E"]], Float[Array, "M D"]],
    *,
    num_experts: int,
    most: int | None = None,
) -> Float[Array, "T D"]:
    """Sorts assignments by expert, lets ``visit`` take (rows, rows per expert) to their experts,
    and adds up what comes back.

    Args:
        most: no more than this many choices name an expert, if known.
    """
    num_tokens, choices = choice_expert.shape
    expert = jnp.minimum(choice_expert, num_experts).reshape(-1)
    rows = num_tokens * choices if most is None else min(num_tokens * choices, most)

    order = sort_by_expert(expert, num_experts)[:rows]
    row_of = jnp.full(num_tokens * choices, rows, jnp.int32)
    row_of = row_of.at[order].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    row_of = jnp.where(expert < num_experts, row_of, rows).reshape(num_tokens, choices)
    ordered = expert[order]
    token = jnp.where(ordered < num_experts, order // choices, num_tokens)
    ends = jnp.searchsorted(ordered, jnp.arange(num_experts, dtype=jnp.int32), side="right")
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    y = visit(take_rows(x, token, row_of), sizes)
    weight = choice_weight.reshape(-1)[order]
    return combine_rows(y, token, weight, row_of, choice_weight)


def sort_by_expert(expert: Int[Array, " M"], num_experts: int) -> Int[Array, " M"]:
    """The order that sorts assignments by expert, those without one (id E) last."""
    count = expert.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    if (num_experts + 1) * count <= np.iinfo(np.int32).max:
        # One key that holds both sorts in half the time of two operands.
        return lax.sort(expert * count + index, is_stable=False) % count
    return lax.sort((expert, index), num_keys=1, is_stable=True)[1]
