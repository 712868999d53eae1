"""Root-mean-square normalisation and the linear map, the two small parts that everything shares."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch N"], weight: Float[Array, " N"], eps: float
) -> Float[Array, "*batch N"]:
    """Divides by the root of the mean square of the last axis, in float32; returns x's dtype.

    As in transformers, the normalised value is rounded to x's dtype before the weight is applied.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def linear(
    x: Float[Array, "*batch N"],
    weight: Float[Array, "M N"],
    bias: Float[Array, " M"] | None = None,
) -> Float[Array, "*batch M"]:
    """x times the transposed weight ([out, in], as Hugging Face stores it), summed in float32.

    Returns x's dtype. Asking for a float32 sum is also several times faster than a bfloat16 one on
    CPU.
    """
    y = jnp.einsum("...n,mn->...m", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)
