"""Grouped matmul: rows sorted by expert, each times its own expert's matrix.

M rows (assignments, sorted by expert), D features in, F features out, E experts (groups).

Two lowerings behind one function. `lax.platform_dependent` picks one when the program is lowered,
so that compiling for a TPU on a CPU machine gets the TPU's:

* TPU: `lax.ragged_dot_general`.
* elsewhere `ragged_dot` lowers densely, at E times the work, so: a loop over blocks of rows whose
  trip count follows the real group sizes.

On CPU, XLA converts a whole bfloat16 weight stack to float32 before such a loop, whatever is done
inside of it: prefer float32 weights there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from cam_jax.varying import vary_like, vary_together

# Rows per block, measured in float32 on two CPU cores: 256 and more lose to their idle last rows
# and to cache misses; below 8, reading the weights is what a block costs.
_MOST_ROWS, _LEAST_ROWS = 128, 8


def grouped_matmul(
    lhs: Float[Array, "M D"],
    rhs: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "M F"]:
    """`out[i] = rhs[e] @ lhs[i]` for row i of group e; rows after the last group are 0.

    Differentiable in ``lhs`` and ``rhs``. A NaN stays in its own row (and in its own group's
    gradient). The time follows `sum(ceil(group_sizes / block))`, not E·M.

    Args:
        lhs: rows sorted by group, the first ``group_sizes[0]`` of them those of group 0.
        rhs: one matrix per group, [out, in] as checkpoints store it.
        group_sizes: rows per group; any may be 0. Their sum may be less than M.
        out_dtype: ``lhs.dtype`` if None. Sums are in float32 whatever the dtypes.
    """
    dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    if lhs.shape[0] == 0:
        return jnp.zeros((0, rhs.shape[1]), dtype)
    operands = vary_together(lhs, rhs, group_sizes.astype(jnp.int32))
    return _grouped_matmul(*operands).astype(dtype)


@jax.custom_vjp
def _grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """Float32 [M, F]."""
    return _rows_times_groups(lhs, rhs, group_sizes, transpose=False)


def _forward(lhs: Array, rhs: Array, group_sizes: Array) -> tuple[Array, tuple[Array, ...]]:
    return _grouped_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = saved
    d_lhs = _rows_times_groups(grad, rhs, group_sizes, transpose=True)
    d_rhs = _sum_outer_products(grad, lhs, group_sizes)
    return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


# --- the two products, each with its two lowerings ---


def _rows_times_groups(rows: Array, weights: Array, sizes: Array, *, transpose: bool) -> Array:
    """[M, in] x [E, out, in] -> [M, out]; with ``transpose`` [M, out] x [E, out, in] -> [M, in]."""
    dtype = jnp.promote_types(rows.dtype, weights.dtype)
    return by_platform(
        partial(_rows_times_groups_ragged, transpose=transpose),
        partial(_rows_times_groups_blocked, transpose=transpose),
        rows.astype(dtype),
        weights.astype(dtype),
        sizes,
    )


def _sum_outer_products(left: Array, right: Array, sizes: Array) -> Array:
    """[M, A], [M, B] -> [E, A, B] float32: per group, the sum over its rows of left ⊗ right."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return by_platform(
        _sum_outer_products_ragged,
        _sum_outer_products_blocked,
        left.astype(dtype),
        right.astype(dtype),
        sizes,
    )


def _rows_times_groups_ragged(
    rows: Array, weights: Array, sizes: Array, *, transpose: bool
) -> Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if transpose else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(
        rows, weights, sizes, dimensions, preferred_element_type=jnp.float32
    )
    # What a kernel leaves in rows of no group is not specified.
    return jnp.where(_in_some_group(rows, sizes), out, 0.0)


def _sum_outer_products_ragged(left: Array, right: Array, sizes: Array) -> Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    inside = _in_some_group(left, sizes)
    left, right = jnp.where(inside, left, 0), jnp.where(inside, right, 0)
    return lax.ragged_dot_general(
        left, right, sizes, dimensions, preferred_element_type=jnp.float32
    )


def _in_some_group(rows: Array, sizes: Array) -> Array:
    return (jnp.arange(rows.shape[0], dtype=jnp.int32) < sizes.sum())[:, None]


