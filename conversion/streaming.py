"""From one checkpoint format to another, leaf by leaf: neither model is ever whole in memory."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cam_jax.conversion.arrays import load_dtype
from cam_jax.conversion.either import OpenAny, layout_of, open_any
from cam_jax.conversion.files import WEIGHTS
from cam_jax.conversion.orbax import OpenOrbax, save_orbax
from cam_jax.conversion.paths import local_path
from cam_jax.conversion.plan import LoadPlan, directory_of
from cam_jax.conversion.read import Progress, check_tied, read_leaves
from cam_jax.conversion.save import save_hf
from cam_jax.conversion.staging import refuse_existing
from cam_jax.conversion.tables import table_for
from cam_jax.errors import CheckpointError, ConfigError

Format = Literal["orbax", "hf"]


@dataclass(frozen=True, kw_only=True)
class LazyLeaf:
    """A leaf that is read when NumPy asks for its data, anew each time; nothing is kept."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.read()
        return found if dtype is None or dtype == found.dtype else found.astype(dtype)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was done. leaves: how many parameters; nbytes: of the weights written."""

    source: Path
    target: Path
    source_format: Format
    target_format: Format
    family: str
    layout: str
    leaves: int
    nbytes: int
    seconds: float


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: Format = "orbax",
    dtype: str | np.dtype | type | None = None,
    layout: str | None = None,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Conversion:
    """Convert a checkpoint; dst is complete or not there at all.

    Args:
        src: a Hugging Face directory, a hub id, or an Orbax directory.
        dst: the directory to make.
        to: "orbax" or "hf"; either may be what src is already (a change of type or layout).
        dtype: None keeps every leaf's type, "bf16" or "f32" casts (not the selection bias).
        layout: how experts are stored on the way back to "hf"; None is what the model came with,
            so that every tensor has its old name and bytes.
        overwrite: replace a checkpoint that is at dst. Never anything else, nor a directory that
            src or a file that it links to lies in.
        allow_nonfinite: convert weights that are NaN or infinite.
        progress: called with (bytes written, bytes in all).
        revision, cache_dir, local_files_only: of the hub.

    Raises ConfigError and CheckpointError, before any weight is read where headers can tell: src
    is no checkpoint, damaged or not of a known family, dst exists or cannot be written.
    """
    began = time.perf_counter()
    if to not in get_args(Format):
        raise ConfigError(f"to={to!r}: expected one of {', '.join(get_args(Format))}.")
    wanted = load_dtype(dtype)
    target = directory_of(dst)
    # Twice: here before a message about the target alone, below for what a hub id stands for.
    if isinstance(src, str | Path) and str(src) and local_path(src).is_dir():
        _refuse_source(directory_of(src), target)
    refuse_existing(target, overwrite)
    opened = open_any(
        src, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
    )
    _refuse_source(opened.directory, target)
    _refuse_links(opened.directory, target)
    layout = layout_of(opened) if layout is None else layout
    layouts = table_for(opened.config.family).layouts
    if layout not in layouts:
        raise ConfigError(f"layout={layout!r}: {opened.config.family} has {', '.join(layouts)}.")
    leaves = lazy_leaves(opened, dtype=wanted, allow_nonfinite=allow_nonfinite)
    save = save_orbax if to == "orbax" else save_hf
    save(
        target,
        opened.config_json,
        leaves,
        layout=layout,
        companions=tuple(opened.companions.values()),
        overwrite=overwrite,
        progress=progress,
    )
    return Conversion(
        source=opened.directory,
        target=target,
        source_format="orbax" if isinstance(opened, OpenOrbax) else "hf",
        target_format=to,
        family=opened.config.family,
        layout=layout,
        leaves=len(leaves),
        nbytes=sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves.values()),
        seconds=time.perf_counter() - began,
    )


def _refuse_source(source: Path, target: Path) -> None:
    """Raise CheckpointError if writing target would remove or spoil the source."""
    source = directory_of(source)
    if source == target:
        raise CheckpointError(f"{target} cannot be converted into itself; give another path.")
    if source.is_relative_to(target):
        raise CheckpointError(
            f"{target} holds the source {source}, which would be lost; give another path."
        )
    if target.is_relative_to(source / WEIGHTS):
        raise CheckpointError(
            f"{target} lies among the weights of the source {source}; give another path."
        )


def _refuse_links(source: Path, target: Path) -> None:
    """Raise CheckpointError if replacing target would remove a file that the source links to."""
    if not target.exists():
        return
    # Links as in a cache of the hub, whose snapshots hold nothing else.
    for path in source.rglob("*"):
        if path.is_symlink() and directory_of(path).is_relative_to(target):
            raise CheckpointError(
                f"{path} of the source is a link into {target}, where its data would be lost; "
                "give another path."
            )


def lazy_leaves(
    opened: OpenAny, *, dtype: np.dtype | None = None, allow_nonfinite: bool = False
) -> Mapping[str, LazyLeaf]:
    """Every leaf of an opened checkpoint, to be read when it is needed.

    Raises CheckpointError when embeddings that are said to be tied differ.
    """
    return dict(_lazy(opened, dtype, allow_nonfinite))


def _lazy(
    opened: OpenAny, dtype: np.dtype | None, allow_nonfinite: bool
) -> Iterator[tuple[str, LazyLeaf]]:
    if isinstance(opened, OpenOrbax):
        shapes = {path: leaf.shape for path, leaf in opened.leaves.items()}
        types = opened.load_type
        read = partial(opened.read_leaf, dtype=dtype, allow_nonfinite=allow_nonfinite)
    else:
        plan = opened.plan
        check_tied(plan)
        shapes, types = dict(plan.shapes), plan.load_type
        read = partial(_read_planned, plan, dtype=dtype, allow_nonfinite=allow_nonfinite)
    for path, shape in shapes.items():
        yield path, LazyLeaf(shape=shape, dtype=types(path, dtype), read=partial(read, path))


def _read_planned(plan: LoadPlan, path: str, **options: Any) -> np.ndarray:
    return read_leaves(plan, paths=[path], **options)[path]
