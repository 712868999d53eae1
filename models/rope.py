"""Rotary position embedding: frequencies of each kind, the tables of a batch, the rotation.

Sources: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071) with
the conventions of transformers' `modeling_rope_utils`, in whose float32 frequencies are computed.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RopeKind = Literal["default", "linear", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        dim: rotated features per head, even.
        theta: the base of the frequencies.
        kind: "default", "linear" (all frequencies divided by factor) or "yarn" (high frequencies
            kept, low ones divided, a ramp between).
        factor: how far the context was stretched ("linear", "yarn").
        original_positions: positions before stretching ("yarn").
        beta_fast, beta_slow: rotations over the original context where the ramp begins and ends.
        truncate: whether the ramp's ends are rounded outwards to whole dimensions.
        attention_factor: what cosine and sine are multiplied by.
        interleaved: whether features (0, 1), (2, 3), ... form the pairs instead of (0, dim/2), ...
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Growth of attention's magnitude for a context stretched by factor (YaRN, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of each rotated pair, [dim / 2] float32, on the host."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    periods = np.float32(rope.theta) ** exponents
    plain = np.float32(1.0) / periods
    if rope.kind == "default":
        return plain
    stretched = np.float32(1.0) / (np.float32(rope.factor) * periods)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    ramp = _yarn_ramp(rope)
    return stretched * ramp + plain * (np.float32(1.0) - ramp)


def _yarn_ramp(rope: RopeConfig) -> np.ndarray:
    """How much of each frequency is stretched: 0 for the fast ones, 1 for the slow, [dim / 2]."""

    def dimension(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # as transformers does: a step instead of a division by zero
    index = np.arange(rope.dim // 2, dtype=np.float32)
    return np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)


def rope_tables(
    rope: RopeConfig, positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S R"], Float[Array, "B S R"]]:
    """Cosine and sine of every position's angles, float32, R = rope.dim / 2."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(rope))
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B N S dim"],
    cos: Float[Array, "B S R"],
    sin: Float[Array, "B S R"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B N S dim"]:
    """Rotates the feature pairs of N heads, in float32, and returns x's dtype.

    Interleaved pairs come out in the half layout (all first members, then all second): queries and
    keys are permuted alike, so their products do not change.
    """
    half = x.shape[-1] // 2
    wide = x.astype(jnp.float32)
    if interleaved:
        pairs = wide.reshape(*wide.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = wide[..., :half], wide[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    turned = jax.lax.concatenate(
        (first * cos - second * sin, second * cos + first * sin), dimension=x.ndim - 1
    )
    return turned.astype(x.dtype)
