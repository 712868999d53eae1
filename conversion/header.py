"""The header of one safetensors file, read and checked before any tensor data is touched.

Format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length n, n bytes
of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data; offsets count from its
start.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from cam_jax.conversion.arrays import DTYPES
from cam_jax.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The reference implementation refuses longer headers too (safetensors/src/tensor.rs)."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Where a tensor lies: file, safetensors type name, shape, absolute byte range [begin, end)."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in text. Raises CheckpointError (naming `what`) for anything else, and for a
    key that is given twice, which `json` would resolve without a word."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{what}: the key {key!r} is given twice.")
            found[key] = value
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} holds a {type(parsed).__name__}, not a JSON object.")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError when it is missing or malformed."""
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
    return parse_json(text, str(path))


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor in a safetensors file, in the order of their data.

    Raises CheckpointError naming the file, and the tensor where there is one: unreadable or
    truncated file, absurd header length, malformed JSON, unknown type, shape and byte range that
    disagree, ranges that overlap, leave a gap or leave the file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise CheckpointError(
                    f"{path} is truncated: {size} bytes cannot hold a safetensors header."
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} announces a header of {length} bytes (the format allows "
                    f"{MAX_HEADER_BYTES}); this is not a safetensors file, or it is damaged."
                )
            if length > size - LENGTH_BYTES:
                raise CheckpointError(
                    f"{path} is truncated: its header should take {length} bytes, "
                    f"the file has {size - LENGTH_BYTES} after the length."
                )
            text = file.read(length)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error

    entries = parse_json(text, f"the header of {path}")
    entries.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    specs = [_spec(name, entry, path, start) for name, entry in entries.items()]
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    _check_ranges(specs, path, start, size)
    return {spec.name: spec for spec in specs}


def _spec(name: str, entry: Any, path: Path, start: int) -> TensorSpec:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no description in the header.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where} has the unknown dtype {dtype!r}; known: {', '.join(DTYPES)}."
        )
    if not _counts(shape):
        raise CheckpointError(f"{where} has the impossible shape {shape!r}.")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the impossible data_offsets {offsets!r}.")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{where}: shape {shape} of {dtype} takes {needed} bytes, "
            f"data_offsets give it {offsets[1] - offsets[0]}."
        )
    return TensorSpec(
        name=name,
        path=path,
        dtype=dtype,
        shape=tuple(shape),
        begin=start + offsets[0],
        end=start + offsets[1],
    )


def _counts(value: Any) -> TypeGuard[list[int]]:
    """Whether value is a list of integers >= 0 (JSON true is an int to Python, not here)."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_ranges(specs: list[TensorSpec], path: Path, start: int, size: int) -> None:
    """specs (sorted by begin) must tile the data: no overlap, no gap, nothing outside."""
    expected = start
    previous = "the header"
    for spec in specs:
        if spec.end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {spec.name!r} ends at byte {spec.end}, "
                f"the file has {size}."
            )
        if spec.begin < expected:
            raise CheckpointError(f"{path}: tensor {spec.name!r} overlaps {previous}.")
        if spec.begin > expected:
            raise CheckpointError(
                f"{path}: {spec.begin - expected} bytes between {previous} and tensor "
                f"{spec.name!r} belong to no tensor."
            )
        expected, previous = spec.end, f"tensor {spec.name!r}"
    if expected != size:
        raise CheckpointError(
            f"{path}: {size - expected} bytes after {previous} belong to no tensor."
        )
