"""Expert weights and the SwiGLU feed-forward network, on slot buffers and on sorted rows.

Weights are [out, in], as Hugging Face stores them, so that loading never transposes. Sums are in
float32 whatever the dtype; results come back in the dtype of the activations. The routed experts'
weights may be int8 (`cam_jax.quantized`): they are then constants, and only ``x`` has a gradient.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from cam_jax.errors import InputError
from cam_jax.grouped import RowBlock, by_platform, grouped_matmul, loop_over_blocks
from cam_jax.quantized import QuantizedWeight
from cam_jax.varying import vary_together

Weight = Array | QuantizedWeight
Leaf = Any  # an array, or what a tree transformation (axes, specs, shardings) puts in its place


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """SwiGLU weights of all experts: gate [E, F, D], up [E, F, D], down [E, D, F].

    Arrays, or `QuantizedWeight`s of these shapes, all three of one kind.
    """

    gate: Leaf
    up: Leaf
    down: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """An expert that every token visits: gate [F, D], up [F, D], down [D, F].

    ``router`` [1, D], where given, scales its output by sigmoid(router · x) (Qwen2-MoE's
    `shared_expert_gate`).
    """

    gate: Leaf
    up: Leaf
    down: Leaf
    router: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoEParams:
    """Parameters of one MoE layer.

    Attributes:
        router: [E, D].
        experts: all experts' weights.
        bias: [E], added to the scores for selection only (DeepSeek-V3), or None.
        shared: shared experts as one wide expert, or None.
    """

    router: Leaf
    experts: ExpertWeights
    bias: Leaf | None = None
    shared: SharedExpert | None = None


def check_shapes(params: MoEParams, features: int) -> None:
    """Refuses expert weights that do not fit each other or D features.

    Raises:
        InputError: names the weight and both shapes.
    """
    experts, shared = params.experts, params.shared
    count, hidden = experts.gate.shape[0], experts.gate.shape[1:2]
    expected = {
        "experts.gate": (experts.gate, (count, *hidden, features)),
        "experts.up": (experts.up, (count, *hidden, features)),
        "experts.down": (experts.down, (count, features, *hidden)),
    }
    if shared is not None:
        wide = shared.gate.shape[:1]
        expected |= {
            "shared.gate": (shared.gate, (*wide, features)),
            "shared.up": (shared.up, (*wide, features)),
            "shared.down": (shared.down, (features, *wide)),
        }
        if shared.router is not None:
            expected["shared.router"] = (shared.router, (1, features))
    kinds = {isinstance(w, QuantizedWeight) for w in (experts.gate, experts.up, experts.down)}
    if len(kinds) > 1:
        raise InputError("params.experts: some weights are quantised, others are not; make all so")
    for name, (leaf, shape) in list(expected.items()):
        if isinstance(leaf, QuantizedWeight):
            expected[f"{name}.scale"] = (leaf.scale, shape[:-1])
    for name, (leaf, shape) in expected.items():
        if leaf.shape != shape:
            raise InputError(f"params.{name} has shape {leaf.shape}: expected {shape}")


def swiglu(
    x: Float[Array, "T D"],
    gate: Float[Array, "F D"] | QuantizedWeight,
    up: Float[Array, "F D"] | QuantizedWeight,
    down: Float[Array, "D F"] | QuantizedWeight,
) -> Float[Array, "T D"]:
    """`down · (silu(gate · x) * (up · x))` for every row, float32."""
    hidden = jax.nn.silu(_times(x, gate)) * _times(x, up)
    return _times(hidden.astype(x.dtype), down)


def expert_buffers(x: Float[Array, "E C D"], experts: ExpertWeights) -> Float[Array, "E C D"]:
    """Every expert on its own slots: one batched matmul per weight. Empty slots stay 0."""
    weights = (experts.gate, experts.up, experts.down)
    if isinstance(experts.gate, QuantizedWeight):
        # A TPU converts int8 inside the matmul; others would first write all experts as floats.
        return lax.platform_dependent(
            *vary_together(x, *weights), tpu=_buffers_batched, default=_buffers_one_by_one
        )
    return _buffers_batched(x, *weights)


def _buffers_batched(x: Array, gate: Weight, up: Weight, down: Weight) -> Array:
    return jax.vmap(swiglu)(x, gate, up, down).astype(x.dtype)


def _buffers_one_by_one(x: Array, gate: Weight, up: Weight, down: Weight) -> Array:
    return lax.map(lambda one: swiglu(*one).astype(x.dtype), (x, gate, up, down))


def expert_rows(
    x: Float[Array, "M D"], experts: ExpertWeights, group_sizes: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """Every row through its own expert; rows sorted by expert, ``group_sizes`` rows each.

    The work follows the rows there are (`grouped_matmul`). Rows after the last group give 0. The
    hidden activations are computed again in the backward pass, not stored.
    """
    if x.shape[0] == 0:
        return x
    return _expert_rows(*vary_together(x, experts, group_sizes.astype(jnp.int32)))


def shared_expert(x: Float[Array, "T D"], shared: SharedExpert) -> Float[Array, "T D"]:
    """The shared expert's output, scaled by its own sigmoid gate where it has one."""
    out = swiglu(x, shared.gate, shared.up, shared.down)
    if shared.router is not None:
        out = out * jax.nn.sigmoid(_times(x, shared.router))
    return out.astype(x.dtype)


