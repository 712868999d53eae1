"""Where every parameter lies on a mesh: dimensions have names, and names have mesh axes.

A dimension of a parameter is named once, in `AXES_OF`; `ShardingRules` says which mesh axis a name
is divided over. Attention is data parallel over data x expert (its weights are copies there) and
its heads lie over "tensor", as do the hidden features of every feed-forward layer and the
vocabulary; experts lie over "expert". Parameters here go by their path in a model
(`models.params.param_specs`), without the number of the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from cam_jax import expert_parallel
from cam_jax.errors import MeshError
from cam_jax.mesh import EXPERT, TENSOR
from cam_jax.models.config import AttentionConfig, DecoderConfig
from cam_jax.models.params import Params, map_params, stacked_specs

Axes = tuple[str | None, ...]

# Path -> the name of each dimension; None is never divided.
AXES_OF: Mapping[str, Axes] = {
    "embed": ("vocab", None),
    "lm_head": ("vocab", None),
    "final_norm": (None,),
    "attn_norm": (None,),
    "ffn_norm": (None,),
    "attn.q": ("heads", None),
    "attn.k": ("kv_heads", None),
    "attn.v": ("kv_heads", None),
    "attn.o": (None, "heads"),
    "attn.q_bias": ("heads",),
    "attn.k_bias": ("kv_heads",),
    "attn.v_bias": ("kv_heads",),
    "attn.o_bias": (None,),
    # Of all heads together or of one: in either case small, and needed whole by a norm over all.
    "attn.q_norm": (None,),
    "attn.k_norm": (None,),
    # Latent attention: the latents are shared by all heads.
    "attn.q_a": (None, None),
    "attn.q_a_norm": (None,),
    "attn.q_a_bias": (None,),
    "attn.q_b": ("heads", None),
    "attn.kv_a": (None, None),
    "attn.kv_a_norm": (None,),
    "attn.kv_a_bias": (None,),
    "attn.kv_b": ("heads", None),
    "mlp.gate": ("hidden", None),
    "mlp.up": ("hidden", None),
    "mlp.down": (None, "hidden"),
    # Every device routes its own tokens among all experts.
    "moe.router": (None, None),
    "moe.bias": (None,),
    "moe.experts.gate": ("expert", "expert_hidden", None),
    "moe.experts.up": ("expert", "expert_hidden", None),
    "moe.experts.down": ("expert", None, "expert_hidden"),
    # Of int8 experts: one scale per output feature.
    "moe.experts.gate_scale": ("expert", "expert_hidden"),
    "moe.experts.up_scale": ("expert", "expert_hidden"),
    "moe.experts.down_scale": ("expert", None),
    "moe.shared.gate": ("shared_hidden", None),
    "moe.shared.up": ("shared_hidden", None),
    "moe.shared.down": (None, "shared_hidden"),
    "moe.shared.router": (None, None),
}

# Where a mesh axis does not divide one of these, every device holds a copy: right all the same.
OPTIONAL = frozenset({"vocab", "heads", "kv_heads", "hidden"})


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Which mesh axis a named dimension is divided over.

    Attributes:
        axes: pairs (name of a dimension, mesh axis).

    Raises:
        MeshError: a name twice, a name that no parameter has, an axis that meshes do not have, or
            two dimensions of one parameter over the same axis.
    """

    axes: tuple[tuple[str, str], ...] = (
        ("vocab", TENSOR),
        ("heads", TENSOR),
        ("kv_heads", TENSOR),
        ("hidden", TENSOR),
        ("shared_hidden", TENSOR),
        ("expert", EXPERT),
        ("expert_hidden", TENSOR),
    )
    axis_of: Mapping[str, str] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        pairs = self.axes
        if not isinstance(pairs, tuple | list) or not all(
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(part, str) for part in pair)
            for pair in pairs
        ):
            raise MeshError(
                f"sharding rules {pairs!r}: expected pairs (name of a dimension, mesh axis)"
            )
        object.__setattr__(self, "axes", tuple((name, axis) for name, axis in pairs))
        names = [name for name, _ in self.axes]
        known = {name for axes in AXES_OF.values() for name in axes if name is not None}
        for name, axis in self.axes:
            if name not in known:
                raise MeshError(
                    f"sharding rule {name!r} -> {axis!r} matches no parameter: dimensions are "
                    f"{', '.join(sorted(known))}"
                )
            if names.count(name) > 1:
                raise MeshError(f"there are {names.count(name)} sharding rules for {name!r}")
            if axis not in (EXPERT, TENSOR):
                raise MeshError(
                    f"sharding rule {name!r} -> {axis!r}: weights are divided over {EXPERT!r} or "
                    f"{TENSOR!r}"
                )
        object.__setattr__(self, "axis_of", dict(self.axes))
        for path, dimensions in AXES_OF.items():
            used = [axis for name, axis in self.axes if name in dimensions]
            if len(set(used)) < len(used):
                raise MeshError(
                    f"sharding rules divide two dimensions of {path} {dimensions} over one mesh "
                    f"axis: {used}"
                )

    def spec(self, path: str, sizes: Mapping[str, int], mesh: Mesh) -> PartitionSpec:
        """How a parameter is divided.

        Args:
            path: without the layer's number.
            sizes: what has to divide evenly, by name of the dimension (heads, not features).
            mesh: of `cam_jax.make_mesh`.

        Raises:
            MeshError: a parameter without a rule, or a dimension that cannot be divided.
        """
        if path not in AXES_OF:
            raise MeshError(f"no sharding rule matches the parameter {path!r}: add it to AXES_OF")
        return PartitionSpec(*(self._axis(path, name, sizes, mesh) for name in AXES_OF[path]))

    def _axis(
        self, path: str, name: str | None, sizes: Mapping[str, int], mesh: Mesh
    ) -> str | None:
        axis = None if name is None else self.axis_of.get(name)
        if name is None or axis is None or sizes[name] % mesh.shape[axis] == 0:
            return axis
        if name in OPTIONAL:
            return None
        raise MeshError(
            f"{axis}={mesh.shape[axis]} does not divide the {sizes[name]} of {name!r} in {path}"
        )


