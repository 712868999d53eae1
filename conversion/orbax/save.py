"""Leaves -> an Orbax checkpoint directory, a few leaves at a time; complete or not there at all."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.files import CONFIG, WEIGHTS, describe
from cam_jax.conversion.orbax.index import Index, StoredLeaf, list_files
from cam_jax.conversion.orbax.parts import write_part
from cam_jax.conversion.plan import directory_of
from cam_jax.conversion.read import Progress
from cam_jax.conversion.staging import refuse_existing, staged
from cam_jax.conversion.writing import check_leaves, write_json, written_config
from cam_jax.errors import CheckpointError
from cam_jax.models.params import param_specs

PART_BYTES = 64 << 20
"""Leaves are written together up to this size, a larger one alone: all of a part are in memory."""


def save_orbax(
    path: str | Path,
    config_json: Mapping[str, Any],
    leaves: Mapping[str, Any],
    *,
    layout: str | None = None,
    companions: Iterable[Path] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint that `open_orbax` reads.

    Args:
        path: the directory to make. Everything is written beside it and renamed into place at the
            end, the marker `cam_jax.json` last: what an interrupted call leaves does not load.
        config_json: as in `save_hf`.
        leaves: path -> array of exactly the paths and shapes of `param_specs` (NumPy or JAX, on
            any mesh of this process). Each is asked for twice, once for its type; a lazy mapping
            keeps one leaf, or PART_BYTES of small ones, in memory.
        layout: how the Hugging Face checkpoint stored experts; None is the table's first.
        companions: files to copy along (generation_config.json, tokenizer.json); none may lie in
            a directory that is to be replaced.
        overwrite: replace a checkpoint directory that is there. Never anything else.
        progress: called after each part with the bytes written.

    Returns the directory. Raises CheckpointError: something is at `path` already, leaves that do
    not match the config, disk full.
    """
    target = directory_of(path)
    companions = tuple(companions)
    refuse_existing(target, overwrite, companions)
    config, table = describe(config_json)
    layout = layout or next(iter(table.layouts))
    if layout not in table.layouts:
        raise CheckpointError(
            f"layout={layout!r} is none of {table.family}'s: {', '.join(table.layouts)}."
        )
    shapes = {leaf: tuple(spec.shape) for leaf, spec in param_specs(config).items()}
    dtypes = check_leaves(shapes, leaves)
    stored = dict(_in_parts(shapes, dtypes))
    total = sum(leaf.nbytes for leaf in stored.values())
    done = 0
    with staged(target, overwrite=overwrite) as temporary:
        for file in companions:
            shutil.copyfile(file, temporary / Path(file).name)
        write_json(temporary / CONFIG, written_config(config_json, dtypes))
        (temporary / WEIGHTS).mkdir()
        if progress is not None:
            progress(0, total)
        for part in dict.fromkeys(leaf.part for leaf in stored.values()):
            own = [name for name, leaf in stored.items() if leaf.part == part]
            # Before the try: an error of reading the source is not one of writing.
            arrays = {name: np.asarray(leaves[name]) for name in own}
            try:
                write_part(temporary / WEIGHTS / part, arrays)
            except CheckpointError as error:
                raise CheckpointError(f"{target} cannot be written: {error}") from error
            del arrays  # or two parts were in memory while the next one is read
            done += sum(stored[name].nbytes for name in own)
            if progress is not None:
                progress(done, total)
        Index(family=table.family, layout=layout, leaves=stored, files=list_files(temporary)).write(
            temporary
        )
    return target


def _in_parts(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]
) -> Iterator[tuple[str, StoredLeaf]]:
    """Leaves in order, dealt out to parts of up to PART_BYTES."""
    number, size = 0, 0
    for path, shape in shapes.items():
        leaf = StoredLeaf(shape=shape, dtype=dtypes[path], part=f"{number:05}")
        if size and size + leaf.nbytes > PART_BYTES:
            number, size = number + 1, 0
            leaf = StoredLeaf(shape=shape, dtype=dtypes[path], part=f"{number:05}")
        size += leaf.nbytes
        yield path, leaf
