"""Every transport moves the same plan to the same result: values, gradients, NaN, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import ExpertWeights
from cam_jax.plan import RoutingPlan
from cam_jax.router import RouterConfig, select
from cam_jax.routing import route
from cam_jax.transports import TRANSPORTS
from cam_jax.transports.dropless import sort_by_expert
from tests.cam_jax import moe_reference as reference

G, T, E, K, D = 2, 10, 8, 3, 6
ROUTER = RouterConfig(num_experts=E, top_k=K, normalize=True)
POLICIES = {
    "none": None,
    "token drop": CapacityPolicy(capacity_factor=1.0),
    "expanded": CapacityPolicy(capacity_factor=1.0, expand="local"),
    "reroute": CapacityPolicy(capacity_factor=1.0, overflow="reroute"),
    "capacity above T": CapacityPolicy(capacity=99),
    "one slot": CapacityPolicy(capacity=1, metric="first"),
}


@partial(jax.jit, static_argnames=("policy",))
def make_plans(logits, valid, policy) -> RoutingPlan:
    def one(logits, valid, rank):
        return route(
            select(logits, ROUTER), policy, valid=valid, ep_size=2, ep_rank=rank, group_index=rank
        )

    return jax.vmap(one)(logits, valid, jnp.arange(len(logits)))


@partial(jax.jit, static_argnames=("policy", "transport"))
def run(x, logits, valid, experts, policy, transport):
    return TRANSPORTS[transport](x, make_plans(logits, valid, policy), experts)


@partial(jax.jit, static_argnames=("policy", "transport"))
def gradients(x, logits, valid, experts, policy, transport):
    def loss(x, logits, experts):
        return (run(x, logits, valid, experts, policy, transport) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(x, logits, experts)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(G, T, E)) * 2
    logits[..., 1] += 2  # skew
    return (
        jnp.asarray(rng.normal(size=(G, T, D)), jnp.float32),
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(rng.uniform(size=(G, T)) < 0.8),
        reference.make_params(num_experts=E, features=D).experts,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_gives_the_weighted_sum_over_kept_experts(policy, transport, case):
    x, logits, valid, experts = case
    plans = make_plans(logits, valid, policy)
    out = run(*case, policy, transport)
    for g in range(G):
        plan = jax.tree.map(lambda leaf, g=g: leaf[g], plans)
        expected = reference.moe(x[g], reference.plan_weights(plan), experts)
        np.testing.assert_allclose(out[g], expected, atol=1e-5)
        assert not np.asarray(out[g])[~np.asarray(plan.kept()).any(1)].any()


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "einsum"])
@pytest.mark.parametrize("name", ["none", "token drop", "expanded"])
def test_gradients_are_those_of_the_one_hot_form(name, transport, case):
    expected = gradients(*case, POLICIES[name], "einsum")
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(expected))
    actual = gradients(*case, POLICIES[name], transport)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_row_that_no_expert_keeps_may_be_broken(transport, case):
    x, logits, valid, experts = case
    policy = POLICIES["token drop"]
    valid = valid.at[0, 4].set(False)
    broken = x.at[0, 4].set(jnp.nan)
    np.testing.assert_array_equal(
        run(broken, logits, valid, experts, policy, transport),
        run(x, logits, valid, experts, policy, transport),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rows", ["nobody is valid", "all to one expert"])
def test_extreme_loads(transport, rows, case):
    x, logits, valid, experts = case
    if rows == "nobody is valid":
        out = run(x, logits, jnp.zeros_like(valid), experts, None, transport)
        np.testing.assert_array_equal(out, np.zeros_like(x))
        return
    logits = logits.at[..., 5].set(60.0)
    plans = make_plans(logits, valid, None)
    out = run(x, logits, valid, experts, None, transport)
    assert int(plans.load.load[:, 5].sum()) == int(valid.sum())
    for g in range(G):
        plan = jax.tree.map(lambda leaf, g=g: leaf[g], plans)
        expected = reference.moe(x[g], reference.plan_weights(plan), experts)
        np.testing.assert_allclose(out[g], expected, atol=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16(transport, case):
    x, logits, valid, experts = case
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), experts)
    policy = POLICIES["token drop"]
    out = run(x.astype(jnp.bfloat16), logits, valid, low, policy, transport)
    assert out.dtype == jnp.bfloat16
    exact = run(x, logits, valid, experts, policy, transport)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=0.05, atol=0.05)


def test_device_bins_are_served_by_sorting(case):
    x, logits, valid, experts = case
    policy = CapacityPolicy(capacity_factor=0.5, scope="device")
    plans = make_plans(logits, valid, policy)
    assert plans.token.shape[1] == 2  # bins are the two devices
    assert int(plans.load.dropped.sum()) > 0
    out = run(*case, policy, "dropless")
    for g in range(G):
        plan = jax.tree.map(lambda leaf, g=g: leaf[g], plans)
        expected = reference.moe(x[g], reference.plan_weights(plan), experts)
        np.testing.assert_allclose(out[g], expected, atol=1e-5)


def test_sorting_with_two_keys_equals_sorting_with_one():
    expert = np.array([3, 1, 8, 1, 0, 3, 8], np.int32)
    np.testing.assert_array_equal(sort_by_expert(jnp.asarray(expert), 8), [4, 1, 3, 0, 5, 2, 6])
    # Too many experts for one int32 key; only the order of ids counts.
    np.testing.assert_array_equal(sort_by_expert(jnp.asarray(expert), 2**30), [4, 1, 3, 0, 5, 2, 6])


def temporary_bytes(transport: str, tokens: int) -> int:
    features, hidden = 16, 16
    policy = CapacityPolicy(capacity_factor=1.0)
    shapes = ExpertWeights(
        gate=jax.ShapeDtypeStruct((E, hidden, features), jnp.float32),
        up=jax.ShapeDtypeStruct((E, hidden, features), jnp.float32),
        down=jax.ShapeDtypeStruct((E, features, hidden), jnp.float32),
    )
    compiled = run.lower(
        jax.ShapeDtypeStruct((1, tokens, features), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens, E), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.bool_),
        shapes,
        policy,
        transport,
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("transport", ["gather", "dropless"])
def test_temporary_memory_grows_linearly_with_tokens(transport):
    small, large = temporary_bytes(transport, 512), temporary_bytes(transport, 2048)
    assert large < 4.5 * small


def test_the_one_hot_form_grows_with_the_square():
    assert temporary_bytes("einsum", 2048) > 8 * temporary_bytes("einsum", 512)
