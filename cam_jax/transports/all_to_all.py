"""Expert parallelism with a static buffer: slots -> all-to-all -> experts -> all-to-all -> tokens.

Runs inside `jax.shard_map` over a mesh of `cam_jax.make_mesh`. Each device fills the slots that its
own tokens may use (the ceiling acts *before* anything is sent), so the messages have one size
whatever the routing: `[devices, E_local, G·C, D]`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from cam_jax.dispatch import combine, dispatch, merge_groups
from cam_jax.experts import ExpertWeights, expert_buffers, expert_rows
from cam_jax.mesh import EXPERT
from cam_jax.plan import RoutingPlan


def all_to_all(
    x: Float[Array, "G T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "G T D"]:
    """See `cam_jax.transports`; ``x`` and ``plan`` are this device's, so are ``experts`` [E_local].

    The result is a partial sum where each expert is spread over "tensor".
    """
    merged = merge_groups(plan)
    rows = dispatch(x.reshape(-1, x.shape[-1]), merged)
    if plan.token.shape[-2] == plan.num_experts:
        back = _visit_buffers(rows, experts)
    else:
        back = _visit_sorted(rows, _local_ids(merged, experts), experts)
    return combine(back[: rows.shape[0]], merged).reshape(x.shape)


def _visit_buffers(rows: Float[Array, "E W D"], experts: ExpertWeights) -> Float[Array, "P W D"]:
    """Every expert's slots through it, wherever it lives; P = E with the dead experts' padding."""
    devices, local = lax.axis_size(EXPERT), experts.gate.shape[0]
    rows = jnp.pad(rows, ((0, devices * local - rows.shape[0]), (0, 0), (0, 0)))
    _, width, features = rows.shape
    received = _exchange(rows.reshape(devices, local, width, features))
    y = expert_buffers(received.swapaxes(0, 1).reshape(local, devices * width, features), experts)
    back = _exchange(y.reshape(local, devices, width, features).swapaxes(0, 1))
    return back.reshape(devices * local, width, features)


def _visit_sorted(
    rows: Float[Array, "devices W D"], ids: Int[Array, "devices W"], experts: ExpertWeights
) -> Float[Array, "devices W D"]:
    """scope="device": a device's slots hold any of its experts, so their ids travel too."""
    local = experts.gate.shape[0]
    received, expert = _exchange(rows), _exchange(ids).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    sizes = (expert[:, None] == jnp.arange(local)).sum(0, dtype=jnp.int32)
    flat = received.reshape(-1, received.shape[-1])
    y = expert_rows(flat[order], experts, sizes)[place]
    return _exchange(y.reshape(received.shape))


def _local_ids(plan: RoutingPlan, experts: ExpertWeights) -> Int[Array, "devices W"]:
    """Each slot's expert as its index on the device that holds it; E_local where it is empty."""
    local = experts.gate.shape[0]
    first = local * jnp.arange(plan.expert.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(plan.expert < plan.num_experts, plan.expert - first, local)


def _exchange(blocks: Shaped[Array, "devices *rest"]) -> Shaped[Array, "devices *rest"]:
    """Block d goes to device d of this expert-parallel group; what comes back is one from each."""
    return lax.all_to_all(blocks, EXPERT, split_axis=0, concat_axis=0, tiled=True)
