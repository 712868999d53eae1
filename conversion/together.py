"""Saving from a mesh that spans processes: one writes, the others hand it their parts.

Every process makes the call. Process 0 writes and says which leaf it needs next; all of them then
put that one leaf together, so that each holds one leaf of one layer at most.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from cam_jax.conversion.streaming import LazyLeaf
from cam_jax.errors import CheckpointError

T = TypeVar("T")

_DONE, _FAILED = -1, -2


def save_together(save: Callable[[Mapping[str, Any]], T], leaves: Mapping[str, Any]) -> T | None:
    """``save(leaves)`` in process 0, with leaves that may lie on devices of other processes.

    Args:
        save: writes what it is given; may ask for any leaf in any order.
        leaves: path -> array, the same in every process.

    Returns what ``save`` did; None in the other processes.

    Raises:
        CheckpointError: in the other processes, when ``save`` failed in process 0, which raises
            its own error.
    """
    if jax.process_count() == 1:
        return save(leaves)
    paths = list(leaves)
    forms = [_form(leaves[path]) for path in paths]
    if jax.process_index() != 0:
        while (number := _tell(0)) >= 0:
            _whole(leaves[paths[number]])
        if number == _FAILED:
            raise CheckpointError("process 0 could not write the checkpoint; its error says why.")
        return None

    def fetch(number: int) -> np.ndarray:
        _tell(number)
        return _whole(leaves[paths[number]])

    outcome = _FAILED
    try:
        result = save(
            {
                path: LazyLeaf(shape=shape, dtype=dtype, read=partial(fetch, number))
                for number, (path, (shape, dtype)) in enumerate(zip(paths, forms, strict=True))
            }
        )
        outcome = _DONE
    finally:
        _tell(outcome)
    return result


def _tell(number: int) -> int:
    """Process 0's number, in every process."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _form(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    jax.block_until_ready(leaf)
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def _whole(leaf: Any) -> np.ndarray:
    # Cutting a layer out of its stack may be a collective: none may meet the next one's.
    jax.block_until_ready(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)
