"""How a batch is divided into the groups whose tokens compete for the same slots.

B sequences (rows), S positions, G groups, T tokens of one group; R rows per device. Devices are
data x expert, in mesh order, and hold consecutive blocks of R = ceil(B / devices) rows; rows that
are missing at the end are padding. One device that emulates several divides in the same way.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from cam_jax.capacity import Group
from cam_jax.errors import PolicyError


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The division of a batch [B, S, ...] into [G, T, ...]; all sizes are static.

    Attributes:
        rows: B.
        positions: S.
        group: what a group is.
        data, expert: sizes of the (virtual) mesh; an expert's device is its index on ``expert``.
    """

    rows: int
    positions: int
    group: Group
    data: int = 1
    expert: int = 1

    @property
    def rows_per_device(self) -> int:
        """R."""
        return -(-self.rows // (self.data * self.expert))

    @property
    def count(self) -> int:
        """G."""
        return {"device": self.data * self.expert, "sequence": self.rows, "batch": 1}[self.group]

    @property
    def index(self) -> np.ndarray:
        """[G] int32, each group's number: of its device, of its sequence, or 0."""
        return np.arange(self.count, dtype=np.int32)

    @property
    def ep_rank(self) -> np.ndarray:
        """The expert rank of the device that holds the tokens: [G], or [1, T] for group="batch"."""
        if self.group == "device":
            rank = self.index % self.expert
        else:
            rank = np.arange(self.rows) // self.rows_per_device % self.expert
            if self.group == "batch":
                rank = np.repeat(rank, self.positions)[None]
        return rank.astype(np.int32)

    def split(self, x: Shaped[Array, "B S *rest"], *, fill: int = 0) -> Shaped[Array, "G T *rest"]:
        """Divides a batch, with ``fill`` in padding rows."""
        if self.group == "device":
            missing = self.count * self.rows_per_device - self.rows
            if missing:
                pad = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
                x = jnp.pad(x, pad, constant_values=fill)
        return x.reshape(self.count, -1, *x.shape[2:])

    def merge(self, x: Shaped[Array, "G T *rest"]) -> Shaped[Array, "B S *rest"]:
        """The inverse of `split`; padding rows are left out."""
        return x.reshape(-1, self.positions, *x.shape[2:])[: self.rows]


def mesh_sizes(virtual_devices: int | tuple[int, int]) -> tuple[int, int]:
    """(data, expert) of a virtual mesh; an integer is the number of expert-parallel devices.

    Raises:
        PolicyError: not an integer of at least 1, nor a pair of such.
    """
    sizes = virtual_devices if isinstance(virtual_devices, tuple) else (1, virtual_devices)
    if len(sizes) != 2 or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise PolicyError(
            f"virtual_devices={virtual_devices!r}: expected a number of devices, or "
            "(data, expert), each at least 1"
        )
    return sizes
