"""`cam_jax.json`: which leaf is in which part, and how long every file has to be."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import DTYPES, NAMES, WEIGHT_DTYPES
from cam_jax.conversion.files import MARKER, WEIGHTS
from cam_jax.conversion.header import read_json
from cam_jax.conversion.writing import write_json
from cam_jax.errors import CheckpointError

FORMAT = "cam_jax.orbax"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf of one layer as it lies on disk; part: the folder of `weights/` that holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    part: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Index:
    """What `cam_jax.json` says.

    Attributes:
        family: name of the weight table.
        layout: how the Hugging Face checkpoint stored experts, so that the way back is exact.
        leaves: path -> where and what.
        files: path below the directory -> bytes, of everything in `weights/`.
    """

    family: str
    layout: str
    leaves: Mapping[str, StoredLeaf]
    files: Mapping[str, int]

    def write(self, directory: Path) -> None:
        """Write the marker: a directory without it does not load."""
        leaves = {
            path: {"shape": list(leaf.shape), "dtype": NAMES[leaf.dtype], "part": leaf.part}
            for path, leaf in self.leaves.items()
        }
        write_json(
            directory / MARKER,
            {
                "format": FORMAT,
                "version": VERSION,
                "family": self.family,
                "layout": self.layout,
                "leaves": leaves,
                "files": dict(self.files),
            },
        )

    @classmethod
    def read(cls, directory: Path) -> "Index":
        """Raises CheckpointError naming the file: missing, malformed, or of another version."""
        path = directory / MARKER
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format={values.get('format')!r}, not {FORMAT!r}.")
        version = values.get("version")
        if type(version) is not int or version != VERSION:  # true and 1.0 equal 1 to Python
            raise CheckpointError(
                f"{path} has version={version!r}, this cam_jax reads {VERSION}: "
                "convert the checkpoint again, or use the cam_jax that wrote it."
            )
        return cls(
            family=_text(path, values, "family"),
            layout=_text(path, values, "layout"),
            leaves={
                name: _leaf(path, name, entry)
                for name, entry in _object(path, values, "leaves").items()
            },
            files={
                name: _size(path, name, size)
                for name, size in _object(path, values, "files").items()
            },
        )


def list_files(directory: Path) -> dict[str, int]:
    """What `Index.files` has to say about a directory."""
    root = directory / WEIGHTS
    return {
        file.relative_to(directory).as_posix(): file.stat().st_size
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def wrong_files(directory: Path, files: Mapping[str, int]) -> Iterator[str]:
    """A line for every file that is missing, left over, or of another length than files says."""
    for name, size in files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError:
            yield f"{name} is missing"
            continue
        if found != size:
            yield f"{name} has {found} bytes, {MARKER} says {size}"
    for name in list_files(directory):
        if name not in files:
            yield f"{name[:100]!r} is left over, {MARKER} does not name it"


def _object(path: Path, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path}: {key} must be a JSON object that is not empty.")
    return found


def _text(path: Path, values: Mapping[str, Any], key: str) -> str:
    found = values.get(key)
    if not isinstance(found, str):
        raise CheckpointError(f"{path}: {key} must be a text, got {found!r}.")
    return found


def _leaf(path: Path, name: str, entry: Any) -> StoredLeaf:
    where = f"{path}: leaf {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no description.")
    shape, dtype, part = (entry.get(key) for key in ("shape", "dtype", "part"))
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{where} has the impossible shape {shape!r}.")
    if not isinstance(dtype, str) or dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{where} has the impossible dtype {dtype!r}.")
    # A part is one folder of weights/: nothing outside of the checkpoint is ever read.
    if not isinstance(part, str) or not re.fullmatch("[0-9]+", part):
        raise CheckpointError(f"{where} has the impossible part {part!r}.")
    return StoredLeaf(shape=tuple(shape), dtype=DTYPES[dtype], part=part)


def _size(path: Path, name: str, size: Any) -> int:
    if type(size) is not int or size < 0:
        raise CheckpointError(f"{path}: file {name[:100]!r} with {size!r} bytes cannot be.")
    parts = name.split("/")
    below = len(parts) > 1 and parts[0] == WEIGHTS and not {"", ".", ".."} & set(parts)
    # Backslashes are separators on some systems, NUL is in no name of a file.
    if not below or "\\" in name or not name.isprintable():
        raise CheckpointError(
            f"{path}: file {name[:100]!r} cannot be: every file that it names lies below "
            f"{WEIGHTS}/."
        )
    return size
