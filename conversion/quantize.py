"""A checkpoint whose experts become int8 while they are read: no float copy of a stack ever exists.

A job reads a few experts' matrices as float32, quantises them and writes them into their place of
the int8 stack: beside the result there is one job's `SCRATCH_BYTES` per thread. On a mesh a process
reads the rows of its own devices; whole rows, because a scale is that of a whole row, even where
"tensor" divides them. So every device holds what one device alone would, bit for bit.

L layers of a segment, E experts, [out, in] one expert's matrix.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float32

from cam_jax.conversion.arrays import aligned_empty
from cam_jax.conversion.load import OpenCheckpoint, load_params
from cam_jax.conversion.plan import LoadPlan
from cam_jax.conversion.quantization_report import LeafError, QuantizationReport
from cam_jax.conversion.read import Progress, Region, read_regions
from cam_jax.conversion.shares import Box, Share, shares_of
from cam_jax.models.config import DecoderConfig
from cam_jax.models.params import Params, layer_paths, put_leaf, stacked_specs
from cam_jax.models.sharding import abstract_params
from cam_jax.quantized import INVERSE, SMALLEST_SCALE

SCRATCH_BYTES = 8 << 20
"""Of float32 matrices per job, or one expert's if that is more."""

BLOCK_BYTES = 512 << 10
"""Quantised at a time: with its rounded copy it stays in a core's second cache."""

MAX_THREADS = 8
"""Quantising is arithmetic, unlike reading, and gains from more cores; each has its scratch."""


@dataclass(frozen=True, kw_only=True)
class QuantizedParams:
    """What `load_quantized` gives.

    config: the decoder with int8 experts. params: its weights. report: how far they are from the
    checkpoint's.
    """

    config: DecoderConfig
    params: Params
    report: QuantizationReport