def _times(x: Array, weight: Weight) -> Array:
    """[T, in] x [out, in] -> [T, out] float32."""
    if isinstance(weight, QuantizedWeight):
        return _times(x, weight.values) * lax.stop_gradient(weight.scale)
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    return lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


# --- sorted rows: three grouped matmuls on TPU; elsewhere one loop that does all three per block,
# --- so that a block's hidden activations never leave the cache (1.5 times as fast on two cores)


# Up to so many rows a chip reads an expert's weights for longer than it takes to multiply all rows
# by it: peak FLOP per byte of HBM is 166 on v5p and 240 on v5e (`cam_jax.planning.chips`).
_FEW_ROWS = 256


@jax.custom_vjp
def _expert_rows(x: Array, experts: ExpertWeights, sizes: Array) -> Array:
    weights = (experts.gate, experts.up, experts.down)
    return by_platform(_rows_ragged, _rows_blocked, x, *weights, sizes)


def _expert_rows_forward(x: Array, experts: ExpertWeights, sizes: Array) -> tuple[Array, Any]:
    return _expert_rows(x, experts, sizes), (x, experts, sizes)


def _expert_rows_backward(saved: Any, grad: Array) -> tuple[Array, ExpertWeights | None, None]:
    x, experts, sizes = saved
    weights = (experts.gate, experts.up, experts.down)
    d_x, *d_weights = by_platform(
        _rows_ragged_backward, _rows_blocked_backward, x, *weights, sizes, grad
    )
    if not d_weights:
        return d_x, None, None
    d_gate, d_up, d_down = d_weights
    return d_x, ExpertWeights(gate=d_gate, up=d_up, down=d_down), None


_expert_rows.defvjp(_expert_rows_forward, _expert_rows_backward)


def _rows_ragged(x: Array, gate: Weight, up: Weight, down: Weight, sizes: Array) -> Array:
    if x.shape[0] <= _FEW_ROWS:
        return _rows_by_all(x, gate, up, down, sizes)

    def times(rows: Array, weights: Weight) -> Array:
        if isinstance(weights, QuantizedWeight):
            # Rows after the last group get some scale too; their product is 0.
            scale = jnp.repeat(weights.scale, sizes, axis=0, total_repeat_length=rows.shape[0])
            return times(rows, weights.values.astype(rows.dtype)) * scale
        return grouped_matmul(rows, weights, sizes, out_dtype=jnp.float32)

    hidden = jax.nn.silu(times(x, gate)) * times(x, up)
    return times(hidden.astype(x.dtype), down).astype(x.dtype)


def _rows_by_all(x: Array, gate: Weight, up: Weight, down: Weight, sizes: Array) -> Array:
    """Every row through all experts, as zeros through those that are not its own: they give zeros.

    A ragged matmul wants its weights [E, in, out], and XLA would turn the weights of all layers
    around once more in memory before a decode loop (compiled for v5e:4x4, Mixtral 8x7B: 5.6 GB per
    chip).
    """
    experts = jnp.arange(gate.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    own = jnp.searchsorted(ends, row, side="right") == experts[:, None]
    return _buffers_batched(jnp.where(own[..., None], x, 0), gate, up, down).sum(0)


def _rows_ragged_backward(
    x: Array, gate: Weight, up: Weight, down: Weight, sizes: Array, grad: Array
) -> tuple[Array, ...]:
    def forward(x: Array, *weights: Weight) -> Array:
        own_gate, own_up, own_down = weights or (gate, up, down)
        return _rows_ragged(x, own_gate, own_up, own_down, sizes)

    return jax.vjp(forward, x, *_trained(gate, up, down))[1](grad)


def _rows_blocked(x: Array, gate: Weight, up: Weight, down: Weight, sizes: Array) -> Array:
    def body(block: RowBlock, out: Array) -> Array:
        e = block.group
        return block.write(out, swiglu(block.read(x), gate[e], up[e], down[e]).astype(x.dtype))

    return loop_over_blocks(body, jnp.zeros_like(x), sizes, like=x)


def _rows_blocked_backward(
    x: Array, gate: Weight, up: Weight, down: Weight, sizes: Array, grad: Array
) -> tuple[Array, ...]:
    trained = _trained(gate, up, down)

    def body(block: RowBlock, out: tuple[Array, ...]) -> tuple[Array, ...]:
        e = block.group

        def forward(rows: Array, *weights: Array) -> Array:
            return swiglu(rows, *(weights or (gate[e], up[e], down[e])))

        _, pull = jax.vjp(forward, block.read_own(x), *(w[e] for w in trained))
        d_rows, *d_weights = pull(block.read_own(grad).astype(jnp.float32))
        d_x, *sums = out
        sums = [total.at[e].add(part) for total, part in zip(sums, d_weights, strict=True)]
        return block.write(d_x, d_rows), *sums

    start = (jnp.zeros_like(x), *(jnp.zeros(w.shape, jnp.float32) for w in trained))
    d_x, *sums = loop_over_blocks(body, start, sizes, like=x)
    return d_x, *(total.astype(w.dtype) for total, w in zip(sums, trained, strict=True))


def _trained(*weights: Weight) -> tuple[Array, ...]:
    """The weights that have a gradient: all, or none where they are quantised."""
    return tuple(w for w in weights if not isinstance(w, QuantizedWeight))