RULES = ShardingRules()


def dimension_sizes(config: DecoderConfig, mesh: Mesh) -> dict[str, int]:
    """What has to divide evenly: heads, hidden features, vocabulary, and the padded experts."""
    a = config.attention
    moe = config.moe
    return {
        "vocab": config.vocab_size,
        "heads": a.num_heads,
        "kv_heads": a.num_kv_heads if isinstance(a, AttentionConfig) else 1,
        "hidden": config.mlp_size,
        "shared_hidden": 0 if moe is None else moe.shared_size,
        "expert": padded_experts(config, mesh),
        "expert_hidden": 0 if moe is None else moe.expert_size,
    }


def padded_experts(config: DecoderConfig, mesh: Mesh | None) -> int:
    """Experts, on a mesh with the dead ones that make them divide; 0 without any."""
    if config.moe is None:
        return 0
    router = config.moe.router
    return router.num_experts if mesh is None else expert_parallel.padded_experts(router, mesh)


def param_shardings(config: DecoderConfig, mesh: Mesh, rules: ShardingRules = RULES) -> Params:
    """The sharding of every leaf of the tree that `decoder.forward` takes.

    Raises:
        MeshError: a parameter without a rule, or a mesh the model cannot be divided over.
    """
    sizes = dimension_sizes(config, mesh)

    def sharding(path: str, spec: jax.ShapeDtypeStruct) -> NamedSharding:
        inner = _without_segment(path)
        parts = rules.spec(inner, sizes, mesh)
        # The leading axis of a stack is its layers.
        stacked = inner != path
        return NamedSharding(mesh, PartitionSpec(None, *parts) if stacked else parts)

    return map_params(sharding, stacked_specs(config))


def abstract_params(
    config: DecoderConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    rules: ShardingRules = RULES,
) -> Params:
    """Shapes, dtypes and shardings of the tree, for compiling without weights.

    Args:
        dtype: of every leaf but the selection bias, which is float32, and int8 experts.
    """
    experts = padded_experts(config, mesh)

    def leaf(path: str, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        fixed = spec.dtype == jnp.int8 or path.endswith(("moe.bias", "_scale"))
        return jax.ShapeDtypeStruct(
            padded_shape(_without_segment(path), spec.shape, experts),
            spec.dtype if fixed else jnp.dtype(dtype),
        )

    abstract = map_params(leaf, stacked_specs(config))
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),
        abstract,
        param_shardings(config, mesh, rules),
    )


def padded_shape(path: str, shape: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """A leaf's shape with so many experts, stacked ([layers, ...]) or not."""
    axes = AXES_OF.get(path, ())
    if "expert" not in axes:
        return shape
    axis = len(shape) - len(axes) + axes.index("expert")
    return (*shape[:axis], experts, *shape[axis + 1 :])


def shard_params(
    config: DecoderConfig, params: Params, mesh: Mesh, rules: ShardingRules = RULES
) -> Params:
    """Parameters placed on a mesh, dead experts (zeros) added; what lies there already stays.

    For weights that fit on one device; `cam_jax.load(..., mesh=mesh)` reads each device's part.
    """
    experts = padded_experts(config, mesh)

    def place(path: str, leaf: Any, sharding: NamedSharding) -> Array:
        shape = padded_shape(_without_segment(path), leaf.shape, experts)
        missing = [(0, new - old) for new, old in zip(shape, leaf.shape, strict=True)]
        if any(after for _, after in missing):
            leaf = jnp.pad(leaf, missing)
        return jax.device_put(leaf, sharding)

    return map_params(place, params, param_shardings(config, mesh, rules))


def _without_segment(path: str) -> str:
    """ "segments.0.attn.q" -> "attn.q"; paths outside of segments as they are."""
    return path.split(".", 2)[2] if path.startswith("segments.") else path
