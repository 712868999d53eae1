"""Where the rows of a batch stand, so that every device gets its share of the real ones.

A batch is divided into consecutive blocks of rows, one per (virtual) device. Rows that only fill a
batch up to a shape must not change that division: the ceiling would be another.
"""

import numpy as np
from jaxtyping import Bool, Int


def spread_rows(real: Bool[np.ndarray, " B"], devices: int) -> Int[np.ndarray, " rows"]:
    """The order that gives each device the real rows it would have without the empty ones.

    Args:
        real: which rows hold a real token.
        devices: blocks that the rows are divided into.

    Returns:
        Row numbers, blocks of ceil(B / devices); -1 is one more empty row. Real rows keep their
        order. Without empty rows this is every row once, in order.
    """
    if real.all():
        return np.arange(len(real))
    share = -(-int(real.sum()) // devices)
    width = -(-len(real) // devices)
    order = np.full((devices, width), -1)
    filled = np.flatnonzero(real)
    for device in range(devices):
        own = filled[device * share : (device + 1) * share]
        order[device, : len(own)] = own
    return order.reshape(-1)
