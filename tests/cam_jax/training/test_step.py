"""The loss, its gradient, and what decays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cam_jax.training.memory import keep_freed_memory
from cam_jax.training.step import _decays, cross_entropy


def test_cross_entropy_and_its_gradient(rng):
    scores = jnp.asarray(rng.normal(size=(2, 3, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, (2, 3)), jnp.int32)
    expected = optax.losses.softmax_cross_entropy_with_integer_labels
    np.testing.assert_allclose(
        cross_entropy(scores, targets), expected(scores, targets), rtol=1e-5, atol=1e-6
    )
    found = jax.grad(lambda x: cross_entropy(x, targets).sum())(scores)
    wanted = jax.grad(lambda x: expected(x, targets).sum())(scores)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_norm_weights_do_not_decay():
    leaf = jnp.ones(3)
    tree = {"attn_norm": leaf, "final_norm": leaf, "attn": {"q": leaf, "q_norm": leaf}}
    decays = jax.tree_util.tree_map_with_path(_decays, tree)
    assert decays == {
        "attn_norm": False, "final_norm": False, "attn": {"q": True, "q_norm": False}
    }  # fmt: skip


def test_keeping_memory_says_whether_it_did():
    assert keep_freed_memory() in (True, False)
