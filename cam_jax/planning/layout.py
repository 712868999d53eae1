"""Which mesh a model is planned on: the sizes that were asked for, and sensible others."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from cam_jax.errors import MeshError
from cam_jax.mesh import make_mesh
from cam_jax.models import decoder
from cam_jax.models.config import AttentionConfig, DecoderConfig
from cam_jax.models.sharding import abstract_params
from cam_jax.planning.topology import Topology

# Of a chip's HBM, what weights and cache may take where the mesh is chosen here: the rest is for
# activations. Prefills of 2048 positions a chip were seen to need up to a third.
_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Sizes of the mesh axes, and a sentence on those that were chosen here."""

    data: int
    expert: int
    tensor: int
    chosen: str = ""

    @property
    def token_devices(self) -> int:
        """Chips that hold different sequences."""
        return self.data * self.expert


def build_mesh(sizes: MeshSizes, topology: Topology) -> Mesh:
    """The mesh of all chips of a topology."""
    return make_mesh(
        data=sizes.data, expert=sizes.expert, tensor=sizes.tensor, devices=topology.devices
    )


def choose_sizes(
    config: DecoderConfig,
    topology: Topology,
    *,
    batch: int | None,
    columns: int,
    dtype: DTypeLike,
    data: int | None = None,
    expert: int | None = None,
    tensor: int | None = None,
) -> MeshSizes:
    """Sizes whose product is the number of chips.

    "expert" is the most that divides the number of experts (else the most below it). "tensor" is
    the least with which weights and cache leave room for the rest, so that most chips have tokens
    of their own; "data" is what is left.

    Args:
        batch: sequences, None for one a chip that holds tokens.
        columns: of the cache.
        data, expert, tensor: sizes that were asked for.

    Raises:
        MeshError: no sizes fit the chips, the model and the batch.
    """
    chips = topology.name.chips
    where = f"{topology.name.name} ({chips} chips)"
    for axis, size in (("data", data), ("expert", expert), ("tensor", tensor)):
        if size is not None and (size < 1 or chips % size):
            raise MeshError(f"{axis}={size} does not divide {where}: its chips are all used")
    fixed = math.prod(size for size in (data, expert, tensor) if size is not None)
    if chips % fixed or (None not in (data, expert, tensor) and fixed != chips):
        raise MeshError(
            f"data={data} x expert={expert} x tensor={tensor} makes {fixed}, which does not use "
            f"{where}: leave one size out, or make the product {chips}"
        )
    experts = 1 if config.moe is None else config.moe.router.num_experts
    if expert is not None and expert > experts:
        raise MeshError(
            f"expert={expert} is more than the model's {experts} experts: some chips would hold "
            "none; use fewer, and more on data or tensor"
        )
    options = [
        MeshSizes(data=d, expert=e, tensor=t)
        for e in _divisors(chips)
        for t in _divisors(chips // e)
        for d in [chips // e // t]
        if (expert in (None, e)) and (tensor in (None, t)) and (data in (None, d)) and e <= experts
    ]
    options = [option for option in options if batch is None or batch >= option.token_devices]
    if not options:
        raise MeshError(
            f"a batch of {batch} is smaller than data x expert on {where}: every chip there holds "
            "sequences of its own; send more, or ask for more on tensor"
        )
    reasons: list[str] = []
    fitting: list[tuple[MeshSizes, float]] = []
    for option in options:
        try:
            fitting.append((option, held_bytes(config, option, topology, batch, columns, dtype)))
        except MeshError as error:  # a dimension of the model that "tensor" does not divide
            reasons.append(str(error))
    if not fitting:
        raise MeshError(f"no mesh of {where} fits the model: {reasons[0]}")
    best, _ = max(fitting, key=lambda pair: _preference(pair[0], pair[1], experts, topology))
    named = [
        f"{axis}={size}"
        for axis, size, asked in (
            ("data", best.data, data),
            ("expert", best.expert, expert),
            ("tensor", best.tensor, tensor),
        )
        if asked is None
    ]
    chosen = f"chosen: {', '.join(named)}" if named else ""
    return MeshSizes(data=best.data, expert=best.expert, tensor=best.tensor, chosen=chosen)


def held_bytes(
    config: DecoderConfig,
    sizes: MeshSizes,
    topology: Topology,
    batch: int | None,
    columns: int,
    dtype: DTypeLike,
) -> float:
    """Weights and cache of one chip, in bytes.

    Raises:
        MeshError: the model cannot be divided like that.
    """
    params = abstract_params(config, build_mesh(sizes, topology), dtype=dtype)
    rows = sizes.token_devices if batch is None else batch
    cache = jax.eval_shape(lambda: decoder.init_cache(config, rows, columns, jnp.dtype(dtype)))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    attention = config.attention
    heads = attention.num_kv_heads if isinstance(attention, AttentionConfig) else 1
    spread = sizes.token_devices * (sizes.tensor if heads % sizes.tensor == 0 else 1)
    return shard_bytes(params) + total / spread


def shard_bytes(tree: object) -> int:
    """What one chip holds of arrays that are given by shape, dtype and sharding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _preference(
    sizes: MeshSizes, held: float, experts: int, topology: Topology
) -> tuple[float, bool, int, int]:
    """Larger is better: fits (or misses by least), no dead experts, many experts' devices."""
    chip = topology.name.chip
    room = 0.0 if chip is None else _SHARE * chip.hbm_bytes
    missing = 0.0 if chip is None else max(held - room, 0.0)
    return -missing, experts % sizes.expert == 0, sizes.expert, -sizes.tensor


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
