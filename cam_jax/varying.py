"""What must run under `jax.shard_map(check_vma=True)` as well as outside: loops, own gradients."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Shaped


def vary_like(x: Shaped[Array, "..."], *others: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, marked as varying over every mesh axis that one of ``others`` varies over.

    A loop's carry must not change which axes it varies over, but a constant that starts it varies
    over none. Outside of `shard_map` this returns ``x`` itself.
    """
    have = jax.typeof(x).manual_axis_type.varying
    want = frozenset().union(*(jax.typeof(other).manual_axis_type.varying for other in others))
    missing = tuple(sorted(want - have))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """All leaves, marked as varying over every mesh axis that one of them varies over.

    Before a function with a gradient of its own, whose results must vary as its arguments do:
    what is added up over the other axes is then added up outside.
    """
    leaves = jax.tree.leaves(trees)
    return jax.tree.map(lambda leaf: vary_like(leaf, *leaves), trees)
