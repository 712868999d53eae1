"""A directory of weight files as one set of named tensors, read lazily and without copies."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import DTYPES, aligned_empty, as_bytes
from cam_jax.conversion.header import TensorSpec, read_header, read_json
from cam_jax.conversion.paths import local_path
from cam_jax.conversion.torch_file import read_torch_file
from cam_jax.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"

Ranges = Sequence[slice]
"""One slice with step 1 per leading axis of a tensor; axes that are not named are read whole."""


@dataclass(frozen=True, kw_only=True)
class _Format:
    """single, index: names of the one file and of the index. shard: pattern of the shards' names.

    read: the tensors of one file.
    """

    single: str
    index: str
    shard: re.Pattern[str]
    read: Callable[[Path], dict[str, TensorSpec]]


_FORMATS = (  # the first that a directory holds is read, as in transformers
    _Format(
        single=SINGLE,
        index=INDEX,
        shard=re.compile(r"model-\d+-of-\d+\.safetensors"),
        read=read_header,
    ),
    _Format(
        single=TORCH_SINGLE,
        index=TORCH_INDEX,
        shard=re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
        read=read_torch_file,
    ),
)


class CheckpointSource:
    """The tensors of a checkpoint directory: `model.safetensors`, or shards with an index.

    Without either, `pytorch_model.bin` or its shards; safetensors win where both are there.

    Opening reads and checks every header and no tensor data. It keeps no file open and has no
    mutable state, so any number of threads may read through one source.
    """

    def __init__(self, directory: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.directory = directory
        self._specs = dict(specs)

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointSource":
        """Read the headers in directory.

        Raises CheckpointError naming the file and tensor: no weights, both kinds of weights, a
        malformed or truncated file, an index that names a missing shard, a path outside the
        directory or a tensor that its shard lacks, a tensor in a shard that the index does not
        name, and a tensor held by two shards.
        """
        directory = local_path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory.")
        for kind in _FORMATS:
            single, index = directory / kind.single, directory / kind.index
            if index.is_file():
                weight_map = _read_index(index)
                if single.is_file() and kind.single not in weight_map.values():
                    raise CheckpointError(
                        f"{directory} holds both {kind.single} and {kind.index}, which does not "
                        "name it; remove the one that is out of date."
                    )
                return cls(directory, _read_shards(directory, kind, weight_map))
            if single.is_file():
                return cls(directory, kind.read(single))
        raise CheckpointError(_nothing_to_read(directory))

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def spec(self, name: str) -> TensorSpec:
        """Where and what the tensor is. Raises CheckpointError when there is none of that name."""
        if name not in self._specs:
            raise CheckpointError(f"{self.directory} holds no tensor {name!r}.")
        return self._specs[name]

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, in its own type."""
        return self.read_slice(name, ())

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Read the whole tensor into out (same shape and type), straight from the file."""
        self.read_slice(name, (), out=out)

    def read_slice(
        self, name: str, ranges: Ranges = (), *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read part of a tensor, and only that part of the file, straight into its place in `out`.

        Args:
            name: the tensor.
            ranges: one slice per leading axis, step 1; axes left out are whole.
            out: array of the shape of the part and the tensor's type; made here when None. Parts
            of it
                that receive one run of the file should be contiguous in memory (any view of rows of
                a C-contiguous array is); other views cost one temporary of the size of a run.

        Returns out. Raises CheckpointError when the file no longer holds what its header announced.
        """
        spec = self.spec(name)
        dtype = DTYPES[spec.dtype]
        bounds = bounds_of(spec, ranges)
        shape = tuple(stop - start for start, stop in bounds)
        if out is None:
            out = aligned_empty(shape, dtype)
        if out.shape != shape or out.dtype != dtype:
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}, the part of {name!r} is {dtype}{list(shape)}"
            )
        if out.size == 0:
            return out
        # Everything after the last axis that is cut lies in one run of bytes in the file.
        cut = [axis for axis, b in enumerate(bounds) if b != (0, spec.shape[axis])]
        run_axis = cut[-1] if cut else 0
        strides = _byte_strides(spec.shape, dtype.itemsize)
        origin = spec.begin + sum(
            start * stride for (start, _), stride in zip(bounds, strides, strict=True)
        )
        try:
            with spec.path.open("rb", buffering=0) as file:
                for outer in itertools.product(*(range(n) for n in shape[:run_axis])):
                    file.seek(origin + sum(i * s for i, s in zip(outer, strides, strict=False)))
                    # The ellipsis keeps a 0-d result a view of out instead of a scalar.
                    place: tuple[Any, ...] = (*outer, ...)
                    _fill(file, out[place], spec)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"{spec.path}: tensor {name!r} cannot be read: {reason}."
            ) from error
        return out


