"""Load statistics: what experts were asked for, what they got, what was dropped, by cause."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

# A leaf is an array; tree transformations put other things (axes, specs) in its place.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoadStats:
    """Counts of one routing, int32. Leaves may carry leading axes (groups, layers).

    Attributes:
        demand: [E] original top-k assignments of valid, finite tokens.
        load: [E] assignments that were kept, expanded and rerouted ones included.
        tokens: valid tokens (non-finite ones count).
        capacity: the logical ceiling C per expert; without a ceiling, the valid tokens (of a
            layer: all that were routed). The largest of the groups after `sum`.
        slots: slots that may be filled: E·min(C, tokens); without a ceiling, the kept ones.
        dropped_capacity: original assignments lost to the ceiling (rerouted ones are counted here
            and in ``rerouted``).
        dropped_max_experts: ... lost to max_experts_per_token.
        dropped_expert_drop: ... to experts that Expert Drop skipped.
        dropped_nonfinite: ... of tokens whose router logits were NaN or infinite.
        nonfinite_tokens: such tokens.
        unserved_tokens: valid tokens that no expert kept.
        expanded: kept assignments outside the token's top-k that expansion proposed.
        rerouted: kept assignments that rerouting placed.
        top_k: K, static.
    """

    demand: Leaf
    load: Leaf
    tokens: Leaf
    capacity: Leaf
    slots: Leaf
    dropped_capacity: Leaf
    dropped_max_experts: Leaf
    dropped_expert_drop: Leaf
    dropped_nonfinite: Leaf
    nonfinite_tokens: Leaf
    unserved_tokens: Leaf
    expanded: Leaf
    rerouted: Leaf
    top_k: int = field(metadata={"static": True})

    @property
    def dropped(self) -> Num[Array, "..."]:
        """Original assignments that were not kept, whatever the cause."""
        return (
            self.dropped_capacity
            + self.dropped_max_experts
            + self.dropped_expert_drop
            + self.dropped_nonfinite
        )

    @property
    def dropped_share(self) -> Float[Array, "..."]:
        """Dropped original assignments as a share of all original assignments; 0 if none."""
        asked = self.demand.sum(-1) + self.dropped_nonfinite
        return (self.dropped / jnp.maximum(asked, 1)).astype(jnp.float32)

    @property
    def slot_use(self) -> Float[Array, "..."]:
        """Kept assignments per slot; 0 if there is none."""
        return (self.load.sum(-1) / jnp.maximum(self.slots, 1)).astype(jnp.float32)

    def straggler(
        self, *, devices: int | None = None, of: Literal["load", "demand"] = "load"
    ) -> Float[Array, "..."]:
        """Largest load over the mean demand K·tokens/E: how long a layer takes against balance.

        Args:
            devices: take the load of devices (consecutive blocks of ceil(E/devices) experts)
                over K·tokens/devices instead of that of experts.
            of: "demand" tells the same of the router's wishes, before the ceiling.
        """
        counts = self.load if of == "load" else self.demand
        parts = counts.shape[-1]
        if devices is not None:
            counts, parts = device_counts(counts, devices), devices
        mean = self.top_k * self.tokens / parts
        factor = jnp.where(self.tokens > 0, counts.max(-1) / jnp.where(mean > 0, mean, 1.0), 0.0)
        return factor.astype(jnp.float32)

    def sum(self, axis: int = 0) -> "LoadStats":
        """Adds groups up along a leading axis (the capacity is the largest of theirs)."""
        total = jax.tree.map(lambda leaf: leaf.sum(axis, dtype=leaf.dtype), self)
        return dataclasses.replace(total, capacity=self.capacity.max(axis))


def device_counts(counts: Int[Array, "*rest E"], devices: int) -> Int[Array, "*rest devices"]:
    """Sums [.., E] over the consecutive blocks of ceil(E/devices) experts that devices hold."""
    num_experts = counts.shape[-1]
    per_device = -(-num_experts // devices)
    pad = [(0, 0)] * (counts.ndim - 1) + [(0, devices * per_device - num_experts)]
    blocks = jnp.pad(counts, pad).reshape(*counts.shape[:-1], devices, per_device)
    return blocks.sum(-1, dtype=counts.dtype)
