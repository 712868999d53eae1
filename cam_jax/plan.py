"""The routing plan: which token fills which slot, seen from the slots and from the tokens."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from cam_jax.errors import PolicyError
from cam_jax.load_stats import LoadStats
from cam_jax.router import one_hot_any

Leaf = Any  # an array, or what a tree transformation puts in its place


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Who goes where in one group; how the bytes move is a transport's business.

    A *bin* is an expert (``bins = E``, ``W = C``), or for scope="device" a destination device
    (``bins = ep_size``, ``W = ceil(E/ep_size)·C``). Under vmap leaves carry a leading axis
    (groups); the methods are of one group, so vmap them too.

    Attributes:
        token: [bins, W] int32, the token in each slot; T where the slot is empty.
        expert: [bins, W] int32, the slot's expert; E where the slot is empty.
        weight: [bins, W] float32, what the expert's output is multiplied by; 0 where empty.
        choice_slot: [T, N] int32, the token's slots as bin·W + position; bins·W where none.
        choice_expert: [T, N] int32, the token's kept experts; E where none.
        choice_weight: [T, N] float32, their weights; exactly 0 where none.
        load: statistics.
        num_tokens: T, static.
        num_experts: E, static.

    N bounds the experts that one token may have: K, and more with expansion.
    """

    token: Leaf
    expert: Leaf
    weight: Leaf
    choice_slot: Leaf
    choice_expert: Leaf
    choice_weight: Leaf
    load: LoadStats
    num_tokens: int = field(metadata={"static": True})
    num_experts: int = field(metadata={"static": True})

    def kept(self) -> Bool[Array, "T E"]:
        """[t, e]: expert e processes token t."""
        return one_hot_any(self.choice_expert, self.num_experts)

    def dispatch_tensor(self) -> Float[Array, "T E C"]:
        """The textbook one-hot form: 1 where token t fills slot c of expert e. O(T·E·C) memory.

        Raises:
            PolicyError: the plan's bins are devices.
        """
        if self.token.shape[0] != self.num_experts:
            raise PolicyError("scope='device': its bins are devices and have no [T, E, C] form")
        tokens = jnp.arange(self.num_tokens, dtype=self.token.dtype)
        return (self.token[None] == tokens[:, None, None]).astype(jnp.float32)

    def combine_tensor(self) -> Float[Array, "T E C"]:
        """`dispatch_tensor` with each slot's weight instead of 1."""
        return self.dispatch_tensor() * self.weight[None]