def _fill(file: FileIO, target: np.ndarray, spec: TensorSpec) -> None:
    """Fill target with the next bytes of the file."""
    direct = target.flags.c_contiguous
    buffer = target if direct else np.empty(target.shape, target.dtype)
    view = as_bytes(buffer)
    while view:  # one call reads at most about 2 GB on Linux
        count = file.readinto(view)
        if not count:
            raise CheckpointError(
                f"{spec.path} is truncated: {len(view)} bytes of tensor {spec.name!r} are missing."
            )
        view = view[count:]
    if not direct:
        target[...] = buffer


def bounds_of(spec: TensorSpec, ranges: Ranges) -> list[tuple[int, int]]:
    """(start, stop) of every axis. Raises ValueError for too many ranges or another step."""
    if len(ranges) > len(spec.shape):
        raise ValueError(f"{len(ranges)} ranges for {spec.name!r} of shape {list(spec.shape)}")
    bounds = [(0, size) for size in spec.shape]
    for axis, part in enumerate(ranges):
        start, stop, step = part.indices(spec.shape[axis])
        if step != 1:
            raise ValueError(f"ranges of {spec.name!r} must have step 1, not {step}")
        bounds[axis] = (start, max(start, stop))
    return bounds


def _byte_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _nothing_to_read(directory: Path) -> str:
    for kind, pattern in zip(_FORMATS, ("*.safetensors", "pytorch_model*.bin"), strict=True):
        shards = sorted(path.name for path in directory.glob(pattern))
        if shards:
            return (
                f"{directory} holds {shards[0]} but neither {kind.single} nor the index "
                f"{kind.index}."
            )
    return (
        f"{directory} holds no weights: neither {SINGLE} nor {INDEX} (nor {TORCH_SINGLE} or its "
        "index)."
    )


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or "\0" in shard:
            raise CheckpointError(
                f"{index}: tensor {name!r} is given the impossible file {shard!r}."
            )
    return weight_map


def _read_shards(
    directory: Path, kind: _Format, weight_map: dict[str, str]
) -> dict[str, TensorSpec]:
    index = directory / kind.index
    roots = _allowed_roots(directory)
    first_tensor: dict[str, str] = {}
    for name, shard in weight_map.items():
        first_tensor.setdefault(shard, name)
    specs: dict[str, TensorSpec] = {}
    for shard, name in sorted(first_tensor.items()):
        path = _shard_path(directory, index, shard, name, roots)
        for tensor, spec in kind.read(path).items():
            if tensor in specs:
                raise CheckpointError(
                    f"tensor {tensor!r} is in two shards: {specs[tensor].path} and {path}."
                )
            if tensor not in weight_map:
                raise CheckpointError(
                    f"{path} holds tensor {tensor!r}, which {index} does not name: "
                    "the index is stale."
                )
            specs[tensor] = spec
    for name, shard in weight_map.items():
        if name not in specs:
            raise CheckpointError(
                f"{index} says that {directory / shard} holds tensor {name!r}; it does not."
            )
        if specs[name].path != directory / shard:
            raise CheckpointError(
                f"{index} says that {directory / shard} holds tensor {name!r}; "
                f"it is in {specs[name].path}."
            )
    for path in sorted(directory.iterdir()):
        if kind.shard.fullmatch(path.name) and path.name not in first_tensor:
            raise CheckpointError(f"{index} does not name the shard {path}: the index is stale.")
    return specs


def _shard_path(
    directory: Path, index: Path, shard: str, name: str, roots: tuple[Path, ...]
) -> Path:
    where = f"{index} gives tensor {name!r} the file {shard!r}"
    relative = Path(shard)
    # Backslashes are separators on some systems: a name that needs them is not a shard's name.
    if relative.is_absolute() or ".." in relative.parts or "\\" in shard:
        raise CheckpointError(f"{where}, which is outside {directory}.")
    path = directory / relative
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{where}, which does not exist.") from error
    if not any(resolved.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{where}, a link that leaves {directory}.")
    if not resolved.is_file():
        raise CheckpointError(f"{where}, which is not a file.")
    return path


def _allowed_roots(directory: Path) -> tuple[Path, ...]:
    """Folders that shards may lie in: the directory, and the blobs of a Hugging Face cache when the
    directory is one of its snapshots (.../models--owner--name/snapshots/REVISION), which is links
    only.
    """
    resolved = directory.resolve()
    repository = resolved.parent.parent
    if resolved.parent.name == "snapshots" and repository.name.startswith("models--"):
        return (resolved, repository / "blobs")
    return (resolved,)
