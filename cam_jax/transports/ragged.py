"""Expert parallelism without a ceiling that sends each assignment once: a ragged all-to-all.

Runs inside `jax.shard_map` over a mesh of `cam_jax.make_mesh`. Devices first tell each other how
many rows they have for each expert, which gives every offset; then rows travel, are sorted by
expert, pass through the grouped matmul, and travel back. The receive buffer has room for the worst
case, in which all tokens of the expert-parallel group choose this device; what is sent follows the
routing.

`lax.ragged_all_to_all` exists on TPU. Elsewhere `_gathered_exchange` does the same from gathered
rows, so that all of the bookkeeping here runs, and is tested, on CPU.

P devices on "expert", T tokens of this device, N choices, M = T·N rows sent at most, R received at
most.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from cam_jax.experts import ExpertWeights, expert_rows
from cam_jax.mesh import EXPERT
from cam_jax.plan import RoutingPlan
from cam_jax.transports.dropless import sort_by_expert, visit_by_expert
from cam_jax.varying import vary_like


def ragged_dropless(
    x: Float[Array, "G T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "G T D"]:
    """``x`` and ``plan``: this device's. Only the choices of the plan travel, not its slots."""
    devices, local = lax.axis_size(EXPERT), experts.gate.shape[0]
    choices = plan.choice_expert.shape[-1]
    # Ids that mean none (E and above) must stay so behind the dead experts.
    expert = jnp.where(
        plan.choice_expert < plan.num_experts, plan.choice_expert, devices * local
    ).reshape(-1, choices)
    return visit_by_expert(
        x.reshape(-1, x.shape[-1]),
        expert,
        plan.choice_weight.reshape(-1, choices),
        partial(_visit, experts=experts, most=devices * expert.shape[0] * min(choices, local)),
        num_experts=devices * local,
    ).reshape(x.shape)


def _visit(
    rows: Float[Array, "M D"], sizes: Int[Array, " E"], *, experts: ExpertWeights, most: int
) -> Float[Array, "M D"]:
    """Rows sorted by expert, through experts that live on any device; most: R."""
    local = experts.gate.shape[0]
    me = lax.axis_index(EXPERT)
    # [P from, P to, E_local]: everything about who sends what to whom.
    counts = lax.all_gather(sizes, EXPERT).reshape(-1, sizes.shape[0] // local, local)
    sent = counts.sum(-1)
    leaves_at = _starts(sent, axis=1)  # where a sender's rows for a receiver begin, [from, to]
    arrives_at = _starts(sent, axis=0)  # where they begin at that receiver, [from, to]

    received = _exchange(rows, sent, leaves_at, arrives_at, most=most)
    # Rows come sorted by sender, then by expert.
    ends = jnp.cumsum(counts[:, me].reshape(-1), dtype=jnp.int32)
    place = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right")
    expert = jnp.where(place < ends.shape[0], place % local, local).astype(jnp.int32)
    order = sort_by_expert(expert, local)
    back = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(most, dtype=order.dtype), unique_indices=True)
    )
    y = expert_rows(received[order], experts, counts[:, me].sum(0, dtype=jnp.int32))[back]
    return _exchange(y, sent.T, arrives_at.T, leaves_at.T, most=rows.shape[0])


def _starts(counts: Int[Array, "P P"], *, axis: int) -> Int[Array, "P P"]:
    """Sums of all entries before each one."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts


def _exchange(
    rows: Float[Array, "M D"],
    sent: Int[Array, "from to"],
    leaves_at: Int[Array, "from to"],
    arrives_at: Int[Array, "from to"],
    *,
    most: int,
) -> Float[Array, "R D"]:
    """Row ranges to their devices: of device p, ``sent[p, q]`` rows from ``leaves_at[p, q]`` on go
    to device q, where they begin at ``arrives_at[p, q]``. Rows that nothing arrives at are 0.
    """
    return lax.platform_dependent(
        rows,
        sent,
        leaves_at,
        arrives_at,
        tpu=partial(_ragged_exchange, most=most),
        default=partial(_gathered_exchange, most=most),
    )


def _ragged_exchange(
    rows: Array, sent: Array, leaves_at: Array, arrives_at: Array, *, most: int
) -> Array:
    me = lax.axis_index(EXPERT)
    out = vary_like(jnp.zeros((most, rows.shape[1]), rows.dtype), rows, sent)
    return lax.ragged_all_to_all(
        rows,
        out,
        leaves_at[me],
        sent[me],
        arrives_at[me],
        sent[:, me],
        axis_name=EXPERT,
    )


def _gathered_exchange(
    rows: Array, sent: Array, leaves_at: Array, arrives_at: Array, *, most: int
) -> Array:
    me = lax.axis_index(EXPERT)
    everyone = lax.all_gather(rows, EXPERT)
    begin, count = arrives_at[:, me], sent[:, me]
    # Senders write one behind the other, so a row's sender is the last that begins before it.
    row = jnp.arange(most, dtype=jnp.int32)
    inside = (row >= begin[:, None]) & (row < (begin + count)[:, None])
    sender = jnp.argmax(inside, axis=0).astype(jnp.int32)
    source = row - begin[sender] + leaves_at[sender, me]
    found = everyone.at[sender, source].get(mode="fill", fill_value=0)
    return jnp.where(inside.any(0)[:, None], found, 0)
