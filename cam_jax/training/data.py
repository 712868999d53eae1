"""Which tokens a step sees: a pure function of (seed, step), so a resumed run sees the same."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Int

from cam_jax.errors import InputError


def batch_at(
    stream: Int[np.ndarray, " N"], step: int, *, batch: int, length: int, seed: int
) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    """(inputs, targets) of a step: targets are the inputs one token on.

    An epoch goes through disjoint windows of the stream in a random order. Each epoch's windows
    begin at another offset, so that the text is not cut at the same places twice.

    Raises:
        InputError: the stream is shorter than two windows.
    """
    count = (len(stream) - 1) // length - 1
    if count < 1:
        raise InputError(
            f"the training text has {len(stream)} tokens: at least {2 * length + 1} are needed"
        )
    starts = []
    for row in range(step * batch, (step + 1) * batch):
        offset, order = _epoch(seed, row // count, count, length)
        starts.append(offset + int(order[row % count]) * length)
    rows = np.stack([stream[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, count: int, length: int) -> tuple[int, Int[np.ndarray, " W"]]:
    draws = np.random.Generator(np.random.PCG64([seed, epoch]))
    return int(draws.integers(length)), draws.permutation(count)