def _rows_times_groups_blocked(
    rows: Array, weights: Array, sizes: Array, *, transpose: bool
) -> Array:
    contract = (((1,), (0 if transpose else 1,)), ((), ()))

    def body(block: "RowBlock", out: Array) -> Array:
        new = lax.dot_general(
            block.read(rows), weights[block.group], contract, preferred_element_type=jnp.float32
        )
        return block.write(out, new)

    shape = (rows.shape[0], weights.shape[2 if transpose else 1])
    return loop_over_blocks(body, jnp.zeros(shape, jnp.float32), sizes, like=rows)


def _sum_outer_products_blocked(left: Array, right: Array, sizes: Array) -> Array:
    contract = (((0,), (0,)), ((), ()))

    def body(block: "RowBlock", out: Array) -> Array:
        new = lax.dot_general(
            block.read_own(left),
            block.read_own(right),
            contract,
            preferred_element_type=jnp.float32,
        )
        return out.at[block.group].add(new)

    shape = (sizes.shape[0], left.shape[1], right.shape[1])
    return loop_over_blocks(body, jnp.zeros(shape, jnp.float32), sizes, like=left)


# --- what others that work on sorted rows may use too (see experts.py) ---


def by_platform(tpu: Callable, default: Callable, *arrays: Any) -> Any:
    """Calls ``tpu`` or ``default`` with arrays or pytrees of them, whichever is lowered for.

    Under vmap, one after the other: ragged_dot_general cannot be batched, and a batched loop would
    copy its whole state in every step.
    """
    arrays = vary_together(*arrays)

    @sequential_vmap
    def call(*arrays: Any) -> Any:
        return lax.platform_dependent(*arrays, tpu=tpu, default=default)

    return call(*arrays)


class RowBlock:
    """A block of neighbouring rows that starts in one group; some of its rows may be others'."""

    def __init__(self, group: Int[Array, ""], start: Int[Array, ""], own: Bool[Array, " R"]):
        self.group, self.start, self.own = group, start, own

    def read(self, rows: Array) -> Array:
        """[M, ...] -> [R, ...], neighbours' rows included."""
        return lax.dynamic_slice_in_dim(rows, self.start, self.own.shape[0])

    def read_own(self, rows: Array) -> Array:
        """[M, ...] -> [R, ...] with 0 for neighbours' rows (they may hold NaN; 0 · NaN is NaN)."""
        return jnp.where(self.own[:, None], self.read(rows), 0)

    def write(self, out: Array, new: Array) -> Array:
        """Puts the group's rows of ``new`` [R, ...] into ``out`` [M, ...]."""
        new = jnp.where(self.own[:, None], new, self.read(out))
        return lax.dynamic_update_slice_in_dim(out, new, self.start, 0)


def loop_over_blocks(
    body: Callable[[RowBlock, Any], Any], out: Any, sizes: Int[Array, " E"], *, like: Array
) -> Any:
    """Runs `out = body(block, out)` for blocks of rows that cover every group, and no others.

    A block starts inside its group. Near the end of all rows it is moved back to stay in range;
    its ``own`` says which of its rows are the group's.

    Args:
        out: the loop's state, a pytree of arrays.
        sizes: [E] int32 rows per group.
        like: [M, ...], the sorted rows.
    """
    num_rows, num_groups = like.shape[0], sizes.shape[0]
    rows = block_rows(num_rows, num_groups)
    ends = jnp.minimum(jnp.cumsum(sizes), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    counts = (ends - starts + rows - 1) // rows
    done = jnp.cumsum(counts)  # blocks of this group and of those before it

    # One table of all the blocks there can be, so that a step of the loop only reads its entry.
    index = jnp.arange(num_rows // rows + num_groups, dtype=jnp.int32)
    group = (index[:, None] >= done).sum(1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    begin = starts[group] + (index - (done - counts)[group]) * rows
    table = jnp.stack([group, begin, ends[group]], 1).astype(jnp.int32)

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        index, out = state
        group, begin, end = table[index]
        start = jnp.minimum(begin, num_rows - rows)
        row = start + jnp.arange(rows, dtype=jnp.int32)
        return index + 1, body(RowBlock(group, start, (row >= begin) & (row < end)), out)

    out = jax.tree.map(lambda leaf: vary_like(leaf, like), out)
    total = done[-1]
    return lax.while_loop(lambda state: state[0] < total, step, (jnp.zeros_like(total), out))[1]


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: a power of two near the mean group, and never more than there are rows."""
    if num_rows <= num_groups // 2:
        return 1  # a few tokens in decode: most groups that have any row have one
    mean = -(-num_rows // num_groups)
    near = 1 << (mean - 1).bit_length()
    return min(num_rows, max(_LEAST_ROWS, min(_MOST_ROWS, near)))
