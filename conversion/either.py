"""Checkpoints of either kind, Hugging Face or Orbax, through one pair of functions."""

from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from cam_jax.conversion.files import CONFIG
from cam_jax.conversion.load import OpenCheckpoint, load_params, open_checkpoint
from cam_jax.conversion.orbax import MARKER, OpenOrbax, is_orbax, load_orbax_params, open_orbax
from cam_jax.conversion.paths import local_path
from cam_jax.conversion.read import Progress
from cam_jax.errors import CheckpointError
from cam_jax.models.params import Params

OpenAny = OpenCheckpoint | OpenOrbax


def open_any(path_or_repo_id: str | Path, **hub: Any) -> OpenAny:
    """Open a directory of either kind, or a model of the Hugging Face hub; no weight is read.

    Args:
        path_or_repo_id: what `open_checkpoint` or `open_orbax` takes.
        hub: revision, cache_dir, local_files_only of `open_checkpoint`.

    Raises CheckpointError and ConfigError as those two.
    """
    if isinstance(path_or_repo_id, str | Path) and str(path_or_repo_id):
        directory = local_path(path_or_repo_id)
        if directory.is_dir() and is_orbax(directory):
            return open_orbax(directory)
        if directory.is_dir() and not (directory / CONFIG).is_file():
            raise CheckpointError(
                f"{directory} is neither a Hugging Face checkpoint (it holds no {CONFIG}) nor an "
                f"Orbax checkpoint of cam_jax (no {MARKER})."
            )
    return open_checkpoint(path_or_repo_id, **hub)


def load_any(
    opened: OpenAny,
    *,
    mesh: Mesh | None = None,
    dtype: str | np.dtype | type | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Params:
    """The stacked tree of what `open_any` gave. Options and errors are those of `load_params`."""
    load = load_orbax_params if isinstance(opened, OpenOrbax) else load_params
    return load(
        opened,  # type: ignore[arg-type]
        mesh=mesh,
        dtype=dtype,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )


def layout_of(opened: OpenAny) -> str:
    """How the Hugging Face checkpoint stores, or stored, experts ("per_expert", "fused")."""
    return opened.layout if isinstance(opened, OpenOrbax) else opened.plan.layout
