"""A Hugging Face checkpoint -> configuration and leaves, or the stacked tree that runs on a device.

Everything that headers and config can tell is checked before any tensor data is read.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cam_jax.conversion.arrays import aligned_empty, load_dtype
from cam_jax.conversion.files import companions, read_directory
from cam_jax.conversion.fp8 import open_source
from cam_jax.conversion.hub import resolve
from cam_jax.conversion.placed import load_placed
from cam_jax.conversion.plan import LoadPlan, make_plan
from cam_jax.conversion.read import Progress, check_tied, read_leaves
from cam_jax.models.config import DecoderConfig
from cam_jax.models.params import Params, layer_paths, map_params, param_specs, stacked_specs


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that fits its config; no weight has been read.

    directory: where it lies. config_json: its config.json. config: the decoder. plan: which bytes
    become which leaf. companions: name -> path of generation_config.json, tokenizer.json and
    their like.
    """

    directory: Path
    config_json: dict[str, Any]
    config: DecoderConfig
    plan: LoadPlan
    companions: dict[str, Path]


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """An opened checkpoint and its leaves, one per layer, by path (`models.params.param_specs`)."""

    opened: OpenCheckpoint
    leaves: dict[str, np.ndarray]

    @property
    def config(self) -> DecoderConfig:
        return self.opened.config

    @property
    def config_json(self) -> dict[str, Any]:
        return self.opened.config_json

    @property
    def layout(self) -> str:
        """How the checkpoint stores experts; give it to `save_hf` to get the same tensors back."""
        return self.opened.plan.layout


def open_checkpoint(
    path_or_repo_id: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> OpenCheckpoint:
    """Find a checkpoint and check it, reading its config and headers only.

    Args:
        path_or_repo_id: a directory, or the id of a model on the Hugging Face hub.
        revision, cache_dir, local_files_only: of the hub; a directory ignores them.

    Raises ConfigError (unknown model_type or option) and CheckpointError (anything about the
    files or tensors, all missing and left-over ones listed).
    """
    directory = resolve(
        path_or_repo_id,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        check=read_directory,
    )
    config_json, config, table = read_directory(directory)
    shapes = {path: tuple(spec.shape) for path, spec in param_specs(config).items()}
    return OpenCheckpoint(
        directory=directory,
        config_json=config_json,
        config=config,
        plan=make_plan(open_source(directory, config_json), table, shapes, config_json),
        companions=companions(directory),
    )


def load_checkpoint(
    path_or_repo_id: str | Path,
    *,
    dtype: str | np.dtype | type | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> LoadedCheckpoint:
    """Load a checkpoint as per-layer leaves on the host (NumPy).

    The options are those of `open_checkpoint` and `read_leaves`, and so are the errors.
    """
    wanted = load_dtype(dtype)
    opened = open_checkpoint(
        path_or_repo_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
    )
    check_tied(opened.plan)
    leaves = read_leaves(
        opened.plan,
        dtype=wanted,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
        threads=threads,
    )
    return LoadedCheckpoint(opened=opened, leaves=leaves)


def load_params(
    opened: OpenCheckpoint,
    *,
    mesh: Mesh | None = None,
    dtype: str | np.dtype | type | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
    leave_out: frozenset[str] = frozenset(),
) -> Params:
    """Load an opened checkpoint as the stacked tree that `models.decoder.forward` takes.

    The same as `stack_params` of the per-layer leaves, without their copy: each tensor is read
    into its place of the stacked [L, ...] array, which JAX on CPU takes over as it is. Float64
    files become float32 unless 64-bit mode is on. A stack whose layers differ in type takes the
    widest.

    Args:
        mesh: None puts everything on the default device; on a mesh each device gets, and each
            process reads, its own part (`placed`).
        leave_out: stacked leaves ("segments.0.attn.q") that are not read and become None.
    """
    plan, config = opened.plan, opened.config
    wanted = load_dtype(dtype)
    check_tied(plan)
    specs = stacked_specs(config)
    types: dict[str, np.dtype] = {}

    def note_type(path: str, spec: Any) -> None:
        rows = layer_paths(config, path) or [path]
        types[path] = _widest(plan.load_type(row, wanted) for row in rows)

    map_params(note_type, specs)
    options: dict[str, Any] = {
        "allow_nonfinite": allow_nonfinite,
        "progress": progress,
        "threads": threads,
    }
    if mesh is not None:
        return load_placed(plan, config, mesh, types=types, leave_out=leave_out, **options)
    host = map_params(
        lambda path, spec: None if path in leave_out else aligned_empty(spec.shape, types[path]),
        specs,
    )
    out: dict[str, np.ndarray] = {}

    def note_rows(path: str, stack: np.ndarray) -> None:
        rows = layer_paths(config, path)
        out.update({path: stack} if rows is None else dict(zip(rows, stack, strict=True)))

    map_params(note_rows, host)
    read_leaves(plan, paths=list(out), out=out, **options)
    return jax.tree.map(_on_device, host)


def _widest(types: Iterable[np.dtype]) -> np.dtype:
    """The type that holds all of them, among those that JAX has now (64-bit mode or not)."""
    widest = functools.reduce(jnp.promote_types, types)
    return np.dtype(jax.dtypes.canonicalize_dtype(widest))


def _on_device(leaf: np.ndarray) -> jax.Array:
    """leaf on the default device, which may use its memory: nobody else holds it or writes to it.

    `jnp.asarray` always copies; `device_put` of an aligned buffer on CPU does not.
    """
    return jax.device_put(leaf, may_alias=True)
