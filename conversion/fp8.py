"""Checkpoints with FP8 weights and scales, read as plain float tensors.

A weight is `fp8 * scale of its block` (DeepSeek-V3's weight_dequant; the tensor that is called
`weight_scale_inv` is multiplied all the same), computed in float32 and rounded once into the type
asked for.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import DTYPES, WEIGHT_DTYPES, aligned_empty
from cam_jax.conversion.header import TensorSpec
from cam_jax.conversion.source import CheckpointSource, Ranges, bounds_of
from cam_jax.errors import CheckpointError
from cam_jax.models.quantization import Fp8Weights, read_quantization
from cam_jax.models.registry import text_config

FP8 = "F8_E4M3"
READ_AS = "BF16"
"""The type that an FP8 weight is presented in, which DeepSeek's own conversion writes."""

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Appended to a weight's name; both spellings name a factor."""

SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})

PIECE = 1 << 20
"""Elements that are converted at a time: bounds the temporaries to a few MB per thread."""

_VALUES = np.arange(256, dtype=np.uint8).view(DTYPES[FP8]).astype(np.float32)
"""[256] float32: the value of each byte. Looking up is four times faster than a cast."""


@dataclass(frozen=True, kw_only=True)
class _Scaled:
    """scale: tensor of the scales. block: (rows, columns) that share one. single: one for all."""

    scale: str
    block: tuple[int, int]
    single: bool


def open_source(directory: str | Path, config_json: Mapping[str, Any]) -> CheckpointSource:
    """The tensors of a checkpoint directory, FP8 weights presented as plain ones.

    Args:
        directory: the checkpoint.
        config_json: its config.json, whose `quantization_config` tells the block sizes.

    Raises CheckpointError (`CheckpointSource.open`'s, and scales that do not fit their weights)
    and ConfigError (a quantisation that is not read). No tensor data is read.
    """
    stored = CheckpointSource.open(directory)
    quantization = read_quantization(text_config(config_json))
    return stored if quantization is None else Fp8Source(stored, quantization)


