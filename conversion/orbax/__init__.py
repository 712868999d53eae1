"""Models as Orbax checkpoints: one leaf per layer on disk, read on any mesh by its own slices.

A directory holds config.json and its companions (tokenizer, generation config), `weights/` with
Orbax checkpoints of a few leaves each, and `cam_jax.json`, which says which leaf is where. A few
leaves at a time, because Orbax holds all arrays of one checkpoint in memory while it writes.
"""

from cam_jax.conversion.files import MARKER
from cam_jax.conversion.orbax.load import load_orbax_params
from cam_jax.conversion.orbax.open import OpenOrbax, is_orbax, open_orbax
from cam_jax.conversion.orbax.save import save_orbax

__all__ = [
    "MARKER",
    "OpenOrbax",
    "is_orbax",
    "load_orbax_params",
    "open_orbax",
    "save_orbax",
]
