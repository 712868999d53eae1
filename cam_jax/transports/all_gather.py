"""Expert parallelism over gathered tokens: all-gather -> own experts -> reduce-scatter.

Run inside `jax.shard_map` over a mesh of `cam_jax.make_mesh`. `all_gather` serves group="batch",
whose ceiling is that of all tokens together; `gathered_dropless` serves no ceiling. Both send every
token to every device, which suits few devices; neither drops anything on its own account.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from cam_jax.dispatch import combine_rows, take_rows
from cam_jax.experts import ExpertWeights, expert_buffers
from cam_jax.mesh import DATA, EXPERT, TOKENS
from cam_jax.plan import RoutingPlan
from cam_jax.transports.dropless import sorted_by_expert


def all_gather(
    x: Float[Array, "1 T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "1 T D"]:
    """``x``: this device's tokens. ``plan``: that of the tokens of all devices, the same on each.

    A device runs its own experts, and of their slots its share of the data axis (each copy of an
    expert takes a part). The result is a partial sum where experts are spread over "tensor".
    """
    everyone = lax.all_gather(x[0], TOKENS, axis=0, tiled=True)
    local, copies = experts.gate.shape[0], lax.axis_size(DATA)
    num_tokens, width = plan.num_tokens, plan.token.shape[-1]
    share = -(-width // copies)
    first_expert, first_slot = local * lax.axis_index(EXPERT), share * lax.axis_index(DATA)

    expert = first_expert + jnp.arange(local, dtype=jnp.int32)[:, None]
    position = first_slot + jnp.arange(share, dtype=jnp.int32)[None]
    own = (expert < plan.num_experts) & (position < width)
    own_slots = jnp.where(own, expert * width + position, plan.num_experts * width).reshape(-1)
    token = plan.token.reshape(-1).at[own_slots].get(mode="fill", fill_value=num_tokens)
    weight = plan.weight.reshape(-1).at[own_slots].get(mode="fill", fill_value=0.0)

    slot = plan.choice_slot[0]
    there = slot // width - first_expert, slot % width - first_slot
    here = (there[0] >= 0) & (there[0] < local) & (there[1] >= 0) & (there[1] < share)
    here &= slot < plan.num_experts * width
    choice_slot = jnp.where(here, there[0] * share + there[1], local * share)

    rows = take_rows(everyone, token, choice_slot)
    y = expert_buffers(rows.reshape(local, share, -1), experts).reshape(rows.shape)
    choice_weight = jnp.where(here, plan.choice_weight[0], 0.0)
    partial = combine_rows(y, token, weight, choice_slot, choice_weight)
    return lax.psum_scatter(partial, TOKENS, scatter_dimension=0, tiled=True)[None]


def gathered_dropless(
    x: Float[Array, "G T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "G T D"]:
    """``x`` and ``plan``: this device's. Only the choices of the plan travel, not its slots.

    Tokens are gathered over "expert" alone: every copy of the experts on "data" serves its own.
    """

    def gather(leaf: Array) -> Array:
        return lax.all_gather(leaf, EXPERT, axis=0, tiled=True)

    local = experts.gate.shape[0]
    chosen = gather(plan.choice_expert)
    expert = chosen - local * lax.axis_index(EXPERT)
    here = (chosen < plan.num_experts) & (expert >= 0) & (expert < local)
    everyone = gather(x)
    choices = expert.shape[-1]
    partial = sorted_by_expert(
        everyone.reshape(-1, x.shape[-1]),
        jnp.where(here, expert, local).reshape(-1, choices),
        jnp.where(here, gather(plan.choice_weight), 0.0).reshape(-1, choices),
        experts,
        most=expert.size // choices * min(choices, local),
    )
    return lax.psum_scatter(
        partial.reshape(everyone.shape), EXPERT, scatter_dimension=0, tiled=True
    )
