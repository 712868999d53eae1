"""What attention remembers between calls: keys and values of every layer, and where tokens stand.

Columns are absolute: call after call writes its S columns behind the last ones, padding included,
and `positions` tells which columns hold tokens. A row's position in RoPE is its own count of
tokens, so rows padded on either side continue from where their own text ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Position of a column that holds no token: later than every query, so causality alone hides it.
NO_TOKEN = jnp.iinfo(jnp.int32).max

# An array; tree transformations (eval_shape, shardings) put other things in its place.
Leaf = Any


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Donate it to the jitted step; the result takes over its buffers.

    Attributes:
        entries: per name ("key", "value", ...; the attention module chooses them) an array
            [L, B, heads, S_max, features]: heads before columns, so that a decode step's product
            reads each head's keys in place (measured 1.5 to 4 times faster on CPU than columns
            first).
        positions: [B, S_max] int32, each column's position in its row, NO_TOKEN where none stands.
        counts: [B] int32, tokens per row so far.
        length: [] int32, columns in use.
        empty: static; true before the first call, whose queries then need only its own keys.
    """

    entries: Mapping[str, Leaf]
    positions: Leaf
    counts: Leaf
    length: Leaf
    empty: bool = field(default=False)

    @property
    def capacity(self) -> int:
        """S_max, the columns there are room for."""
        return self.positions.shape[1]

    @property
    def mask(self) -> Bool[Array, "B S_max"]:
        """Which columns hold tokens."""
        return self.positions != NO_TOKEN


jax.tree_util.register_dataclass(
    Cache,
    data_fields=["entries", "positions", "counts", "length"],
    meta_fields=["empty"],
)


def token_positions(
    valid: Bool[Array, "B S"], counts: Int[Array, " B"] | None = None
) -> Int[Array, "B S"]:
    """Position of each token in its row (int32), counting only tokens, from counts on (0 if None).

    Padding gets the position of the last token before it, or 0.
    """
    running = jnp.cumsum(valid.astype(jnp.int32), axis=1, dtype=jnp.int32) - 1
    if counts is not None:
        running = running + counts[:, None]
    return jnp.maximum(running, 0)


def key_positions(valid: Bool[Array, "B S"], positions: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Positions as keys show them: NO_TOKEN at padding."""
    return jnp.where(valid, positions, NO_TOKEN)
