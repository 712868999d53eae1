"""Bytes per device on a mesh of given sizes, from shapes alone: there need be no such devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cam_jax.errors import MeshError
from cam_jax.mesh import EXPERT, TENSOR
from cam_jax.models.block import cache_entries
from cam_jax.models.config import AttentionConfig, DecoderConfig
from cam_jax.models.params import param_specs
from cam_jax.models.sharding import AXES_OF, OPTIONAL, RULES, padded_shape

# Beginning of a leaf's path without its layer -> what it is counted as; the first that fits.
KINDS = (
    ("moe.experts.", "experts"),
    ("moe.shared.", "shared experts and dense layers"),
    ("mlp.", "shared experts and dense layers"),
    ("attn.", "attention"),
    ("embed", "embeddings"),
    ("lm_head", "embeddings"),
    ("", "norms and routers"),
)


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Devices along each axis of a mesh."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "expert", "tensor"):
            if getattr(self, axis) < 1:
                raise MeshError(f"{axis}={getattr(self, axis)}: a mesh axis has at least 1 device")

    @property
    def devices(self) -> int:
        return self.data * self.expert * self.tensor


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one device holds.

    Attributes:
        mesh: the sizes.
        weights: kind -> bytes.
        dead_experts: experts per layer that are there only so that experts divide.
        replicated: dimensions that a mesh axis does not divide, so that every device has them all.
        cache_per_token: bytes of keys and values, all layers, per position of a sequence; a
            sequence lies on one device of data x expert.
    """

    mesh: MeshSizes
    weights: Mapping[str, int]
    dead_experts: int
    replicated: tuple[str, ...]
    cache_per_token: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


def kind_of(path: str) -> str:
    """What a leaf is counted as; path without the layer."""
    return next(kind for start, kind in KINDS if path.startswith(start))


def without_layer(path: str) -> str:
    """ "layers.3.attn.q" -> "attn.q"; paths outside of the layers as they are."""
    return path.split(".", 2)[2] if path.startswith("layers.") else path


def footprint(
    config: DecoderConfig, types: Mapping[str, np.dtype], mesh: MeshSizes, *, cache: np.dtype
) -> Footprint:
    """What a model takes on a mesh.

    Args:
        types: of every leaf of `param_specs`, by path.
        mesh: its sizes.
        cache: type of keys and values.

    Raises:
        MeshError: a dimension that must be divided and cannot be, fewer experts than devices.
    """
    along = {EXPERT: mesh.expert, TENSOR: mesh.tensor}
    sizes = _sizes(config, mesh)
    weights = {kind: 0 for _, kind in KINDS}
    replicated: dict[str, None] = {}
    for path, spec in param_specs(config).items():
        inner = without_layer(path)
        share = 1
        for name in AXES_OF[inner]:
            axis = None if name is None else RULES.axis_of.get(name)
            if name is None or axis is None:
                continue
            if sizes[name] % along[axis] == 0:
                share *= along[axis]
            elif name in OPTIONAL:
                replicated[f"{axis}={along[axis]} does not divide {sizes[name]} {name}"] = None
            else:
                raise MeshError(
                    f"{axis}={along[axis]} does not divide the {sizes[name]} of {name!r} in {inner}"
                )
        whole = math.prod(padded_shape(inner, tuple(spec.shape), sizes["expert"]))
        weights[kind_of(inner)] += whole // share * types[path].itemsize
    return Footprint(
        mesh=mesh,
        weights={kind: size for kind, size in weights.items() if size},
        dead_experts=0 if config.moe is None else sizes["expert"] - config.moe.router.num_experts,
        replicated=tuple(replicated),
        cache_per_token=_cache_per_token(config, mesh) * cache.itemsize,
    )


def _sizes(config: DecoderConfig, mesh: MeshSizes) -> dict[str, int]:
    a, moe = config.attention, config.moe
    experts = 0 if moe is None else moe.router.num_experts
    if moe is not None and experts < mesh.expert:
        raise MeshError(
            f"expert={mesh.expert} devices for {experts} experts: some would hold none; use fewer, "
            "and more on 'data'"
        )
    return {
        "vocab": config.vocab_size,
        "heads": a.num_heads,
        "kv_heads": a.num_kv_heads if isinstance(a, AttentionConfig) else 1,
        "hidden": config.mlp_size,
        "shared_hidden": 0 if moe is None else moe.shared_size,
        "expert": -(-experts // mesh.expert) * mesh.expert,
        "expert_hidden": 0 if moe is None else moe.expert_size,
    }


def _cache_per_token(config: DecoderConfig, mesh: MeshSizes) -> int:
    """Numbers per position on one device; heads lie over "tensor" where it divides them."""
    entries = cache_entries(config).values()
    return config.num_layers * sum(
        heads // (mesh.tensor if heads % mesh.tensor == 0 else 1) * features
        for heads, features in entries
    )
