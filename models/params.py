"""Parameters by path: what a checkpoint must fill, and the way between per-layer leaves and stacks.

On disk a model is one leaf per layer ("layers.3.attn.q"); on the device the layers of a segment
are stacked. Stacking goes leaf by leaf through a Mapping, which may read lazily: at no time is more
than one stacked leaf held beside the result.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cam_jax.errors import CheckpointError
from cam_jax.models.block import Block
from cam_jax.models.config import DecoderConfig, Segment

Params = dict[str, Any]


@lru_cache(maxsize=64)
def _block_specs(config: DecoderConfig, segment: Segment) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaves of one layer of the segment by path ("attn.q")."""
    block = nnx.eval_shape(lambda: Block(config, segment.kind, rngs=nnx.Rngs(0), dtype=jnp.float32))
    tree = nnx.to_pure_dict(nnx.split(block)[1])
    return {
        ".".join(str(step.key) for step in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _outer_specs(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaves outside the layers."""
    table = (config.vocab_size, config.hidden_size)
    shapes = {"embed": table, "final_norm": (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes["lm_head"] = table
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def param_specs(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf a checkpoint must fill: path -> shape, layers apart, in the order of the layers.

    The dtype is float32 but for int8 experts; checkpoints may hold another.
    """
    outer = _outer_specs(config)
    specs = {"embed": outer.pop("embed")}
    for segment in config.segments:
        for layer in range(segment.start, segment.start + segment.length):
            for path, spec in _block_specs(config, segment).items():
                specs[f"layers.{layer}.{path}"] = spec
    return {**specs, **outer}


def stacked_specs(config: DecoderConfig) -> Params:
    """The pytree that `forward` takes, as shapes: [layers of a segment, ...].

    Float32 but for int8 experts. Built from the same description as `param_specs`.
    """
    tree: Params = dict(_outer_specs(config))
    tree["segments"] = []
    for segment in config.segments:
        inner: Params = {}
        for path, spec in _block_specs(config, segment).items():
            stacked = jax.ShapeDtypeStruct((segment.length, *spec.shape), spec.dtype)
            put_leaf(inner, path, stacked)
        tree["segments"].append(inner)
    return tree


def map_params(change: Callable[..., Any], params: Params, *others: Params) -> Params:
    """``change(path, leaf, leaves of the others)`` per leaf; a path is like "segments.0.attn.q"."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        steps = (getattr(step, "key", getattr(step, "idx", None)) for step in path)
        return change(".".join(str(step) for step in steps), *leaves)

    return jax.tree_util.tree_map_with_path(named, params, *others)


def layer_paths(config: DecoderConfig, path: str) -> list[str] | None:
    """Leaves of single layers ("layers.3.attn.q") that make up a stack ("segments.1.attn.q").

    None for a leaf outside of the layers, which is the same in both.
    """
    if not path.startswith("segments."):
        return None
    _, number, rest = path.split(".", 2)
    segment = config.segments[int(number)]
    return [f"layers.{segment.start + row}.{rest}" for row in range(segment.length)]


def stack_params(config: DecoderConfig, leaves: Mapping[str, Any]) -> Params:
    """The pytree that `forward` takes, from per-layer leaves by path.

    Args:
        config: the model.
        leaves: exactly the paths of `param_specs`, numpy or JAX arrays of those shapes. Each is
            asked for once, layer by layer of one leaf.

    Raises:
        CheckpointError: a path is missing or not known, or an array has another shape.
    """
    specs = param_specs(config)
    missing = [path for path in specs if path not in leaves]
    unknown = [path for path in leaves if path not in specs]
    if missing or unknown:
        raise CheckpointError(
            f"parameters do not match the model: missing {_some(missing)}, not known "
            f"{_some(unknown)}"
        )

    def take(path: str) -> Any:
        leaf = leaves[path]
        if tuple(leaf.shape) != specs[path].shape:
            raise CheckpointError(
                f"{path} has shape {tuple(leaf.shape)}, the model needs {specs[path].shape}"
            )
        return leaf

    params: Params = {path: jnp.asarray(take(path)) for path in _outer_specs(config)}
    params["segments"] = []
    for segment in config.segments:
        tree: Params = {}
        layers = range(segment.start, segment.start + segment.length)
        for path in _block_specs(config, segment):
            parts = [take(f"layers.{layer}.{path}") for layer in layers]
            put_leaf(tree, path, _stack(parts))
        params["segments"].append(tree)
    return params


def unstack_params(config: DecoderConfig, params: Params) -> Mapping[str, Any]:
    """Per-layer leaves by path; a layer is cut out of its stack when it is asked for."""
    return _Unstacked(config, params)


class _Unstacked(Mapping[str, Any]):
    """A lazy view, so that saving a model does not hold it twice."""

    def __init__(self, config: DecoderConfig, params: Params) -> None:
        self._params = params
        self._specs = param_specs(config)
        self._places: dict[str, tuple[int, int, str] | None] = {}
        owner = {
            segment.start + row: (number, row)
            for number, segment in enumerate(config.segments)
            for row in range(segment.length)
        }
        for path in self._specs:
            if path.startswith("layers."):
                _, layer, rest = path.split(".", 2)
                self._places[path] = (*owner[int(layer)], rest)
            else:
                self._places[path] = None

    def __getitem__(self, path: str) -> Any:
        place = self._places[path]
        if place is None:
            return self._params[path]
        segment, row, rest = place
        leaf = self._params["segments"][segment]
        for step in rest.split("."):
            leaf = leaf[step]
        # Where weights lie on a mesh, dead experts may stand behind the model's own.
        own = tuple(slice(0, size) for size in self._specs[path].shape)
        return leaf[(row, *own)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _stack(parts: list[Any]) -> jax.Array:
    """Stacks on the host what is on the host, on the device what is there."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return jnp.asarray(np.stack(parts))
    return jnp.stack(parts)


def put_leaf(tree: Params, path: str, leaf: Any) -> None:
    """Sets tree[a][b]... for path "a.b..."."""
    *steps, last = path.split(".")
    for step in steps:
        tree = tree.setdefault(step, {})
    tree[last] = leaf


def _some(paths: list[str]) -> str:
    """The first few names and how many more there are."""
    if not paths:
        return "nothing"
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"
