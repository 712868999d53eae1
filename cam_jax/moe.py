"""The MoE layer: router, groups, routing, and the transport that policy and devices call for.

B sequences, S positions, G groups, T tokens of one group, D features, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import InputError, MeshError, PolicyError
from cam_jax.expert_parallel import expert_parallel_layer, padded_experts
from cam_jax.experts import MoEParams, check_shapes, shared_expert
from cam_jax.group_routing import group_demand, route_groups, select_groups
from cam_jax.groups import Groups, mesh_sizes
from cam_jax.load_stats import LoadStats
from cam_jax.plan import RoutingPlan
from cam_jax.router import RouterConfig
from cam_jax.routing import check_policy_type, check_priority
from cam_jax.transports import TRANSPORTS, dropless, gather


def moe_layer(
    x: Float[Array, "B S D"] | Float[Array, "T D"],
    params: MoEParams,
    router: RouterConfig,
    policy: CapacityPolicy | None,
    *,
    mesh: Mesh | None = None,
    virtual_devices: int | tuple[int, int] = 1,
    valid: Bool[Array, "..."] | None = None,
    priority: Int[Array, "..."] | None = None,
    layer: int | Int[Array, ""] = 0,
    transport: str | None = None,
) -> tuple[Float[Array, "..."], LoadStats]:
    """Routes every token to its experts under ``policy`` and adds up what they make of it.

    Router logits are float32 whatever the dtype of ``x``. A token without any expert (dropped by
    all, or not finite) gets 0, and the shared expert's output where there is one; padding gets 0.

    Args:
        x: hidden states; [T, D] means T sequences of one position. Sequences are divided evenly
            over the devices, so leave out those without any valid position.
        params: the layer's weights.
        router: how the model selects and weighs experts.
        policy: the ceiling, static; None: the model as trained.
        mesh: of `cam_jax.make_mesh`: sequences lie over data x expert, experts over "expert", their
            hidden features over "tensor"; None: one device. There must be a sequence for each
            device, and may be dead experts behind the router's own, as weights on a mesh have them.
        virtual_devices: emulate the groups of so many expert-parallel devices, or of a
            (data, expert) mesh, on this one.
        valid: [B, S] ([T] with [T, D]), which positions are real; all if None.
        priority: same shape, integers; larger is kept first.
        layer: number of this layer, for metric="random"; may be traced.
        transport: by name; None: "dropless" without a ceiling and for scope="device", else
            "gather". "einsum" is for reading and small groups. On a mesh a ceiling leaves no
            choice: "all_to_all", or "all_gather" with group="batch". Without one, "dropless" is
            "ragged" (`lax.ragged_all_to_all`) on TPU and "gathered" elsewhere.

    Returns:
        What is to be added to the residual, shape and dtype of ``x``, and the statistics of all
        groups together.

    Raises:
        InputError: an empty input, or shapes that do not fit each other.
        PolicyError: a transport that cannot serve the policy.
        MeshError: a mesh that the layer does not fit.
    """
    x = jnp.asarray(x)
    policy = check_policy_type(policy)
    data, expert = mesh_sizes(virtual_devices)
    experts = router.num_experts if mesh is None else padded_experts(router, mesh)
    x3, valid2, priority2 = _as_rows(x, params, router, policy, valid, priority, experts)
    # Padding may hold anything; a NaN there would reach the gradients of the shared expert.
    x3 = jnp.where(valid2[..., None], x3, 0)
    if mesh is not None:
        if (data, expert) != (1, 1):
            raise MeshError(
                f"virtual_devices={virtual_devices} emulates devices where a mesh has real ones: "
                "give one of them"
            )
        y, load = expert_parallel_layer(
            x3,
            params,
            router,
            policy,
            mesh=mesh,
            valid=valid2,
            priority=priority2,
            layer=layer,
            transport=transport,
        )
        return y.reshape(x.shape), load
    run = _transport(transport, policy)
    groups = Groups(
        rows=x3.shape[0],
        positions=x3.shape[1],
        # Without a ceiling nothing competes, and one group is the cheapest.
        group=policy.group if policy.limited else "batch",
        data=data,
        expert=expert,
    )
    x_g, valid_g = groups.split(x3), groups.split(valid2)
    priority_g = None if priority2 is None else groups.split(priority2)
    selection = select_groups(x_g, valid_g, params, router)
    # All groups skip the same experts.
    demand = group_demand(selection, valid_g) if policy.expert_drop else None

    def plan(policy: CapacityPolicy) -> RoutingPlan:
        return route_groups(
            selection,
            policy,
            valid=valid_g,
            priority=priority_g,
            demand=demand,
            layer=layer,
            index=jnp.asarray(groups.index),
            ep_rank=jnp.asarray(groups.ep_rank),
            ep_size=groups.expert,
        )

    y_g, load = run(x_g, plan, policy, params)
    y = groups.merge(y_g)
    if params.shared is not None:
        shared = shared_expert(x3.reshape(-1, x3.shape[-1]), params.shared)
        y = jnp.where(valid2[..., None], y + shared.reshape(x3.shape), 0)
    return y.reshape(x.shape), load


# --- from a policy to what runs ---

# (x [G, T, D], plan of a policy, policy, params) -> (y [G, T, D], statistics of all groups)
Runner = Callable[
    [Array, Callable[[CapacityPolicy], RoutingPlan], CapacityPolicy, MoEParams],
    tuple[Array, LoadStats],
]


def _transport(name: str | None, policy: CapacityPolicy) -> Runner:
    """What runs ``policy``; refuses a named transport that cannot."""
    if name is not None and not (isinstance(name, str) and name in TRANSPORTS):
        raise PolicyError(f"transport={name!r}: expected one of {', '.join(TRANSPORTS)}, or None")
    if policy.limited and policy.overflow == "fallback":
        if name is None:
            return _fallback
        if name == "dropless":
            return _exact
        raise PolicyError(
            f"transport={name!r} has no dropless pass for overflow='fallback' to fall back to: "
            "leave transport=None or use 'dropless'"
        )
    if name is None:
        name = "dropless" if not policy.limited or policy.scope == "device" else "gather"
    elif policy.scope == "device" and name != "dropless":
        raise PolicyError(
            f"transport={name!r} needs slots per expert, which scope='device' has not: leave "
            "transport=None or use 'dropless'"
        )
    move = TRANSPORTS[name]

    def run(x: Array, plan: Any, policy: CapacityPolicy, params: MoEParams) -> Any:
        routed = plan(policy)
        return move(x, routed, params.experts), routed.load.sum(0)

    return run


def _without_ceiling(policy: CapacityPolicy) -> CapacityPolicy:
    return dataclasses.replace(policy, capacity_factor=None, capacity=None, overflow="drop")


def _exact(x: Array, plan: Any, policy: CapacityPolicy, params: MoEParams) -> Any:
    routed = plan(_without_ceiling(policy))
    return dropless(x, routed, params.experts), routed.load.sum(0)


def _fallback(x: Array, plan: Any, policy: CapacityPolicy, params: MoEParams) -> Any:
    """Capacity-sized buffers while no group overflows, an exact dropless pass otherwise."""
    capped, exact = plan(policy), plan(_without_ceiling(policy))
    overflow = capped.load.dropped_capacity.sum() > 0
    y = lax.cond(
        overflow,
        lambda: dropless(x, exact, params.experts),
        lambda: gather(x, capped, params.experts),
    )
    load = jax.tree.map(
        lambda a, b: jnp.where(overflow, a, b), exact.load.sum(0), capped.load.sum(0)
    )
    # The ceiling that was asked for stays visible, whichever pass ran.
    return y, dataclasses.replace(load, capacity=capped.load.capacity.max())


def _as_rows(
    x: Array,
    params: MoEParams,
    router: RouterConfig,
    policy: CapacityPolicy,
    valid: Array | None,
    priority: Array | None,
    padded: int,
) -> tuple[Array, Array, Array | None]:
    """Checks every shape; x as [B, S, D], valid and priority as [B, S].

    padded: experts together with the dead ones that weights loaded for a mesh have.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"x has dtype {x.dtype}: the layer takes floating-point hidden states")
    if x.ndim not in (2, 3):
        raise InputError(f"x has shape {x.shape}: expected [B, S, D] or [T, D]")
    if x.size == 0:
        raise InputError(f"x has shape {x.shape}: the layer needs at least one token")
    expected = (router.num_experts, x.shape[-1])
    if params.router.shape != expected:
        raise InputError(
            f"params.router has shape {params.router.shape}: expected [E, D] = {expected}"
        )
    if params.experts.gate.shape[0] not in (router.num_experts, padded):
        raise InputError(
            f"params.experts hold {params.experts.gate.shape[0]} experts, the router "
            f"{router.num_experts}"
        )
    check_shapes(params, x.shape[-1])
    for name, given in (("valid", valid), ("priority", priority)):
        if given is not None and given.shape != x.shape[:-1]:
            raise InputError(f"{name} has shape {given.shape}: expected {x.shape[:-1]}, like x")
    if x.ndim == 2 and policy.limited and policy.group == "sequence":
        raise InputError(
            "x is [T, D], without sequences, but group='sequence': give [B, S, D], or use "
            "group='device' or 'batch'"
        )
    batch = (x.shape[0], 1) if x.ndim == 2 else x.shape[:2]
    if valid is not None and valid.dtype != bool:
        raise InputError(f"valid has dtype {valid.dtype}: expected a bool mask")
    valid = jnp.ones(batch, bool) if valid is None else jnp.asarray(valid).reshape(batch)
    if priority is not None:
        check_priority(priority)
        priority = jnp.asarray(priority).reshape(batch)
    return x.reshape(*batch, x.shape[-1]), valid, priority
