"""An Orbax checkpoint directory, checked against its config; no weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import aligned_empty, has_nonfinite
from cam_jax.conversion.files import MARKER, WEIGHTS, companions, read_directory
from cam_jax.conversion.orbax.index import Index, StoredLeaf, wrong_files
from cam_jax.conversion.orbax.parts import PartReader
from cam_jax.conversion.paths import local_path
from cam_jax.conversion.plan import SHOWN
from cam_jax.conversion.read import LOAD_NONFINITE, Region, whole
from cam_jax.errors import CheckpointError
from cam_jax.models.config import DecoderConfig
from cam_jax.models.params import param_specs

_ORBAX_FILES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", "_METADATA")


@dataclass(frozen=True, kw_only=True)
class OpenOrbax:
    """A checkpoint that fits its config; no weight has been read.

    directory: where it lies. config_json: its config.json. config: the decoder. layout: how the
    Hugging Face checkpoint that it came from stored experts. leaves: path -> shape, type, part.
    wide: leaves that a cast leaves alone, unless to four bytes or more. companions: name -> path of
    generation_config.json, tokenizer.json and their like.
    """

    directory: Path
    config_json: dict[str, Any]
    config: DecoderConfig
    layout: str
    leaves: Mapping[str, StoredLeaf]
    wide: frozenset[str]
    companions: dict[str, Path]
    _reader: PartReader = field(default_factory=PartReader, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves in the types they are stored in."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def load_type(self, leaf: str, wanted: np.dtype | None) -> np.dtype:
        """The type that a leaf is read as when `wanted` is asked for, None being its own."""
        if wanted is None or (leaf in self.wide and wanted.itemsize < 4):
            return self.leaves[leaf].dtype
        return wanted

    def read_region(self, region: Region, *, allow_nonfinite: bool = False) -> None:
        """Fill region.out with a box of a leaf, reading the chunks that it touches and no others.

        Raises CheckpointError: data that is damaged or not what `cam_jax.json` says, or values that
        are not finite.
        """
        self._check_stored(region.leaf)  # the reader would cast from whatever type lies there
        self._reader.read(self._part(region.leaf), region)
        if not allow_nonfinite and has_nonfinite(region.out):
            raise CheckpointError(
                f"{self.directory}: leaf {region.leaf!r} holds NaN or infinite values. "
                f"{LOAD_NONFINITE}"
            )

    def read_leaf(
        self, path: str, *, dtype: np.dtype | None = None, allow_nonfinite: bool = False
    ) -> np.ndarray:
        """A whole leaf on the host."""
        shape = self.leaves[path].shape
        out = aligned_empty(shape, self.load_type(path, dtype))
        region = Region(leaf=path, box=whole(shape), out=out)
        self.read_region(region, allow_nonfinite=allow_nonfinite)
        return out

    def check_stored(self) -> None:
        """Compare what Orbax says of every leaf with `cam_jax.json`; reads metadata only.

        Raises CheckpointError for the first leaf that differs or cannot be opened.
        """
        for path in self.leaves:
            self._check_stored(path)

    def _check_stored(self, path: str) -> None:
        leaf = self.leaves[path]
        shape, dtype = self._reader.stored(self._part(path), path)
        if (shape, dtype) != (leaf.shape, leaf.dtype):
            raise CheckpointError(
                f"{self._part(path)}: leaf {path!r} is {dtype}{list(shape)}, {MARKER} says "
                f"{leaf.dtype}{list(leaf.shape)}. One of them was changed: make the checkpoint "
                "again."
            )

    def _part(self, path: str) -> Path:
        return self.directory / WEIGHTS / self.leaves[path].part


def is_orbax(directory: Path) -> bool:
    """Whether a directory is one that `save_orbax` wrote (or an Orbax checkpoint of other origin,
    which `open_orbax` refuses with the reason)."""
    return (directory / MARKER).exists() or any(
        (directory / name).exists() for name in _ORBAX_FILES
    )


def open_orbax(path: str | Path) -> OpenOrbax:
    """Check a directory that `save_orbax` made, reading no weights.

    Names and lengths of all files have to be those that were written; their contents are not
    check-summed. A leaf whose stored shape or type is another one is refused when it is read (or by
    `check_stored`), changed numbers of the right type and length are not noticed.

    Raises CheckpointError (no such directory, not made by `save_orbax`, files missing, left over or
    cut short, leaves that do not fit the config) and ConfigError (unknown model_type or option).
    """
    directory = local_path(path).absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory.")
    if not (directory / MARKER).is_file():
        if is_orbax(directory):
            raise CheckpointError(
                f"{directory} is an Orbax checkpoint, but not one of cam_jax (no {MARKER}): "
                "make one with `cam-jax convert` or LanguageModel.save(format='orbax')."
            )
        raise CheckpointError(f"{directory} holds no {MARKER}: it is no Orbax checkpoint.")
    index = Index.read(directory)
    config_json, config, table = read_directory(directory)
    if index.family != table.family:
        raise CheckpointError(
            f"{directory}: {MARKER} is of a {index.family}, config.json of a {table.family}."
        )
    if index.layout not in table.layouts:
        raise CheckpointError(
            f"{directory / MARKER}: layout={index.layout!r} is none of {table.family}'s: "
            f"{', '.join(table.layouts)}."
        )
    shapes = {leaf: tuple(spec.shape) for leaf, spec in param_specs(config).items()}
    faults = [f"{leaf} is missing" for leaf in shapes if leaf not in index.leaves]
    faults += [f"{leaf[:100]!r} is left over" for leaf in index.leaves if leaf not in shapes]
    faults += [
        f"{leaf} is {list(index.leaves[leaf].shape)}, the config gives {list(shape)}"
        for leaf, shape in shapes.items()
        if leaf in index.leaves and index.leaves[leaf].shape != shape
    ]
    faults = faults or list(wrong_files(directory, index.files))
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(
            f"{directory} is damaged or does not fit its config: {'; '.join(faults[:SHOWN])}{more}."
        )
    pieces = table.pieces(shapes, index.layout)
    return OpenOrbax(
        directory=directory,
        config_json=config_json,
        config=config,
        layout=index.layout,
        leaves={leaf: index.leaves[leaf] for leaf in shapes},
        wide=frozenset(piece.leaf for piece in pieces if piece.rule.wide),
        companions=companions(directory),
    )
