"""One helper for code that must run under `jax.shard_map` with `check_vma=True` as well as outside of it."""

import jax
from jax import lax
from jaxtyping import Array


def vary_like(x: Array, *others: Array) -> Array:
    """`x`, marked as varying over every mesh axis that one of `others` varies over.

    Loop carries and branches must not change which axes they vary over, but a constant that starts a carry varies
    over none. Outside of `shard_map` this returns `x` itself.
    """
    have = jax.typeof(x).manual_axis_type.varying
    want = frozenset().union(*(jax.typeof(other).manual_axis_type.varying for other in others))
    missing = tuple(sorted(want - have))
    return lax.pcast(x, missing, to="varying") if missing else x
