"""Checkpoints in and out, Hugging Face and Orbax: checked first, every tensor accounted for."""

from cam_jax.conversion.either import load_any, open_any
from cam_jax.conversion.load import (
    LoadedCheckpoint,
    OpenCheckpoint,
    load_checkpoint,
    load_params,
    open_checkpoint,
)
from cam_jax.conversion.orbax import OpenOrbax, load_orbax_params, open_orbax, save_orbax
from cam_jax.conversion.read import NonfiniteWarning, read_leaves
from cam_jax.conversion.save import save_hf
from cam_jax.conversion.source import CheckpointSource
from cam_jax.conversion.streaming import convert
from cam_jax.conversion.summary import inspect

__all__ = [
    "CheckpointSource",
    "LoadedCheckpoint",
    "NonfiniteWarning",
    "OpenCheckpoint",
    "OpenOrbax",
    "convert",
    "inspect",
    "load_any",
    "load_checkpoint",
    "load_orbax_params",
    "load_params",
    "open_any",
    "open_checkpoint",
    "open_orbax",
    "read_leaves",
    "save_hf",
    "save_orbax",
]
