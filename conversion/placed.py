"""A checkpoint onto a mesh: every process reads the bytes that its own devices hold, and no others.

Leaf by leaf and device by device: beside what is placed already there is one device's share of one
stacked leaf on the host.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cam_jax.conversion.arrays import aligned_empty
from cam_jax.conversion.plan import LoadPlan
from cam_jax.conversion.read import Progress, Region, read_regions
from cam_jax.conversion.shares import Box, Share, shares_of
from cam_jax.models.config import DecoderConfig
from cam_jax.models.params import Params, layer_paths, map_params
from cam_jax.models.sharding import abstract_params


def load_placed(
    plan: LoadPlan,
    config: DecoderConfig,
    mesh: Mesh,
    *,
    types: dict[str, np.dtype],
    leave_out: frozenset[str] = frozenset(),
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Params:
    """The stacked tree on a mesh, dead experts (zeros) behind the model's own.

    Args:
        plan: from `make_plan`.
        config: the decoder that the plan is for.
        mesh: of `cam_jax.make_mesh`; may span processes, each of which calls this.
        types: type of each stacked leaf by path ("segments.0.attn.q").
        leave_out: stacked leaves that are not read and become None.
        allow_nonfinite, progress, threads: as in `read_leaves`; bytes are those of this process.

    Raises:
        MeshError: the model cannot be divided over the mesh.
        CheckpointError: as `read_leaves`.
    """
    abstract = abstract_params(config, mesh)
    total = 0

    def count(path: str, leaf: jax.ShapeDtypeStruct) -> None:
        nonlocal total
        itemsize = _stored_itemsize(plan, config, path)
        total += sum(int(np.prod(share.shape)) * itemsize for share in shares_of(leaf))

    abstract = map_params(lambda path, leaf: None if path in leave_out else leaf, abstract)
    map_params(count, abstract)
    done = 0

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal done
        parts: list[jax.Array] = []
        for share in shares_of(leaf):
            size = int(np.prod(share.shape)) * _stored_itemsize(plan, config, path)
            begun = done
            host = _read(
                plan,
                config,
                path,
                share,
                types[path],
                allow_nonfinite=allow_nonfinite,
                threads=threads,
                # Of a box with dead experts a little less is read than counted.
                progress=None
                if progress is None
                else lambda read, _, begun=begun: progress(begun + read, total),
            )
            done += size
            # On CPU the devices take the buffer over, several of them the same one.
            parts.extend(jax.device_put(host, device, may_alias=True) for device in share.devices)
            jax.block_until_ready(parts[-len(share.devices) :])
        if progress is not None:
            progress(done, total)
        assert isinstance(leaf.sharding, NamedSharding)
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return map_params(place, abstract)


def _read(
    plan: LoadPlan,
    config: DecoderConfig,
    path: str,
    share: Share,
    dtype: np.dtype,
    **options: Any,
) -> np.ndarray:
    """One box of a stacked leaf on the host."""
    host = aligned_empty(share.shape, dtype)
    rows = layer_paths(config, path)
    if rows is None:
        regions = list(_regions(plan, path, share.box, host))
    else:
        layers = range(share.box[0].start, share.box[0].stop)
        regions = [
            region
            for place, row in enumerate(layers)
            for region in _regions(plan, rows[row], share.box[1:], host[place])
        ]
    read_regions(plan, regions, **options)
    return host


def _regions(plan: LoadPlan, leaf: str, box: Box, host: np.ndarray) -> Iterator[Region]:
    """What the checkpoint has of a box; the rest of ``host`` (dead experts) becomes zero."""
    shape = plan.shapes[leaf]
    own = tuple(
        slice(side.start, max(side.start, min(side.stop, size)))
        for side, size in zip(box, shape, strict=True)
    )
    inner = tuple(slice(0, side.stop - side.start) for side in own)
    target = host[inner]
    if target.shape != host.shape:
        host[...] = 0
    if target.size:
        yield Region(leaf=leaf, box=own, out=target)


def _stored_itemsize(plan: LoadPlan, config: DecoderConfig, path: str) -> int:
    rows = layer_paths(config, path)
    return plan.dtypes[path if rows is None else rows[0]].itemsize
