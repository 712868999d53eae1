"""Orbax checkpoints of a training, and the check that a resumed run is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from cam_jax.errors import CheckpointError
from cam_jax.training.step import State

# The second-last is kept in case the disk fails under the last one.
_KEPT = 2


class Checkpoints:
    """The checkpoints of one run. A context manager; leaving it waits for what is being written.

    ``identity`` says what the run is (options, corpus). It is written beside every checkpoint, and
    a folder that holds another run's checkpoints is refused. ``reading`` leaves half-written
    checkpoints alone, which may be those of a training that still runs.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], *, reading: bool = False) -> None:
        self._folder = folder.absolute()
        self._identity = identity
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(_KEPT),
            cleanup_tmp_directories=not reading,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, state: State, seconds: float) -> None:
        """Write a checkpoint; it appears under its name only once it is complete.

        ``seconds`` is the time that the training has taken so far, over all calls.
        """
        metadata = {"identity": self._identity, "seconds": seconds}
        self._checkpointer.save(
            int(state.step), _as_tree(state), custom_metadata=metadata, force=True
        )

    def latest_step(self) -> int | None:
        """Steps done at the last complete checkpoint, None without one."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def restore(self, like: State) -> tuple[State, float] | None:
        """(state, seconds) of the last complete checkpoint, None without one.

        ``like`` gives structure, shapes and device.

        Raises:
            CheckpointError: it belongs to a run with other options or another corpus.
        """
        step = self.latest_step()
        if step is None:
            return None
        metadata = self._checkpointer.metadata(step).custom_metadata or {}
        written = metadata.get("identity", {})
        differing = [
            f"{name} is {self._identity.get(name)!r} and was {written.get(name)!r}"
            for name in sorted({*written, *self._identity})
            if written.get(name) != self._identity.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of another training: {'; '.join(differing)}. "
                "Go on with the same options, or choose another folder"
            )
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in _as_tree(like).items()
        }
        tree = self._checkpointer.load(step, shapes)
        # The containers are rebuilt from `like`: a file knows only dictionaries and lists.
        state = jax.tree.unflatten(jax.tree.structure(like), [tree[k] for k in _names(like)])
        return state, float(metadata["seconds"])


def _names(state: State) -> list[str]:
    return [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    ]


def _as_tree(state: State) -> dict[str, jax.Array]:
    return dict(zip(_names(state), jax.tree.leaves(state), strict=True))
