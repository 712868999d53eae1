"""What the processes of test_together.py run: `python -m tests.conversion.processes_child`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from cam_jax import make_mesh
from cam_jax.conversion import open_checkpoint, save_hf
from cam_jax.conversion.either import load_any
from cam_jax.conversion.orbax import load_orbax_params, open_orbax, save_orbax
from cam_jax.conversion.together import save_together
from cam_jax.distributed import Processes, fetch, start
from cam_jax.errors import CheckpointError
from cam_jax.models.params import unstack_params


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Path
    folder: Path
    processes: Annotated[Processes, tyro.conf.arg(name="")] = field(default_factory=Processes)


def main() -> None:
    options = tyro.cli(Options)
    with start(options.processes):
        work(options)


def work(options: Options) -> None:
    opened = open_checkpoint(options.source)
    params = load_any(opened, mesh=make_mesh(expert=4))
    leaves = unstack_params(opened.config, params)
    for name, save in (("orbax", save_orbax), ("hf", save_hf)):
        save_together(
            lambda given, name=name, save=save: save(
                options.folder / name, opened.config_json, given, layout=opened.plan.layout
            ),
            leaves,
        )
    try:
        save_together(lambda given: save_orbax(options.folder / "hf", {}, given), leaves)
        sys.exit("saved over another checkpoint")
    except CheckpointError:
        pass
    again = load_orbax_params(
        open_orbax(options.folder / "orbax"), mesh=make_mesh(expert=2, tensor=2)
    )
    for a, b in zip(jax.tree.leaves(fetch(params)), jax.tree.leaves(fetch(again)), strict=True):
        own = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        assert np.array_equal(a[own], b[own])


if __name__ == "__main__":
    main()
