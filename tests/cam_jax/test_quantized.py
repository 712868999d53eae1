"""Int8 experts compute what their dequantised weights would, everywhere, and are constants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import RouterConfig, make_mesh, moe_layer
from cam_jax import experts as experts_module
from cam_jax.errors import InputError
from cam_jax.expert_parallel import param_specs
from cam_jax.experts import ExpertWeights, expert_buffers, expert_rows
from cam_jax.quantized import QuantizedWeight, dequantize, quantize
from tests.cam_jax import moe_reference as reference

E, D = 8, 6
SIZES = jnp.asarray([3, 0, 17, 1, 0, 9, 2, 0])
NAMES = ("gate", "up", "down")


def quantized(weights: ExpertWeights) -> ExpertWeights:
    return jax.tree.map(quantize, weights)


def dequantized(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(**{name: dequantize(getattr(weights, name)) for name in NAMES})


@pytest.fixture(scope="module")
def weights():
    return quantized(reference.make_params(num_experts=E, features=D).experts)


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(np.random.default_rng(1).normal(size=(40, D)), jnp.float32)


def test_every_number_is_within_half_a_step_of_its_weight(rng):
    w = rng.normal(size=(3, 5, 64)).astype(np.float32) * 10.0 ** rng.integers(-6, 6, (3, 5, 1))
    q = quantize(jnp.asarray(w, jnp.float32))
    assert q.values.dtype == jnp.int8 and q.scale.dtype == jnp.float32
    assert q.values.shape == q.shape == w.shape and q.scale.shape == w.shape[:-1]
    assert (np.abs(np.asarray(q.values, np.int32)).max(-1) == 127).all(), "the range is used"
    error = np.abs(np.asarray(dequantize(q), np.float64) - w)
    assert (error <= 0.5001 * np.asarray(q.scale)[..., None]).all()
    assert q.nbytes == w.size + 4 * 15


@pytest.mark.parametrize("row", [0.0, 1e-44, 3.4e38], ids=["zeros", "subnormal", "largest"])
def test_rows_at_the_ends_of_the_range(row):
    q = quantize(jnp.full((1, 2, 4), row, jnp.float32))
    assert np.isfinite(q.scale).all()
    expected = row if row > 1 else 0
    np.testing.assert_allclose(dequantize(q), np.full((1, 2, 4), expected), rtol=1e-6)


def test_quantising_twice_changes_nothing(weights):
    again = quantize(dequantize(weights.up))
    np.testing.assert_array_equal(again.values, weights.up.values)


@pytest.mark.parametrize(
    ("of", "dtype"), [("rows", jnp.float32), ("rows", jnp.bfloat16), ("buffers", jnp.float32)]
)
def test_results_and_gradients_are_those_of_the_dequantised(of, dtype, weights, rows):
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=rows.shape), jnp.float32)

    def run(x, weights):
        if of == "rows":
            return expert_rows(x, weights, SIZES)
        return expert_buffers(x.reshape(E, -1, D), weights).reshape(x.shape)

    @jax.jit
    def both(x, weights):
        y, pull = jax.vjp(lambda x: run(x, weights), x)
        return y, pull(cotangent.astype(y.dtype))[0]

    x = rows.astype(dtype)
    actual = both(x, weights)
    expected = both(x.astype(jnp.float32), dequantized(weights))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=tolerance, atol=tolerance * float(jnp.abs(b).max())
        )


@pytest.mark.parametrize("few", [0, 256], ids=["ragged", "by all experts"])
def test_the_lowering_for_tpu_computes_the_same(few, weights, rows, monkeypatch):
    monkeypatch.setattr(experts_module, "_FEW_ROWS", few)
    args = (rows, weights.gate, weights.up, weights.down, SIZES)
    ragged = jax.jit(lambda *args: experts_module._rows_ragged(*args))(*args)
    blocked = jax.jit(experts_module._rows_blocked)(*args)
    np.testing.assert_allclose(ragged, blocked, atol=1e-5)
    grad = jnp.ones_like(rows)
    (ragged,) = jax.jit(lambda *args: experts_module._rows_ragged_backward(*args))(*args, grad)
    (blocked,) = jax.jit(experts_module._rows_blocked_backward)(*args, grad)
    np.testing.assert_allclose(ragged, blocked, atol=1e-5)


@pytest.mark.parametrize("of", ["rows", "buffers"])
def test_they_are_constants_to_a_gradient(of, weights, rows):
    def loss(weights):
        if of == "rows":
            return expert_rows(rows, weights, SIZES).sum()
        return expert_buffers(rows.reshape(E, -1, D), weights).sum()

    with pytest.raises(TypeError, match="int8"):
        jax.grad(loss)(weights)
    gradient = jax.grad(loss, allow_int=True)(weights)
    assert gradient.gate.values.dtype == jax.dtypes.float0
    assert not any(np.asarray(getattr(gradient, name).scale).any() for name in NAMES)


@pytest.mark.parametrize("of", ["rows", "buffers"])
def test_no_float_copy_of_all_experts_is_made(of):
    """An expert is converted when its turn comes."""
    experts, inner, outer = 32, 128, 64
    shapes = {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}
    leaf = jax.ShapeDtypeStruct
    weights = ExpertWeights(
        **{
            name: QuantizedWeight(
                values=leaf((experts, *shape), jnp.int8), scale=leaf((experts, shape[0]), "float32")
            )
            for name, shape in shapes.items()
        }
    )
    if of == "rows":
        args = (leaf((8, outer), jnp.float32), weights, leaf((experts,), jnp.int32))
        lowered = jax.jit(expert_rows).lower(*args)
    else:
        lowered = jax.jit(expert_buffers).lower(leaf((experts, 2, outer), jnp.float32), weights)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < experts * inner * outer  # one leaf in int8


def test_the_batched_lowering_for_tpu_computes_the_same(weights, rows):
    args = (rows.reshape(E, -1, D), weights.gate, weights.up, weights.down)
    batched = jax.jit(experts_module._buffers_batched)(*args)
    np.testing.assert_allclose(batched, expert_buffers(args[0], weights), atol=1e-5)


def test_a_mesh_computes_what_one_device_does(devices):
    """With a dead expert, and a scale that both halves of a divided row need; gradients too."""
    params = reference.make_params(num_experts=7, features=D, hidden=8)
    params = dataclasses.replace(params, experts=quantized(params.experts))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 6, D)), jnp.float32)
    router = RouterConfig(num_experts=7, top_k=2)

    def run(**where):
        def with_gradient(x, params):
            y, pull = jax.vjp(lambda x: moe_layer(x, params, router, None, **where)[0], x)
            return y, pull(y)[0]

        return jax.jit(with_gradient)(x, params)

    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    for placed, one in zip(run(mesh=mesh), run(), strict=True):
        np.testing.assert_allclose(placed, one, atol=1e-5)


def test_scales_lie_where_their_rows_do(weights):
    params = dataclasses.replace(reference.make_params(num_experts=E), experts=weights)
    specs = param_specs(params).experts
    assert tuple(specs.gate.scale) == tuple(specs.gate.values) == ("expert", "tensor")
    assert tuple(specs.down.values) == ("expert", None, "tensor")
    assert tuple(specs.down.scale) == ("expert", None)


def test_what_does_not_fit_is_refused(weights, rows):
    params = reference.make_params(num_experts=E, features=D)
    router = RouterConfig(num_experts=E, top_k=2)
    half = dataclasses.replace(params.experts, gate=weights.gate)
    with pytest.raises(InputError, match="some weights are quantised"):
        moe_layer(rows, dataclasses.replace(params, experts=half), router, None)
    short = dataclasses.replace(weights.down, scale=weights.down.scale[:, 1:])
    wrong = dataclasses.replace(weights, down=short)
    with pytest.raises(InputError, match=r"experts.down.scale has shape \(8, 5\): expected"):
        moe_layer(rows, dataclasses.replace(params, experts=wrong), router, None)
