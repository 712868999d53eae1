"""Positions: what counts, what does not, and what the cache knows about it."""

import jax
import jax.numpy as jnp
import numpy as np

from cam_jax.models.cache import NO_TOKEN, Cache, key_positions, token_positions

VALID = jnp.asarray([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], bool)


def test_positions_count_tokens_wherever_the_padding_is():
    positions = np.asarray(token_positions(VALID))
    np.testing.assert_array_equal(positions, [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 2]])


def test_positions_continue_from_each_rows_count():
    more = token_positions(jnp.ones((3, 1), bool), jnp.asarray([2, 2, 3], jnp.int32))
    np.testing.assert_array_equal(more, [[2], [2], [3]])


def test_padding_shows_no_position_as_a_key():
    keys = np.asarray(key_positions(VALID, token_positions(VALID)))
    np.testing.assert_array_equal(keys == NO_TOKEN, ~np.asarray(VALID))


def test_a_cache_is_a_pytree_whose_emptiness_is_static():
    cache = Cache(
        entries={"key": jnp.zeros((1, 2, 1, 3, 4))},
        positions=jnp.asarray([[0, NO_TOKEN, NO_TOKEN], [0, 1, NO_TOKEN]], jnp.int32),
        counts=jnp.asarray([1, 2], jnp.int32),
        length=jnp.asarray(2, jnp.int32),
        empty=True,
    )
    assert cache.capacity == 3
    np.testing.assert_array_equal(cache.mask, [[1, 0, 0], [1, 1, 0]])
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 4
    assert jax.tree.unflatten(tree, leaves).empty
    assert jax.eval_shape(lambda c: c, cache).positions.shape == (2, 3)
