"""Rotary embedding against values computed by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.models.rope import RopeConfig, inverse_frequencies, rope_tables, rotate, yarn_mscale


def test_plain_frequencies_by_hand():
    rope = RopeConfig(dim=4, theta=100.0)
    np.testing.assert_allclose(inverse_frequencies(rope), [1.0, 0.1], rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    rope = RopeConfig(dim=4, theta=100.0, kind="linear", factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(rope), [0.25, 0.025], rtol=1e-6)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones():
    # theta=10000, 64 positions, dim 8: the pair that turns 32 times lies below 0 (clamped to 0),
    # the one that turns once at 8 ln(64 / 2 pi) / (2 ln 10000) = 1.008, rounded up to 2. So pair 0
    # is kept, pair 1 half stretched, pairs 2 and 3 divided by 8.
    rope = RopeConfig(dim=8, theta=10000.0, kind="yarn", factor=8.0, original_positions=64)
    expected = [1.0, 0.1 * (0.5 + 0.5 / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=1e-5)


def test_yarn_without_truncation_uses_the_unrounded_ramp():
    rope = RopeConfig(
        dim=8, theta=10000.0, kind="yarn", factor=8.0, original_positions=64, truncate=False
    )
    end = 8 * math.log(64 / (2 * math.pi)) / (2 * math.log(10000.0))
    share = 1 / end
    expected = 0.1 * (1 - share) + 0.1 / 8 * share
    np.testing.assert_allclose(inverse_frequencies(rope)[1], expected, rtol=1e-5)


def test_yarn_mscale():
    assert yarn_mscale(1.0) == 1.0
    assert yarn_mscale(math.e, 0.5) == pytest.approx(1.05)


def test_tables_hold_the_angles_and_the_attention_factor():
    rope = RopeConfig(dim=4, theta=100.0, attention_factor=2.0)
    cos, sin = rope_tables(rope, jnp.asarray([[0, 3]], jnp.int32))
    np.testing.assert_allclose(cos[0, 1], [2 * math.cos(3.0), 2 * math.cos(0.3)], rtol=1e-6)
    np.testing.assert_allclose(sin[0, 1], [2 * math.sin(3.0), 2 * math.sin(0.3)], rtol=1e-6)
    np.testing.assert_allclose(cos[0, 0], [2.0, 2.0])


def quarter_turn(interleaved: bool) -> np.ndarray:
    """Rotates 1, 2, 3, 4 by 90 degrees in the first pair and by none in the second."""
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cos = jnp.asarray([0.0, 1.0]).reshape(1, 1, 2)
    sin = jnp.asarray([1.0, 0.0]).reshape(1, 1, 2)
    return np.asarray(rotate(x, cos, sin, interleaved=interleaved)).ravel()


def test_half_layout_pairs_features_a_half_apart():
    # pairs (1, 3) and (2, 4): (1, 3) -> (-3, 1)
    np.testing.assert_array_equal(quarter_turn(False), [-3.0, 2.0, 1.0, 4.0])


def test_interleaved_pairs_are_neighbours_and_come_out_in_the_half_layout():
    # pairs (1, 2) and (3, 4): (1, 2) -> (-2, 1); first members first
    np.testing.assert_array_equal(quarter_turn(True), [-2.0, 3.0, 1.0, 4.0])


def test_products_depend_on_distance_only():
    rope = RopeConfig(dim=8, theta=100.0)
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 8)), jnp.float32)

    def product(first: int, second: int) -> float:
        a = rotate(q, *rope_tables(rope, jnp.asarray([[first]], jnp.int32)))
        b = rotate(k, *rope_tables(rope, jnp.asarray([[second]], jnp.int32)))
        return float(jnp.sum(a * b))

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_rotation_keeps_the_dtype():
    x = jnp.ones((1, 2, 3, 4), jnp.bfloat16)
    table = jnp.ones((1, 3, 2), jnp.float32)
    assert rotate(x, table, table).dtype == jnp.bfloat16