class Fp8Source(CheckpointSource):
    """A source whose FP8 weights with scales look like bfloat16 tensors, without their scales.

    What has no scale (norms, routers, modules left out of the quantisation) is passed on as it is;
    so are FP8 tensors without scales and scales without weights, which then fit no parameter and
    are reported with the rest of the checkpoint's faults.

    The spec of such a weight has its shape and place in the file (one byte per element) and says
    "BF16". Raises CheckpointError for scales of another shape or type than the blocks ask for.
    """

    def __init__(self, stored: CheckpointSource, quantization: Fp8Weights) -> None:
        specs = {name: stored.spec(name) for name in stored.names()}
        scaled: dict[str, _Scaled] = {}
        faults = []
        for name, spec in specs.items():
            scales = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in specs]
            if spec.dtype != FP8 or not scales:
                continue
            if len(scales) > 1:
                faults.append(f"{name} has two tensors of scales, {scales[0]} and {scales[1]}")
                continue
            scale = specs[scales[0]]
            fault = _misfit(spec, scale, quantization)
            if fault is not None:
                faults.append(fault)
                continue
            rows, columns = quantization.block or spec.shape[-2:]
            scaled[name] = _Scaled(
                scale=scale.name,
                block=(max(1, rows), max(1, columns)),
                single=scale.shape in ((), (1,)),
            )
        if faults:
            more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise CheckpointError(
                f"{stored.directory} does not fit its quantization_config "
                f"(weight_block_size={quantization.block}): {'; '.join(faults[:8])}{more}."
            )
        used = {entry.scale for entry in scaled.values()}
        shown = {
            name: replace(spec, dtype=READ_AS) if name in scaled else spec
            for name, spec in specs.items()
            if name not in used
        }
        super().__init__(stored.directory, shown)
        self._stored = stored
        self._scaled = scaled

    def read_slice(
        self, name: str, ranges: Ranges = (), *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read part of a tensor, and only that part of it and of its scales.

        Args:
            name: the tensor.
            ranges: one slice per leading axis, step 1; axes left out are whole.
            out: array of the shape of the part. For an FP8 weight of any of the types in
                WEIGHT_DTYPES, otherwise of the tensor's type.

        Returns out; without it the float32 products of an FP8 weight. Products that are too large
        for the type are infinite, and FP8's NaN stays NaN.
        """
        spec = self.spec(name)  # refuses the names of scales
        scaled = self._scaled.get(name)
        if scaled is None:
            return self._stored.read_slice(name, ranges, out=out)
        bounds = bounds_of(spec, ranges)
        shape = tuple(stop - start for start, stop in bounds)
        if out is None:
            out = aligned_empty(shape, DTYPES["F32"])
        if out.shape != shape or out.dtype not in (DTYPES[kind] for kind in WEIGHT_DTYPES):
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}, the part of {name!r} is float{list(shape)}"
            )
        *leading, rows, columns = bounds
        width = max(1, min(columns[1] - columns[0], PIECE))
        height = max(1, PIECE // width)
        for outer in itertools.product(*(range(*part) for part in leading)):
            place = tuple(i - start for i, (start, _) in zip(outer, leading, strict=True))
            target = out[place]
            for top, left in itertools.product(range(*rows, height), range(*columns, width)):
                piece = (
                    slice(top, min(top + height, rows[1])),
                    slice(left, min(left + width, columns[1])),
                )
                with np.errstate(over="ignore", invalid="ignore"):
                    target[
                        piece[0].start - rows[0] : piece[0].stop - rows[0],
                        piece[1].start - columns[0] : piece[1].stop - columns[0],
                    ] = self._products(name, scaled, outer, piece)
        return out

    def _products(
        self, name: str, scaled: _Scaled, outer: tuple[int, ...], piece: tuple[slice, slice]
    ) -> np.ndarray:
        """[rows, columns] float32 of one matrix's piece."""
        matrix = tuple(slice(i, i + 1) for i in outer)
        raw = self._stored.read_slice(name, (*matrix, *piece))
        values = _VALUES[raw.view(np.uint8).reshape(raw.shape[-2:])]
        if scaled.single:
            one = self._stored.read_slice(scaled.scale).astype(np.float32)
            values *= one.reshape(())
            return values
        blocks = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(piece, scaled.block, strict=True)
        )
        read = self._stored.read_slice(scaled.scale, (*matrix, *blocks))
        scale: np.ndarray = read.astype(np.float32).reshape(read.shape[-2:])
        # Each column's block, then one multiplication per band of rows that share their scales.
        of_column = np.arange(piece[1].start, piece[1].stop) // scaled.block[1] - blocks[1].start
        start, height = piece[0].start, scaled.block[0]
        for band in range(scale.shape[0]):
            first = max(0, (blocks[0].start + band) * height - start)
            last = (blocks[0].start + band + 1) * height - start
            values[first:last] *= scale[band, of_column]
        return values


def _misfit(weight: TensorSpec, scale: TensorSpec, quantization: Fp8Weights) -> str | None:
    """What is wrong with a weight's scales, None when nothing is."""
    if scale.dtype not in SCALE_DTYPES:
        known = ", ".join(sorted(SCALE_DTYPES))
        return f"{scale.name} is {scale.dtype}, scales are read as {known}"
    if len(weight.shape) < 2:
        return f"{weight.name} has shape {list(weight.shape)}, which has no blocks"
    *leading, rows, columns = weight.shape
    if quantization.block is None:
        expected: list[tuple[int, ...]] = [(), (1,), (*leading, 1, 1)]
    else:
        height, width = quantization.block
        expected = [(*leading, -(-rows // height), -(-columns // width))]
    if scale.shape in expected:
        return None
    return (
        f"{scale.name} in {scale.path.name} has shape {list(scale.shape)}, the blocks of "
        f"{weight.name} {list(weight.shape)} need {' or '.join(str(list(s)) for s in expected)}"
    )
