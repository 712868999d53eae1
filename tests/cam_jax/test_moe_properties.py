"""What must hold of the layer's output, whatever the tokens: residual, padding, order, large γ.

One shape (3 sequences of 4 positions, or of 16 with padding), 6 experts, top-2, a shared expert.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cam_jax import (
    CapacityPolicy,
    ExpertWeights,
    MoEParams,
    RouterConfig,
    SharedExpert,
    moe_layer,
)
from cam_jax.experts import shared_expert

B, S, D, F, E, K = 3, 4, 5, 3, 6, 2
ROUTER = RouterConfig(num_experts=E, top_k=K, normalize=True)
TIGHT = CapacityPolicy(capacity=1, group="batch")
PER_DEVICE = CapacityPolicy(capacity_factor=0.8, expand="local", metric="random", expert_drop=0.2)
SEEDS = st.integers(0, 2**32 - 1)


def _weights(rng):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return MoEParams(
        router=normal(E, D),
        experts=ExpertWeights(gate=normal(E, F, D), up=normal(E, F, D), down=normal(E, D, F)),
        shared=SharedExpert(gate=normal(F, D), up=normal(F, D), down=normal(D, F)),
    )


PARAMS = _weights(np.random.default_rng(0))
BARE = dataclasses.replace(PARAMS, shared=None)


@jax.jit
def tight(x, valid):
    return moe_layer(x, BARE, ROUTER, TIGHT, valid=valid), moe_layer(
        x, PARAMS, ROUTER, TIGHT, valid=valid
    )


@jax.jit
def per_device(x, valid):
    return moe_layer(x, PARAMS, ROUTER, PER_DEVICE, valid=valid, virtual_devices=2)


@jax.jit
def loose_and_trained(x):
    loose = CapacityPolicy(capacity_factor=100.0)
    return [moe_layer(x, PARAMS, ROUTER, policy)[0] for policy in (loose, None)]


_shared = jax.jit(lambda x: shared_expert(x.reshape(-1, D), PARAMS.shared).reshape(x.shape))


def tokens(rng):
    return rng.standard_normal((B, S, D)).astype(np.float32)


@given(seed=SEEDS)
def test_a_token_that_lost_all_its_experts_gets_exactly_the_residual(seed):
    x = tokens(np.random.default_rng(seed))
    (bare, load), (with_shared, _) = tight(x, np.ones((B, S), bool))
    lost = (np.asarray(bare) == 0).all(-1)
    # 12 tokens compete for 6 slots
    assert lost.sum() == int(load.unserved_tokens) >= B * S - E
    assert np.array_equal(np.asarray(with_shared)[lost], np.asarray(_shared(x))[lost])


@given(seed=SEEDS)
def test_permuting_tokens_permutes_outputs(seed):
    rng = np.random.default_rng(seed)
    x, order = tokens(rng), rng.permutation(B * S)
    permuted = x.reshape(-1, D)[order].reshape(x.shape)
    everyone = np.ones((B, S), bool)
    y, again = tight(x, everyone)[1][0], tight(permuted, everyone)[1][0]
    expected = np.asarray(y).reshape(-1, D)[order].reshape(x.shape)
    np.testing.assert_allclose(again, expected, atol=1e-5)


@given(seed=SEEDS, before=st.integers(0, 12))
def test_padding_on_either_side_changes_no_output(seed, before):
    """Up to 300 % padding with anything in it, two virtual devices, random drops, expansion."""
    rng = np.random.default_rng(seed)
    x = tokens(rng)
    wide = rng.standard_normal((B, 4 * S, D)).astype(np.float32) * 100
    wide[:, before : before + S] = x
    valid = np.zeros((B, 4 * S), bool)
    valid[:, before : before + S] = True
    y, load = per_device(x, np.ones((B, S), bool))
    padded, padded_load = per_device(wide, valid)
    np.testing.assert_allclose(np.asarray(padded)[:, before : before + S], y, atol=1e-5)
    assert not np.asarray(padded)[~valid].any()
    assert jax.tree.all(jax.tree.map(np.array_equal, load, padded_load))


@given(seed=SEEDS)
def test_a_large_capacity_gives_what_no_policy_gives(seed):
    loose, trained = loose_and_trained(tokens(np.random.default_rng(seed)))
    np.testing.assert_allclose(loose, trained, atol=1e-5)
