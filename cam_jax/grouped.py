"""Grouped matmul: rows sorted by expert, each times its own expert's matrix.

Dimensions: M rows (assignments of tokens to experts, sorted by expert), D features in, F features out, E experts.

Two lowerings behind one function, chosen when the program is lowered (so compiling for a TPU on a CPU machine gets
the TPU's):

* TPU: `lax.ragged_dot_general`.
* elsewhere: a loop over blocks of rows whose trip count follows the real group sizes. `ragged_dot` lowers densely
  there: E times the work.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from cam_jax.varying import vary_like

_MAX_BLOCK = 128  # rows; larger blocks gain nothing on a CPU core and waste more of an expert's last block
_MIN_BLOCK = 8  # below this a block is bound by reading its weights, so more rows cost next to nothing


def grouped_matmul(
    lhs: Float[Array, "M D"],
    rhs: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "M F"]:
    """`out[i] = rhs[e] @ lhs[i]` where row i belongs to group e; rows after the last group are 0.

    Args:
        lhs: rows sorted by group: the first `group_sizes[0]` rows belong to group 0, and so on.
        rhs: one matrix per group, [out, in] as checkpoints store it.
        group_sizes: rows of each group; any may be 0; their sum is at most M (rows beyond M are ignored).
        out_dtype: dtype of the result, `lhs.dtype` if None. Products are accumulated in float32 always.

    Differentiable in `lhs` and `rhs`. The time follows `sum(ceil(group_sizes / block))`, not E·M.
    """
    dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    if lhs.shape[0] == 0:
        return jnp.zeros((0, rhs.shape[1]), dtype)
    return _grouped_matmul(dtype, lhs, rhs, group_sizes.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(dtype, lhs, rhs, group_sizes):
    return _rows_times_groups(lhs, rhs, group_sizes, transpose=False).astype(dtype)


def _forward(dtype, lhs, rhs, group_sizes):
    return _grouped_matmul(dtype, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(dtype, residuals, grad):
    lhs, rhs, group_sizes = residuals
    grad = grad.astype(jnp.promote_types(lhs.dtype, jnp.bfloat16))
    d_lhs = _rows_times_groups(grad, rhs, group_sizes, transpose=True).astype(lhs.dtype)
    d_rhs = _outer_by_group(grad, lhs, group_sizes).astype(rhs.dtype)
    return d_lhs, d_rhs, None


_grouped_matmul.defvjp(_forward, _backward)


# --- the two products, each with its two lowerings ----------------------------------------------------------------


def _rows_times_groups(rows, weights, group_sizes, *, transpose: bool):
    """[M, in] x [E, out, in] -> [M, out] float32; with `transpose` [M, out] x [E, out, in] -> [M, in]."""
    rows = vary_like(rows, weights, group_sizes)
    weights = vary_like(weights, rows)
    group_sizes = vary_like(group_sizes, rows)
    return lax.platform_dependent(
        rows,
        weights,
        group_sizes,
        tpu=partial(_rows_times_groups_ragged, transpose=transpose),
        default=partial(_rows_times_groups_blocked, transpose=transpose),
    )


def _outer_by_group(left, right, group_sizes):
    """[M, A] and [M, B] -> [E, A, B] float32: the sum over each group's rows of left ⊗ right."""
    left = vary_like(left, right, group_sizes)
    right = vary_like(right, left)
    group_sizes = vary_like(group_sizes, left)
    return lax.platform_dependent(left, right, group_sizes, tpu=_outer_ragged, default=_outer_blocked)


def _rows_times_groups_ragged(rows, weights, group_sizes, *, transpose: bool):
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if transpose else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(rows, weights, group_sizes, dims, preferred_element_type=jnp.float32)
    inside = jnp.arange(rows.shape[0]) < group_sizes.sum()
    return jnp.where(inside[:, None], out, 0)  # what the kernel leaves there is not specified


def _outer_ragged(left, right, group_sizes):
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    inside = (jnp.arange(left.shape[0]) < group_sizes.sum())[:, None]
    left, right = jnp.where(inside, left, 0), jnp.where(inside, right, 0)
    return lax.ragged_dot_general(left, right, group_sizes, dims, preferred_element_type=jnp.float32)


def _rows_times_groups_blocked(rows, weights, group_sizes, *, transpose: bool):
    width = weights.shape[2 if transpose else 1]

    def body(group, start, own, out):
        block = lax.dynamic_slice_in_dim(rows, start, own.shape[0])
        matrix = lax.dynamic_index_in_dim(weights, group, keepdims=False)
        contract = (((1,), (0 if transpose else 1,)), ((), ()))
        new = lax.dot_general(block, matrix, contract, preferred_element_type=jnp.float32)
        old = lax.dynamic_slice_in_dim(out, start, own.shape[0])
        return lax.dynamic_update_slice_in_dim(out, jnp.where(own[:, None], new, old), start, 0)

    out = vary_like(jnp.zeros((rows.shape[0], width), jnp.float32), rows)
    return _loop_over_blocks(body, out, group_sizes, rows.shape[0])


def _outer_blocked(left, right, group_sizes):
    def body(group, start, own, out):
        # Both sides are masked: a neighbour's row may hold NaN, and 0 · NaN is not 0.
        a = jnp.where(own[:, None], lax.dynamic_slice_in_dim(left, start, own.shape[0]), 0)
        b = jnp.where(own[:, None], lax.dynamic_slice_in_dim(right, start, own.shape[0]), 0)
        new = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return out.at[group].add(new, mode="promise_in_bounds")

    shape = (group_sizes.shape[0], left.shape[1], right.shape[1])
    out = vary_like(jnp.zeros(shape, jnp.float32), left)
    return _loop_over_blocks(body, out, group_sizes, left.shape[0])


def _loop_over_blocks(body: Callable, out, group_sizes, num_rows: int):
    """Run `body(group, start, own [block] bool, out) -> out` over blocks of rows that cover every group.

    A block starts inside its group; near the end of all rows it is moved back so as to stay in range. `own` says
    which of its rows are the group's, so no block touches a neighbour's rows.
    """
    block = block_rows(num_rows, group_sizes.shape[0])
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    blocks_until = jnp.cumsum((ends - starts + block - 1) // block)  # of this group and all before it

    # One table for all blocks there can be, so that a step of the loop only reads its entry.
    index = jnp.arange(num_rows // block + group_sizes.shape[0], dtype=jnp.int32)
    groups = jnp.searchsorted(blocks_until, index, side="right", method="compare_all").astype(jnp.int32)
    groups = jnp.minimum(groups, group_sizes.shape[0] - 1)
    begins = ends[groups] - (ends - starts)[groups] + (index - (blocks_until - (ends - starts + block - 1) // block)[groups]) * block
    table = jnp.stack([groups, begins, ends[groups]], axis=1)

    def step(state):
        index, out = state
        group, begin, end = table[index]
        start = jnp.minimum(begin, num_rows - block)
        row = start + jnp.arange(block, dtype=jnp.int32)
        return index + 1, body(group, start, (row >= begin) & (row < end), out)

    total = blocks_until[-1]
    return lax.while_loop(lambda state: state[0] < total, step, (jnp.zeros_like(total), out))[1]


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows per block: near the mean group, a power of two in 8..128, never more than there are rows."""
    mean = max(1, num_rows // num_groups)
    return min(num_rows, max(_MIN_BLOCK, min(_MAX_BLOCK, 1 << (mean - 1).bit_length())))
