"""Routing of several groups at once: what the one-device layer and the mesh layer have in common.

G groups of T tokens each, D features, E experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from cam_jax.candidates import find_candidates
from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import MoEParams
from cam_jax.plan import RoutingPlan
from cam_jax.router import RouterConfig, Selection, select
from cam_jax.routing import NO_POLICY, route


def router_logits(
    x: Float[Array, "*rest D"], weight: Float[Array, "E D"]
) -> Float[Array, "*rest E"]:
    """Float32 at the highest precision: bfloat16 logits would change the selection."""
    return jnp.einsum(
        "...d,ed->...e",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )


def select_groups(
    x: Float[Array, "G T D"], valid: Bool[Array, "G T"], params: MoEParams, router: RouterConfig
) -> Selection:
    """Every token's selection, leading axes [G, T]. A row that is not finite selects nothing."""
    # A row that is not finite leaves the matmul and comes back as NaN logits: otherwise its NaN,
    # times a gradient of 0, would still be NaN in the router's gradient.
    usable = valid & jnp.isfinite(x).all(-1)
    logits = router_logits(jnp.where(usable[..., None], x, 0), params.router)
    logits = jnp.where(usable[..., None], logits, jnp.nan)
    return jax.vmap(lambda row: select(row, router, bias=params.bias))(logits)


def group_demand(selection: Selection, valid: Bool[Array, "G T"]) -> Int[Array, " E"]:
    """How many valid, finite tokens of all groups chose each expert."""

    def one(selection: Selection, valid: Bool[Array, " T"]) -> Int[Array, " E"]:
        found = find_candidates(
            selection, NO_POLICY, valid=valid, demand=None, ep_size=1, ep_rank=0, local=None
        )
        return found.original.sum(0, dtype=jnp.int32)

    return jax.vmap(one)(selection, valid).sum(0, dtype=jnp.int32)


def route_groups(
    selection: Selection,
    policy: CapacityPolicy,
    *,
    valid: Bool[Array, "G T"],
    priority: Int[Array, "G T"] | None,
    demand: Int[Array, " E"] | None,
    layer: int | Int[Array, ""],
    index: Int[Array, " G"],
    ep_rank: Int[Array, "G *T"],
    ep_size: int,
) -> RoutingPlan:
    """One plan for all groups, with leading axis [G]. See `cam_jax.route` for the arguments."""

    def one(
        selection: Selection, valid: Array, priority: Array | None, index: Array, ep_rank: Array
    ) -> RoutingPlan:
        return route(
            selection,
            policy,
            valid=valid,
            priority=priority,
            demand=demand,
            layer=layer,
            group_index=index,
            ep_size=ep_size,
            ep_rank=ep_rank,
        )

    return jax.vmap(one)(selection, valid, priority, index, ep_rank)
