"""One helper for loops that must run under `jax.shard_map(check_vma=True)` as well as outside."""

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
