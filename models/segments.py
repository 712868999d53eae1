"""Runs of equal layers: how they are created as one stack and scanned, policies included."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import PolicyError
from cam_jax.load_stats import LoadStats
from cam_jax.models.attention import Entries
from cam_jax.models.block import Block, CallContext
from cam_jax.models.config import DecoderConfig, Segment

Policies = CapacityPolicy | None | tuple[CapacityPolicy | None, ...]

# Hidden states and cache entries, from layer to layer.
Carry = tuple[jax.Array, Entries | None]
Layer = Callable[[Carry, jax.Array, Any, CapacityPolicy | None], tuple[Carry, LoadStats | None]]


def stacked_blocks(
    config: DecoderConfig, segment: Segment, rngs: nnx.Rngs, dtype: DTypeLike
) -> Block:
    """The segment's blocks as one Block whose parameters have a leading layer axis."""

    @nnx.split_rngs(splits=segment.length)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, segment.kind, rngs=rngs, dtype=dtype)

    return create(rngs)


def run_segment(
    segment: Segment,
    blocks: Block,
    x: jax.Array,
    entries: Entries | None,
    context: CallContext,
    policies: tuple[CapacityPolicy | None, ...],
    *,
    unroll: bool,
) -> tuple[jax.Array, Entries | None, list[LoadStats]]:
    """Scans the segment's layers, once per run of equal policies.

    Args:
        segment: which layers.
        blocks: their parameters, stacked.
        x: [B, S, D] hidden states.
        entries: the whole cache's, None without one.
        context: what the layers share.
        policies: one per MoE layer of the model.
        unroll: whether the compiled program holds no loop.

    Returns:
        Hidden states, entries, and per run the statistics with a leading axis of its layers.
    """
    graphdef, state = nnx.split(blocks)
    stack = nnx.to_pure_dict(state)

    def layer(
        carry: Carry, index: jax.Array, parameters: Any, policy: CapacityPolicy | None
    ) -> tuple[Carry, LoadStats | None]:
        block = nnx.merge(graphdef, parameters)
        hidden, kept, load = block(
            carry[0],
            context,
            entries=carry[1],
            policy=policy,
            layer=segment.start + index,
            moe_layer_index=segment.moe_start + index,
        )
        return (hidden, kept), load

    def pick(index: jax.Array) -> Any:
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
        )

    own = policies[segment.moe_start : segment.moe_start + segment.length]
    runs = _runs(own) if segment.kind.moe else [(0, segment.length, None)]
    carry: Carry = (x, entries)
    loads = []
    for start, stop, policy in runs:
        indices = jnp.arange(start, stop, dtype=jnp.int32)
        if stop - start == segment.length:
            # Scanned over, the stack's gradient is a stack too; indexed, it is a sum of stacks.
            carry, load = jax.lax.scan(
                partial(_scanned, layer, policy), carry, (indices, stack), unroll=unroll
            )
        else:
            # Slicing the stack would copy it; indexing it inside the loop does not.
            carry, load = jax.lax.scan(
                partial(_indexed, layer, pick, policy), carry, indices, unroll=unroll
            )
        if load is not None:
            loads.append(load)
    return *carry, loads


def _scanned(
    layer: Layer, policy: CapacityPolicy | None, carry: Carry, over: tuple[jax.Array, Any]
) -> tuple[Carry, LoadStats | None]:
    """A scan's body over (indices, the layers' parameters)."""
    return layer(carry, over[0], over[1], policy)


def _indexed(
    layer: Layer,
    pick: Callable[[jax.Array], Any],
    policy: CapacityPolicy | None,
    carry: Carry,
    index: jax.Array,
) -> tuple[Carry, LoadStats | None]:
    """A scan's body over indices."""
    return layer(carry, index, pick(index), policy)


def _runs(
    policies: tuple[CapacityPolicy | None, ...],
) -> list[tuple[int, int, CapacityPolicy | None]]:
    """Runs of equal policies as (start, stop, policy)."""
    found = []
    start = 0
    for policy, run in groupby(policies):
        stop = start + len(tuple(run))
        found.append((start, stop, policy))
        start = stop
    return found


def policy_per_layer(config: DecoderConfig, policy: Policies) -> tuple[CapacityPolicy | None, ...]:
    """One policy per MoE layer."""
    if not isinstance(policy, tuple):
        return (policy,) * config.num_moe_layers
    if len(policy) != config.num_moe_layers:
        raise PolicyError(
            f"policy is a tuple of {len(policy)}, but the model has {config.num_moe_layers} MoE "
            "layers; give one policy (or None) per MoE layer, or a single one for all"
        )
    return policy
