"""Which boxes of a stacked leaf the devices of this process hold."""

from dataclasses import dataclass

import jax

Box = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What some devices of this process hold of a stacked leaf: one box of it.

    devices: as `jax.device_put` takes them; None is the default device.
    """

    box: Box
    devices: tuple[jax.Device | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(side.stop - side.start for side in self.box)


def shares_of(leaf: jax.ShapeDtypeStruct) -> list[Share]:
    """The different boxes that this process's devices hold, in the order of the devices.

    A leaf without a sharding is one share on the default device.
    """
    if leaf.sharding is None:
        return [Share(box=tuple(slice(0, size) for size in leaf.shape), devices=(None,))]
    held: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        bounds = tuple(side.indices(size)[:2] for side, size in zip(index, leaf.shape, strict=True))
        held.setdefault(bounds, []).append(device)
    return [
        Share(box=tuple(slice(*side) for side in bounds), devices=tuple(devices))
        for bounds, devices in held.items()
    ]
