"""Weights as int8 numbers with one scale per output feature: a quarter of float32's bytes.

Only weights are quantised, symmetrically: `w ≈ values · scale` with `scale = max|w| / 127` over a
row. A scale belongs to a whole row of a matrix [out, in], so it may be applied to the product:
`(x @ values.T) · scale` is `x @ w.T` of the dequantised `w`, and no float copy of it is needed.
Activations stay as they are, and bfloat16 holds every int8 number exactly.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

LARGEST = 127
"""Of the int8 numbers that are used; -128 is left out, so that the range is symmetric."""

INVERSE = np.float32(1 / LARGEST)
"""XLA turns divisions by what many share into products; written as such, all results agree."""

SMALLEST_SCALE = np.finfo(np.float32).tiny
"""A row whose scale is below is stored as zeros: devices flush such numbers to zero anyway."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """Matrices [..., out, in] as values · scale; a constant to every gradient.

    Attributes:
        values: [..., out, in] int8 in [-127, 127].
        scale: [..., out] float32; 0 for a row of zeros.
    """

    values: Any  # an array, or what a tree transformation (specs, shardings) puts in its place
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return int(self.values.nbytes + self.scale.nbytes)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """A part along leading axes, as of an array."""
        return QuantizedWeight(values=self.values[index], scale=self.scale[index])


def quantize(weight: Float[Array, "*stack out in"]) -> QuantizedWeight:
    """The nearest int8 numbers. ``weight`` must be finite: one NaN or infinity spoils its row."""
    weight = weight.astype(jnp.float32)
    scale = jnp.abs(weight).max(-1) * INVERSE
    scale = jnp.where(scale < SMALLEST_SCALE, 0, scale)
    inverse = jnp.where(scale == 0, 0, 1 / scale)
    values = jnp.rint(weight * inverse[..., None])
    return QuantizedWeight(values=values.astype(jnp.int8), scale=scale)


def dequantize(
    weight: QuantizedWeight, dtype: DTypeLike = jnp.float32
) -> Float[Array, "*stack out in"]:
    """`values · scale`, for looking at and for saving; computing needs no such copy."""
    return (weight.values * weight.scale[..., None]).astype(dtype)
