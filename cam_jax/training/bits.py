"""Bits per byte: how a model and a baseline are compared, over the same tokens and bytes."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int


def windows(
    stream: Int[np.ndarray, " N"], length: int, *, fill: int
) -> tuple[Int[np.ndarray, "W S"], Int[np.ndarray, "W S"]]:
    """(inputs, targets), so that every token of ``stream`` but the first is a target exactly once.

    The last window is filled up: its inputs with ``fill``, its targets with -1.
    """
    count = max(1, math.ceil((len(stream) - 1) / length))
    inputs = np.full(count * length, fill, np.int32)
    targets = np.full(count * length, -1, np.int32)
    inputs[: len(stream) - 1] = stream[:-1]
    targets[: len(stream) - 1] = stream[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)


def bits_per_byte(
    log_probabilities: Float[np.ndarray, " N"],
    targets: Int[np.ndarray, " N"],
    sizes: Int[np.ndarray, " V"],
) -> float:
    """-sum log2 p / bytes, from natural log-probabilities (EOS costs bits and has no bytes)."""
    return float(-log_probabilities.sum(dtype=np.float64) / math.log(2) / sizes[targets].sum())
