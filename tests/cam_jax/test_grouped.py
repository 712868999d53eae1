"""Grouped matmul: any group sizes, on the path that CPUs and GPUs take and on the TPU's."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cam_jax import grouped
from cam_jax.grouped import block_rows, grouped_matmul

M, D, F, E = 40, 5, 3, 4


def reference(lhs, rhs, sizes) -> np.ndarray:
    out, start = np.zeros((len(lhs), rhs.shape[1])), 0
    for e, size in enumerate(sizes):
        out[start : start + size] = np.asarray(lhs)[start : start + size] @ np.asarray(rhs[e]).T
        start += size
    return out


@st.composite
def group_sizes(draw) -> list[int]:
    """Sizes that add up to at most M: skewed, empty, or everything in one group."""
    kind = draw(st.sampled_from(["any", "one group", "full"]))
    if kind == "one group":
        sizes = [0] * E
        sizes[draw(st.integers(0, E - 1))] = draw(st.integers(0, M))
        return sizes
    last = M if kind == "full" else draw(st.integers(0, M))
    cuts = sorted(draw(st.lists(st.integers(0, last), min_size=E - 1, max_size=E - 1)))
    return np.diff([0, *cuts, last]).tolist()


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(M, D)), jnp.float32),
        jnp.asarray(rng.normal(size=(E, F, D)), jnp.float32),
    )


@jax.jit
def run(lhs, rhs, sizes):
    return grouped_matmul(lhs, rhs, sizes)


@jax.jit
def run_gradients(lhs, rhs, sizes, cotangent):
    return jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)[1](cotangent)


@hypothesis.given(sizes=group_sizes())
@hypothesis.example(sizes=[0, 0, 0, 0])
@hypothesis.example(sizes=[0, 0, 0, M])
@hypothesis.example(sizes=[M, 0, 0, 0])
@hypothesis.example(sizes=[M - 1, 0, 1, 0])
@hypothesis.example(sizes=[1, 1, 1, 1])
def test_every_row_meets_its_group_whatever_the_sizes(operands, sizes):
    lhs, rhs = operands
    out = run(lhs, rhs, jnp.asarray(sizes))
    np.testing.assert_allclose(out, reference(lhs, rhs, sizes), atol=1e-5)
    assert not np.asarray(out[sum(sizes) :]).any()


@hypothesis.given(sizes=group_sizes())
@hypothesis.example(sizes=[0, 0, 0, 0])
@hypothesis.example(sizes=[0, 0, M, 0])
def test_gradients_are_those_of_a_sum_over_each_groups_rows(operands, sizes):
    lhs, rhs = operands
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(M, F)), jnp.float32)
    d_lhs, d_rhs = run_gradients(lhs, rhs, jnp.asarray(sizes), cotangent)

    group = np.repeat(np.arange(E + 1), [*sizes, M - sum(sizes)])
    one_hot = (group[:, None] == np.arange(E)).astype(np.float32)
    np.testing.assert_allclose(
        d_lhs, np.einsum("me,mf,efd->md", one_hot, cotangent, rhs), atol=1e-5
    )
    np.testing.assert_allclose(
        d_rhs, np.einsum("me,mf,md->efd", one_hot, cotangent, lhs), atol=1e-5
    )


@pytest.mark.parametrize(
    "sizes", [[10, 0, 25, 3], [0, 0, 0, 0], [0, M, 0, 0]], ids=["some", "none", "one"]
)
def test_the_lowering_for_tpu_computes_the_same(operands, sizes):
    # Its primitive runs on CPU too, only densely.
    lhs, rhs = operands
    sizes = jnp.asarray(sizes, jnp.int32)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(M, F)), jnp.float32)
    pairs = [
        (
            partial(grouped._rows_times_groups_ragged, transpose=False),
            partial(grouped._rows_times_groups_blocked, transpose=False),
            (lhs, rhs),
        ),
        (
            partial(grouped._rows_times_groups_ragged, transpose=True),
            partial(grouped._rows_times_groups_blocked, transpose=True),
            (cotangent, rhs),
        ),
        (
            grouped._sum_outer_products_ragged,
            grouped._sum_outer_products_blocked,
            (cotangent, lhs),
        ),
    ]
    for ragged, blocked, arrays in pairs:
        np.testing.assert_allclose(
            jax.jit(ragged)(*arrays, sizes), jax.jit(blocked)(*arrays, sizes), atol=1e-5
        )


def test_lowering_for_tpu_uses_the_ragged_primitive_and_for_cpu_the_loop(operands):
    # From this CPU machine: `cam-jax plan` compiles for TPUs that are not there.
    lhs, rhs = operands
    traced = run.trace(lhs, rhs, jnp.zeros(E, jnp.int32))
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "ragged_dot" in tpu and "while" not in tpu
    assert "ragged_dot" not in cpu and "while" in cpu


def test_a_nan_row_stays_in_its_own_row_and_group(operands):
    lhs, rhs = operands
    sizes = jnp.asarray([7, 9, 0, 11])
    broken = lhs.at[8].set(jnp.nan)  # of group 1
    out = run(broken, rhs, sizes)
    assert np.isnan(out[8]).all()
    np.testing.assert_array_equal(np.delete(out, 8, 0), np.delete(run(lhs, rhs, sizes), 8, 0))
    _, d_rhs = run_gradients(broken, rhs, sizes, jnp.ones((M, F)))
    assert np.isfinite(d_rhs[jnp.asarray([0, 2, 3])]).all() and np.isnan(d_rhs[1]).any()


def test_rows_past_the_last_group_may_hold_anything(operands):
    lhs, rhs = operands
    sizes = jnp.asarray([3, 0, 4, 2])
    rest = lhs.at[9:].set(jnp.nan)
    out = run(rest, rhs, sizes)
    assert np.isfinite(out).all()
    for gradient in run_gradients(rest, rhs, sizes, jnp.ones((M, F))):
        assert np.isfinite(gradient).all()


def test_bfloat16_is_summed_in_float32():
    features = 4096  # a bfloat16 running sum of ones stops growing at 256
    lhs = jnp.ones((2, features), jnp.bfloat16)
    rhs = jnp.ones((1, 1, features), jnp.bfloat16)
    out = grouped_matmul(lhs, rhs, jnp.asarray([2]))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), features)
    assert grouped_matmul(lhs, rhs, jnp.asarray([2]), out_dtype=jnp.float32).dtype == jnp.float32


def test_mixed_dtypes_and_no_rows_at_all(operands):
    lhs, rhs = operands
    sizes = jnp.asarray([1, 2, 3, 4])
    out = grouped_matmul(lhs.astype(jnp.bfloat16), rhs, sizes)
    assert out.dtype == jnp.bfloat16
    assert grouped_matmul(lhs[:0], rhs, jnp.zeros(E, jnp.int32)).shape == (0, F)


def test_it_can_be_mapped_over(operands):
    lhs, rhs = operands
    sizes = jnp.asarray([[1, 2, 3, 4], [0, 40, 0, 0]])
    out = jax.jit(jax.vmap(grouped_matmul, in_axes=(None, None, 0)))(lhs, rhs, sizes)
    for row, size in zip(out, sizes, strict=True):
        np.testing.assert_allclose(row, reference(lhs, rhs, size), atol=1e-5)


def test_under_shard_map_with_checked_axes(operands, devices):
    lhs, rhs = operands
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2]
    )
    sizes = jnp.asarray([[3, 0, 9, 1], [0, 0, 20, 0]], jnp.int32)
    local = jax.shard_map(
        lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes[0]),
        mesh=mesh,
        in_specs=(P("x"), P(), P("x")),
        out_specs=P("x"),
    )
    out = jax.jit(local)(lhs, rhs, sizes)
    halves = [reference(lhs[i * 20 : i * 20 + 20], rhs, sizes[i]) for i in range(2)]
    np.testing.assert_allclose(out, np.concatenate(halves), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [(1, 64, 1), (32, 64, 1), (33, 64, 8), (4, 4, 4), (1024, 32, 32), (8192, 32, 128), (10, 1, 10)],
)
def test_blocks_are_near_the_mean_group_and_never_larger_than_all_rows(rows, groups, expected):
    assert block_rows(rows, groups) == expected
