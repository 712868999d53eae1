"""SwiGLU on slot buffers and on sorted rows, and the shared expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import experts as experts_module
from cam_jax.experts import expert_buffers, expert_rows, shared_expert
from tests.cam_jax import moe_reference as reference

E, D = 8, 6
SIZES = np.array([3, 0, 17, 1, 0, 9, 2, 0])
ROWS = 40  # eight more than there are assignments


@pytest.fixture(scope="module")
def weights():
    return reference.make_params(num_experts=E, features=D).experts


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D)), jnp.float32)


def test_buffers_run_every_expert_on_its_own_slots(weights, rng):
    x = jnp.asarray(rng.normal(size=(E, 3, D)), jnp.float32).at[:, 2].set(0)
    out = expert_buffers(x, weights)
    expected = [
        reference.swiglu(x[e], weights.gate[e], weights.up[e], weights.down[e]) for e in range(E)
    ]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert not np.asarray(out[:, 2]).any(), "an empty slot must stay 0"


def test_rows_run_every_row_through_its_own_expert(weights, rows):
    out = jax.jit(expert_rows)(rows, weights, jnp.asarray(SIZES))
    one_hot = np.zeros((ROWS, E))
    one_hot[np.arange(SIZES.sum()), np.repeat(np.arange(E), SIZES)] = 1
    np.testing.assert_allclose(out, reference.moe(rows, one_hot, weights), atol=1e-5)


def test_gradients_of_rows_equal_those_of_buffers(weights, rows):
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, D)), jnp.float32)
    starts = np.cumsum(SIZES) - SIZES

    def by_rows(x, weights):
        return (expert_rows(x, weights, jnp.asarray(SIZES)) * cotangent).sum()

    def by_buffers(x, weights):
        total = 0.0
        for e, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
            part = slice(start, start + size)
            one = jax.tree.map(lambda w, e=e: w[e : e + 1], weights)
            total += (expert_buffers(x[None, part], one)[0] * cotangent[part]).sum()
        return total

    actual = jax.jit(jax.grad(by_rows, (0, 1)))(rows, weights)
    expected = jax.jit(jax.grad(by_buffers, (0, 1)))(rows, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


@pytest.mark.parametrize("few", [0, ROWS], ids=["ragged", "by all experts"])
def test_the_lowering_for_tpu_computes_the_same(few, weights, rows, monkeypatch):
    monkeypatch.setattr(experts_module, "_FEW_ROWS", few)
    args = (rows, weights.gate, weights.up, weights.down, jnp.asarray(SIZES, jnp.int32))
    np.testing.assert_allclose(
        jax.jit(lambda *args: experts_module._rows_ragged(*args))(*args),
        jax.jit(experts_module._rows_blocked)(*args),
        atol=1e-5,
    )
    broken = rows.at[5].set(jnp.nan)
    out = jax.jit(lambda *args: experts_module._rows_ragged(*args))(broken, *args[1:])
    assert np.isfinite(np.delete(out, 5, 0)).all()
    grad = jnp.ones_like(rows)
    ragged = jax.jit(lambda *args: experts_module._rows_ragged_backward(*args))(*args, grad)
    blocked = jax.jit(experts_module._rows_blocked_backward)(*args, grad)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ragged, blocked)


def test_a_broken_row_reaches_neither_other_rows_nor_other_experts_gradients(weights, rows):
    broken = rows.at[5].set(jnp.nan)  # of expert 2
    out = expert_rows(broken, weights, jnp.asarray(SIZES))
    assert np.isfinite(np.delete(out, 5, 0)).all()
    grads = jax.grad(lambda w: expert_rows(broken, w, jnp.asarray(SIZES)).sum())(weights)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(np.delete(leaf, 2, 0)).all()


def test_bfloat16_comes_back_as_bfloat16_and_close(weights, rows):
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    out = expert_rows(rows.astype(jnp.bfloat16), low, jnp.asarray(SIZES))
    exact = expert_rows(
        rows.astype(jnp.bfloat16).astype(jnp.float32),
        jax.tree.map(lambda w: w.astype(jnp.float32), low),
        jnp.asarray(SIZES),
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("of", ["rows", "buffers"])
def test_bfloat16_has_gradients_in_each_operands_dtype(of, weights, rows):
    # Some mixtures of dtypes and layouts have no matmul on some platforms.
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)

    @jax.jit
    def gradients(x, weights):
        def loss(x, weights):
            if of == "rows":
                out = expert_rows(x, weights, jnp.asarray(SIZES))
            else:
                out = expert_buffers(x.reshape(E, -1, D), weights)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, weights)

    exact = gradients(rows, weights)
    for x, w in ((rows.astype(jnp.bfloat16), low), (rows.astype(jnp.bfloat16), weights)):
        actual = gradients(x, w)
        assert actual[0].dtype == x.dtype and actual[1].gate.dtype == w.gate.dtype
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                np.asarray(a, np.float32), b, rtol=0.1, atol=0.1 * np.abs(b).max()
            ),
            actual,
            exact,
        )


def test_no_rows(weights):
    assert expert_rows(jnp.zeros((0, D)), weights, jnp.zeros(E, jnp.int32)).shape == (0, D)


def test_shared_expert_with_and_without_its_own_gate(rng):
    shared = reference.make_params(shared="gated").shared
    x = jnp.asarray(rng.normal(size=(4, D)), jnp.float32)
    plain = reference.swiglu(x, shared.gate, shared.up, shared.down)
    gate = 1 / (1 + np.exp(-np.asarray(x @ shared.router.T, np.float64)))
    np.testing.assert_allclose(shared_expert(x, shared), gate * plain, atol=1e-5)
    ungated = dataclasses.replace(shared, router=None)
    np.testing.assert_allclose(shared_expert(x, ungated), plain, atol=1e-5)