def load_quantized(
    opened: OpenCheckpoint,
    *,
    mesh: Mesh | None = None,
    dtype: str | np.dtype | type | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> QuantizedParams:
    """Load an opened checkpoint with its routed experts as int8, all else as `load_params` does.

    Experts are quantised from the numbers in the file, whatever ``dtype`` makes of the other
    weights.

    Args:
        mesh, progress: as in `load_params`.
        dtype: of what is not quantised.
        threads: by default one per core up to MAX_THREADS.

    Raises:
        ConfigError: the decoder has no experts.
        CheckpointError: as `load_params`; experts that are not finite are never loaded.
        MeshError: the model cannot be divided over the mesh.
    """
    config = opened.config.with_int8_experts()
    tree = stacked_specs(config) if mesh is None else abstract_params(config, mesh)
    stacks = [
        _Stack.of(opened.plan, config, tree, number, name)
        for number, segment in enumerate(config.segments)
        if segment.kind.moe
        for name in ("gate", "up", "down")
    ]
    meter = _Meter(progress, own=sum(stack.read_bytes for stack in stacks))
    params = load_params(
        opened,
        mesh=mesh,
        dtype=dtype,
        progress=None if progress is None else meter.others,
        threads=threads,
        leave_out=frozenset(stack.path for stack in stacks),
    )
    errors: list[LeafError] = []
    workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="cam_jax-quantize") as pool:
        try:
            for stack in stacks:
                values, scale, found = stack.load(pool, meter)
                segment = params["segments"][stack.segment]
                put_leaf(segment, f"moe.experts.{stack.name}", values)
                put_leaf(segment, f"moe.experts.{stack.name}_scale", scale)
                errors.extend(found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    report = QuantizationReport(leaves=tuple(sorted(errors, key=lambda leaf: leaf.layer)))
    return QuantizedParams(config=config, params=params, report=report)


class _Meter:
    """One progress from two phases: what `load_params` reads, then the experts."""

    def __init__(self, progress: Progress | None, own: int) -> None:
        self._progress, self._own = progress, own
        self._others = self._done = 0

    def others(self, done: int, total: int) -> None:
        self._others = total
        assert self._progress is not None
        self._progress(done, total + self._own)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._others + self._done, self._others + self._own)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Experts of one layer that are read and quantised together.

    leaf: path of the layer's. box: over the leaf, [experts, out, whole in]. values: where the rows
    go, and which part of them: pairs (slice of "in", [experts, out, part]). scale: [experts, out].
    """

    leaf: str
    box: Box
    values: tuple[tuple[slice, np.ndarray], ...]
    scale: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """One stacked leaf [L, E, out, in] of a segment and its scales, as they will lie on devices.

    path: "segments.0.moe.experts.gate". name: "gate". rows: the path of each layer.
    """

    plan: LoadPlan
    path: str
    name: str
    segment: int
    rows: tuple[str, ...]
    values: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct

    @classmethod
    def of(
        cls, plan: LoadPlan, config: DecoderConfig, tree: Params, segment: int, name: str
    ) -> "_Stack":
        path = f"segments.{segment}.moe.experts.{name}"
        rows = layer_paths(config, path)
        assert rows is not None
        experts = tree["segments"][segment]["moe"]["experts"]
        return cls(
            plan=plan,
            path=path,
            name=name,
            segment=segment,
            rows=tuple(rows),
            values=experts[name],
            scale=experts[f"{name}_scale"],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, out, in] of a layer in the checkpoint, without dead experts."""
        return self.plan.shapes[self.rows[0]]

    @property
    def read_bytes(self) -> int:
        """What this process will read of the files."""
        itemsize = self.plan.dtypes[self.rows[0]].itemsize
        return itemsize * sum(
            (rows[0].stop - rows[0].start) * _size(self._own(rows)) for rows, _ in self._groups()
        )

    def load(
        self, pool: ThreadPoolExecutor, meter: _Meter
    ) -> tuple[jax.Array, jax.Array, list[LeafError]]:
        """Values and scales on their devices, and the error of each layer."""
        values: list[jax.Array] = []
        scales: list[jax.Array] = []
        errors = dict.fromkeys(self.rows, np.zeros(3))
        itemsize = self.plan.dtypes[self.rows[0]].itemsize
        for rows, shares in self._groups():
            hosts = [aligned_empty(share.shape, np.dtype(np.int8)) for share in shares]
            scale = aligned_empty(hosts[0].shape[:-1], np.dtype(np.float32))
            if rows[1].stop > self.shape[0]:
                for host in (*hosts, scale):
                    host[...] = 0  # dead experts
            jobs = list(self._jobs(rows, shares, hosts, scale))
            futures = [pool.submit(_run, self.plan, job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                errors[job.leaf] = _add(errors[job.leaf], future.result())
                meter.add(itemsize * _size(job.box))
            # On CPU the devices take the buffers over, several of them the same one.
            for share, host in zip(shares, hosts, strict=True):
                for device in share.devices:
                    values.append(jax.device_put(host, device, may_alias=True))
                    scales.append(jax.device_put(scale, device, may_alias=True))
            jax.block_until_ready((values, scales))
        found = [_leaf_error(leaf, self.name, sums) for leaf, sums in errors.items()]
        return _assembled(self.values, values), _assembled(self.scale, scales), found

    def _groups(self) -> list[tuple[Box, list[Share]]]:
        """This process's shares by the box of rows [L, E, out] that they are parts of."""
        groups: dict[tuple[tuple[int, int], ...], list[Share]] = {}
        for share in shares_of(self.values):
            rows = tuple((side.start, side.stop) for side in share.box[:-1])
            groups.setdefault(rows, []).append(share)
        return [(shares[0].box[:-1], shares) for shares in groups.values()]

    def _own(self, rows: Box) -> Box:
        """Of a box of rows, the box of each layer's leaf that the checkpoint has."""
        count, _, width = self.shape
        experts = slice(min(rows[1].start, count), min(rows[1].stop, count))
        return (experts, rows[2], slice(0, width))

    def _jobs(
        self, rows: Box, shares: list[Share], hosts: list[np.ndarray], scale: np.ndarray
    ) -> Iterator[_Job]:
        experts, out, whole = self._own(rows)
        one = 4 * _size((out, whole))
        step = max(1, SCRATCH_BYTES // one)
        parts = [share.box[-1] for share in shares]
        for place, row in enumerate(range(rows[0].start, rows[0].stop)):
            for start in range(experts.start, experts.stop, step):
                stop = min(start + step, experts.stop)
                at = (place, slice(start - experts.start, stop - experts.start))
                yield _Job(
                    leaf=self.rows[row],
                    box=(slice(start, stop), out, whole),
                    values=tuple((p, host[at]) for p, host in zip(parts, hosts, strict=True)),
                    scale=scale[at],
                )


def _run(plan: LoadPlan, job: _Job) -> np.ndarray:
    """Reads and quantises; returns what `quantize_rows` does."""
    matrices = np.empty([side.stop - side.start for side in job.box], np.float32)
    read_regions(plan, [Region(leaf=job.leaf, box=job.box, out=matrices)], threads=1)
    step = max(1, BLOCK_BYTES // (4 * matrices.shape[-1]))
    sums = np.zeros(3)
    for expert, matrix in enumerate(matrices):
        for start in range(0, len(matrix), step):
            rows = (slice(start, start + step),)
            found = quantize_rows(
                matrix[rows],
                [(part, out[expert][rows]) for part, out in job.values],
                job.scale[expert][rows],
            )
            sums = _add(sums, found)
    return sums


def quantize_rows(
    weight: Float32[np.ndarray, "rows in"],
    values: list[tuple[slice, np.ndarray]],
    scale: Float32[np.ndarray, " rows"],
) -> np.ndarray:
    """`cam_jax.quantized.quantize` on the host, the same bits, in place.

    Args:
        weight: finite; overwritten.
        values: parts of a row and where their int8 numbers go, [rows, part] each.
        scale: filled.

    Returns:
        Squared norm of the error, squared norm of the weights, largest error; float64.
    """
    np.multiply(np.maximum(weight.max(-1), -weight.min(-1)), INVERSE, out=scale)
    scale[scale < SMALLEST_SCALE] = 0
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    weight *= inverse[:, None]
    rounded = np.rint(weight)
    for part, target in values:
        target[...] = rounded[:, part]
    # In units of a row's scale, so that no square of a float32 leaves its range.
    norms = np.einsum("ri,ri->r", weight, weight)
    weight -= rounded
    errors = np.einsum("ri,ri->r", weight, weight)
    largest = np.maximum(weight.max(-1), -weight.min(-1))
    wide = scale.astype(np.float64)
    return np.array([errors @ wide**2, norms @ wide**2, (largest * wide).max()])


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two sums and a maximum of parts together."""
    return np.array([a[0] + b[0], a[1] + b[1], max(a[2], b[2])])


def _leaf_error(leaf: str, name: str, sums: np.ndarray) -> LeafError:
    return LeafError(
        layer=int(leaf.split(".")[1]),
        name=name,
        error=math.sqrt(sums[0]),
        norm=math.sqrt(sums[1]),
        largest=float(sums[2]),
    )


def _size(box: Box) -> int:
    return math.prod(side.stop - side.start for side in box)


def _assembled(spec: jax.ShapeDtypeStruct, parts: list[jax.Array]) -> Any:
    if spec.sharding is None:
        return parts[0]
    assert isinstance(spec.sharding, NamedSharding)
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, parts)
