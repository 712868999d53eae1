"""RMSNorm and the linear map."""

import jax.numpy as jnp
import numpy as np

from cam_jax.models.norm import linear, rms_norm


def test_rms_norm_by_hand():
    x = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    out = rms_norm(x, jnp.asarray([1.0, 2.0]), 0.5)
    root = np.sqrt(12.5 + 0.5)
    np.testing.assert_allclose(out, [[3 / root, 8 / root], [0.0, 0.0]], rtol=1e-6)


def test_rms_norm_squares_in_float32():
    # 300 squared is beyond float16; in float32 it is not.
    x = jnp.full((1, 4), 300.0, jnp.float16)
    out = rms_norm(x, jnp.ones(4, jnp.float16), 1e-5)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=1e-3)


def test_linear_contracts_the_last_axes_and_adds_the_bias():
    x = jnp.asarray([[1.0, 2.0]])
    weight = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    np.testing.assert_array_equal(linear(x, weight), [[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(linear(x, weight, jnp.asarray([1.0, 1.0, 1.0])), [[2, 3, 4]])


def test_linear_keeps_the_activations_dtype_and_sums_in_float32():
    # 1 + 256 * 2^-9: in bfloat16 each addend would be lost, in float32 none is.
    x = jnp.ones((1, 257), jnp.bfloat16)
    weight = jnp.full((1, 257), 2.0**-9).at[0, 0].set(1.0)
    out = linear(x, weight)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0]) == 1.5
