"""Hugging Face checkpoints in and out: headers checked first, every tensor accounted for."""

from cam_jax.conversion.load import (
    LoadedCheckpoint,
    OpenCheckpoint,
    load_checkpoint,
    load_params,
    open_checkpoint,
)
from cam_jax.conversion.read import NonfiniteWarning, read_leaves
from cam_jax.conversion.save import save_hf
from cam_jax.conversion.source import CheckpointSource

__all__ = [
    "CheckpointSource",
    "LoadedCheckpoint",
    "NonfiniteWarning",
    "OpenCheckpoint",
    "load_checkpoint",
    "load_params",
    "open_checkpoint",
    "read_leaves",
    "save_hf",
]
