"""Dispatch and combine against the one-hot tensors, and that rows are never scattered."""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.capacity import CapacityPolicy
from cam_jax.dispatch import combine, dispatch, merge_groups
from cam_jax.errors import InputError
from cam_jax.plan import RoutingPlan
from cam_jax.router import select_from_scores
from cam_jax.routing import route

T, E, K, D = 12, 6, 3, 4
POLICIES = {
    "token drop": CapacityPolicy(capacity_factor=1.0),
    "expanded": CapacityPolicy(capacity_factor=1.5, expand="local"),
    "loose": CapacityPolicy(capacity=50),
    "none": None,
}


@partial(jax.jit, static_argnames="policy")
def plan_for(scores, policy, valid=None) -> RoutingPlan:
    return route(select_from_scores(scores, K), policy, valid=valid, ep_size=2, ep_rank=1)


def make_plan(policy, *, seed: int = 0, valid=None) -> RoutingPlan:
    scores = jnp.asarray(np.random.default_rng(seed).uniform(size=(T, E)), jnp.float32)
    return plan_for(scores, policy, valid)


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(5).normal(size=(T, D)), jnp.float32)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_both_are_the_one_hot_tensors_forward_and_backward(policy, x):
    plan = make_plan(policy)
    slots, weights = plan.dispatch_tensor(), plan.combine_tensor()
    y_e = jnp.asarray(np.random.default_rng(6).normal(size=(*plan.token.shape, D)), jnp.float32)

    x_e, pull_dispatch = jax.vjp(lambda x: dispatch(x, plan), x)
    np.testing.assert_array_equal(x_e, jnp.einsum("tec,td->ecd", slots, x))
    np.testing.assert_allclose(
        pull_dispatch(y_e)[0], jnp.einsum("tec,ecd->td", slots, y_e), atol=1e-6
    )

    y, pull_combine = jax.vjp(lambda y_e: combine(y_e, plan), y_e)
    np.testing.assert_allclose(y, jnp.einsum("tec,ecd->td", weights, y_e), atol=1e-6)
    np.testing.assert_allclose(pull_combine(x)[0], jnp.einsum("tec,td->ecd", weights, x), atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_scores_get_the_gradient_that_the_one_hot_tensors_give(policy, x):
    scores = jnp.asarray(np.random.default_rng(0).uniform(size=(T, E)), jnp.float32)
    y_e = jnp.asarray(
        np.random.default_rng(6).normal(size=(*make_plan(policy).token.shape, D)), jnp.float32
    )

    def loss(scores, one_hot):
        plan = plan_for(scores, policy)
        if one_hot:
            return (jnp.einsum("tec,ecd->td", plan.combine_tensor(), y_e) * x).sum()
        return (combine(y_e, plan) * x).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(scores, True)
    assert np.asarray(expected).any()
    np.testing.assert_allclose(gradient(scores, False), expected, atol=1e-6)


def test_a_loop_over_many_choices_equals_the_unrolled_sum(x, monkeypatch):
    plan = make_plan(POLICIES["expanded"])
    y_e = jnp.asarray(np.random.default_rng(6).normal(size=(*plan.token.shape, D)), jnp.float32)

    def everything():
        y, pull = jax.vjp(lambda y, w: combine(y, plan_with(w)), y_e, plan.choice_weight)
        return y, pull(x), jax.vjp(lambda x: dispatch(x, plan), x)[1](y_e)

    def plan_with(weight):
        return dataclasses.replace(plan, choice_weight=weight)

    unrolled = everything()
    # `cam_jax.dispatch` the attribute is the function, not the module.
    monkeypatch.setattr(sys.modules[dispatch.__module__], "_UNROLL", 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), everything(), unrolled)


def test_no_row_is_scattered_in_either_direction(x):
    plan = make_plan(POLICIES["token drop"])

    def loss(x):
        return (combine(jnp.tanh(dispatch(x, plan)), plan) ** 2).sum()

    lowered = jax.jit(jax.grad(loss)).lower(x).as_text()
    assert "gather" in lowered and "scatter" not in lowered


def test_a_broken_token_without_slots_is_not_read(x):
    valid = jnp.arange(T) != 3
    plan = make_plan(POLICIES["loose"], valid=valid)
    out = combine(dispatch(x.at[3].set(jnp.nan), plan), plan)
    assert np.isfinite(out).all() and not np.asarray(out[3]).any()


def test_bfloat16_is_summed_in_float32():
    num_experts = 16
    scores = jnp.ones((1, num_experts)).at[0, 0].set(256.0)

    @jax.jit
    def run(scores, y_e):
        return combine(y_e, route(select_from_scores(scores, num_experts), None))

    out = run(scores, jnp.ones((num_experts, 1, 1), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0]) == 272.0  # 256 + 1 is 256 in bfloat16


def test_merged_groups_do_what_the_groups_do_one_by_one():
    plans = [make_plan(POLICIES["token drop"], seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)
    merged = merge_groups(stacked)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(3, T, D)), jnp.float32)
    x_e = dispatch(x.reshape(3 * T, D), merged)
    assert x_e.shape == (E, 3 * plans[0].token.shape[1], D)
    one_by_one = [dispatch(x[g], plan) for g, plan in enumerate(plans)]
    np.testing.assert_array_equal(x_e, jnp.concatenate(one_by_one, 1))
    y = combine(x_e, merged).reshape(3, T, D)
    for g, plan in enumerate(plans):
        np.testing.assert_allclose(y[g], combine(one_by_one[g], plan), atol=1e-6)
    np.testing.assert_array_equal(merged.load.load, stacked.load.load.sum(0))
    np.testing.assert_array_equal(merged.kept(), jnp.concatenate([p.kept() for p in plans]))


def test_slots_that_int32_cannot_number_are_refused():
    plan = make_plan(POLICIES["token drop"])
    groups = 2**31 // plan.token.size + 1
    huge = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((groups, *leaf.shape), leaf.dtype), plan)
    with pytest.raises(InputError, match="int32"):
        jax.eval_shape(merge_groups, huge)
