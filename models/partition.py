"""Where activations lie on a mesh: sequences over data x expert, heads and features over "tensor".

Model code runs on Auto axes: it says here and there where an array should lie, and the compiler
divides the work and puts the few reductions in. An axis that does not divide its dimension is left
out, which costs memory and changes no result.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from cam_jax.mesh import TENSOR, TOKENS, token_devices


def constrain(
    x: Shaped[Array, "B *rest"], mesh: Mesh | None, *rest: str | None
) -> Shaped[Array, "B *rest"]:
    """``x`` with its sequences where they belong, and the following dimensions over ``rest``."""
    if mesh is None:
        return x
    return _placed(x, mesh, _rows(x.shape[0], mesh), *rest)


def constrain_entry(
    entry: Shaped[Array, "L B heads S dim"], mesh: Mesh | None
) -> Shaped[Array, "L B heads S dim"]:
    """A cached array where its sequences and heads are."""
    if mesh is None:
        return entry
    return _placed(entry, mesh, None, _rows(entry.shape[1], mesh), TENSOR)


def readable(tree: Any, mesh: Mesh | None) -> Any:
    """Every leaf whole on every device where a mesh spans processes, so that each can read it."""
    if mesh is None or not mesh.is_multi_process:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def _rows(count: int, mesh: Mesh) -> tuple[str, ...] | None:
    return TOKENS if count % token_devices(mesh) == 0 else None


def _placed(x: Array, mesh: Mesh, *axes: str | tuple[str, ...] | None) -> Array:
    fitting = [
        axis if not isinstance(axis, str) or size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, x.shape, strict=False)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*fitting)))
