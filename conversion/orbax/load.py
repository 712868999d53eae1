"""An opened Orbax checkpoint -> the stacked tree on one device or a mesh, share by share.

The layers of a stack are read into their rows of one host array, the share of one device, which
JAX on CPU takes over as it is. Beside what is placed already there is that one share.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cam_jax.conversion.arrays import aligned_empty, load_dtype
from cam_jax.conversion.orbax.open import OpenOrbax
from cam_jax.conversion.read import Progress, Region
from cam_jax.conversion.shares import Share, shares_of
from cam_jax.models.params import Params, layer_paths, map_params, stacked_specs
from cam_jax.models.sharding import abstract_params


def load_orbax_params(
    opened: OpenOrbax,
    *,
    mesh: Mesh | None = None,
    dtype: str | np.dtype | type | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Params:
    """Load an opened checkpoint as the stacked tree that `models.decoder.forward` takes.

    On whatever mesh it was saved. Options and types are those of `load_params`.

    Args:
        mesh: None puts everything on the default device; on a mesh each device gets, and each
            process reads, its own part, dead experts (zeros) behind the model's own.
        progress: bytes are those of this process.

    Raises:
        MeshError: the model cannot be divided over the mesh.
        CheckpointError: damaged data, or values that are not finite.
    """
    wanted = load_dtype(dtype)
    config = opened.config
    abstract = stacked_specs(config) if mesh is None else abstract_params(config, mesh)
    sizes: list[int] = []
    map_params(
        lambda path, leaf: sizes.extend(
            _stored_size(opened, path, share) for share in shares_of(leaf)
        ),
        abstract,
    )
    done, total = 0, sum(sizes)
    if progress is not None:
        progress(0, total)

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal done
        rows = layer_paths(config, path) or [path]
        held = functools.reduce(jnp.promote_types, (opened.load_type(r, wanted) for r in rows))
        held = np.dtype(jax.dtypes.canonicalize_dtype(held))
        parts = []
        for share in shares_of(leaf):
            host = aligned_empty(share.shape, held)
            for region in _regions(opened, path, share, host):
                opened.read_region(region, allow_nonfinite=allow_nonfinite)
            # On CPU the devices take the buffer over, several of them the same one.
            placed = [jax.device_put(host, device, may_alias=True) for device in share.devices]
            parts.extend(jax.block_until_ready(placed))
            done += _stored_size(opened, path, share)
            if progress is not None:
                progress(done, total)
        if leaf.sharding is None:
            return parts[0]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return map_params(place, abstract)


def _regions(opened: OpenOrbax, path: str, share: Share, host: np.ndarray) -> list[Region]:
    """What the checkpoint has of a share; the rest of ``host`` (dead experts) becomes zero."""
    rows = layer_paths(opened.config, path)
    box, targets = share.box, [(path, host)]
    if rows is not None:
        layers = range(share.box[0].start, share.box[0].stop)
        targets = [(rows[layer], host[place]) for place, layer in enumerate(layers)]
        box = share.box[1:]
    found = []
    for name, target in targets:
        own = tuple(
            slice(side.start, max(side.start, min(side.stop, size)))
            for side, size in zip(box, opened.leaves[name].shape, strict=True)
        )
        inner = target[tuple(slice(0, side.stop - side.start) for side in own)]
        if inner.shape != target.shape:
            target[...] = 0
        if inner.size:
            found.append(Region(leaf=name, box=own, out=inner))
    return found


def _stored_size(opened: OpenOrbax, path: str, share: Share) -> int:
    rows = layer_paths(opened.config, path) or [path]
    return math.prod(share.shape) * opened.leaves[rows[0]].dtype.itemsize
