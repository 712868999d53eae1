"""The MoE layer: groups, transports by policy, padding, broken rows, shared experts, errors."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import InputError, MeshError, PolicyError
from cam_jax.experts import SharedExpert
from cam_jax.group_routing import router_logits
from cam_jax.moe import moe_layer
from cam_jax.router import RouterConfig, select
from cam_jax.routing import route
from tests.cam_jax import moe_reference as reference

B, S, E, K, D = 5, 4, 12, 3, 6
ROUTER = RouterConfig(num_experts=E, top_k=K)
TOKEN_DROP = CapacityPolicy(capacity_factor=1.0)
BATCH = CapacityPolicy(capacity_factor=1.0, group="batch")

layer = jax.jit(moe_layer, static_argnames=("router", "policy", "virtual_devices", "transport"))


@partial(jax.jit, static_argnames=("policy", "ep_size"))
def plan_of(x, params, policy, **options):
    """The plan of one group of tokens [T, D]."""
    return route(select(router_logits(x, params.router), ROUTER), policy, **options)


@pytest.fixture(scope="module")
def params():
    return reference.make_params(num_experts=E, features=D)


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, S, D)), jnp.float32)


def expected_of(x, params, plan) -> np.ndarray:
    return reference.moe(x, reference.plan_weights(plan), params.experts)


def test_without_a_policy_every_token_meets_its_top_k(x, params):
    y, load = layer(x, params, ROUTER, None)
    logits = np.asarray(x, np.float64) @ np.asarray(params.router, np.float64).T
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    weights = np.where(scores >= np.sort(scores)[..., -K, None], scores, 0)
    expected = reference.moe(x.reshape(-1, D), weights.reshape(-1, E), params.experts)
    np.testing.assert_allclose(y.reshape(-1, D), expected, atol=1e-5)
    np.testing.assert_array_equal(load.demand, (weights > 0).sum((0, 1)))
    assert int(load.dropped) == 0 and int(load.tokens) == B * S


@pytest.mark.parametrize("devices", [1, 8, (2, 2)])
@pytest.mark.parametrize("expand", [None, "local"])
def test_device_groups_route_on_their_own(devices, expand, x, params):
    # 5 rows never divide; 12 experts on 8 devices leave two devices without any.
    policy = dataclasses.replace(TOKEN_DROP, expand=expand)
    y, load = layer(x, params, ROUTER, policy, virtual_devices=devices)
    data, expert = devices if isinstance(devices, tuple) else (1, devices)
    rows = -(-B // (data * expert))
    loads = []
    for g in range(data * expert):
        part = x[g * rows : (g + 1) * rows].reshape(-1, D)
        if not len(part):
            continue
        valid = np.arange(rows * S) < len(part)
        padded = np.zeros((rows * S, D), np.float32)
        padded[: len(part)] = part
        plan = plan_of(
            padded, params, policy, valid=valid, group_index=g, ep_size=expert, ep_rank=g % expert
        )
        expected = expected_of(padded, params, plan)[: len(part)]
        np.testing.assert_allclose(y[g * rows : (g + 1) * rows].reshape(-1, D), expected, atol=1e-5)
        loads.append(plan.load)
    total = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loads).sum()
    jax.tree.map(np.testing.assert_array_equal, load, total)


def test_sequence_groups_keep_the_same_whatever_their_batch_mates(x, params):
    policy = CapacityPolicy(capacity_factor=1.0, group="sequence")
    y, load = layer(x, params, ROUTER, policy, virtual_devices=2)
    others, _ = layer(x.at[1:].multiply(-3), params, ROUTER, policy, virtual_devices=2)
    np.testing.assert_allclose(others[0], y[0], atol=1e-6)
    for row in range(B):
        plan = plan_of(x[row], params, policy, group_index=row)
        np.testing.assert_allclose(y[row], expected_of(x[row], params, plan), atol=1e-5)
    assert int(load.capacity) == int(plan.load.capacity)


def test_the_batch_is_one_group_that_expands_on_each_rows_own_device(x, params):
    policy = dataclasses.replace(BATCH, expand="local")
    y, load = layer(x, params, ROUTER, policy, virtual_devices=4)
    flat = x.reshape(-1, D)
    device = np.repeat(np.arange(B) // 2, S)  # two rows each
    local = np.arange(E)[None] // 3 == device[:, None]
    plan = plan_of(flat, params, policy, local=local)
    np.testing.assert_allclose(y.reshape(-1, D), expected_of(flat, params, plan), atol=1e-5)
    np.testing.assert_array_equal(load.load, plan.load.load)
    assert int(load.expanded) > 0


@pytest.mark.parametrize("transport", ["einsum", "gather", "dropless"])
@pytest.mark.parametrize(
    "policy",
    [None, TOKEN_DROP, dataclasses.replace(BATCH, expand=2), CapacityPolicy(capacity=1000)],
    ids=["none", "device", "batch expanded", "loose"],
)
def test_the_named_transports_agree(policy, transport, x, params):
    default, load = layer(x, params, ROUTER, policy, virtual_devices=2)
    named, named_load = layer(x, params, ROUTER, policy, virtual_devices=2, transport=transport)
    np.testing.assert_allclose(named, default, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, named_load, load)


def test_a_large_capacity_is_no_capacity_and_a_tiny_one_is_not(x, params):
    free, _ = layer(x, params, ROUTER, None)
    loose, load = layer(x, params, ROUTER, CapacityPolicy(capacity_factor=1e4))
    np.testing.assert_allclose(loose, free, atol=1e-5)
    assert int(load.capacity) == int(1e4 * K * B * S / E)
    tiny, load = layer(x, params, ROUTER, CapacityPolicy(capacity=1))
    assert np.abs(tiny - free).max() > 0.01
    assert int(load.load.max()) == 1


def test_device_scope_keeps_the_devices_ceiling(x, params):
    policy = CapacityPolicy(capacity_factor=0.5, scope="device")
    y, load = layer(x, params, ROUTER, policy, virtual_devices=(1, 2))
    padded = np.zeros((6, S, D), np.float32)
    padded[:B] = x
    for g in range(2):
        part = padded[3 * g : 3 * g + 3].reshape(-1, D)
        valid = np.arange(12) < (12 if g == 0 else 8)
        plan = plan_of(part, params, policy, valid=valid, ep_size=2, ep_rank=g)
        expected = expected_of(part, params, plan).reshape(3, S, D)[: B - 3 * g]
        np.testing.assert_allclose(y[3 * g : 3 * g + 3], expected, atol=1e-5)
    assert int(load.dropped_capacity) > 0


@pytest.mark.parametrize("capacity", [1, 4, 1000])
def test_fallback_is_exact_and_says_what_ran(capacity, x, params):
    policy = CapacityPolicy(capacity=capacity, overflow="fallback")
    exact, free_load = layer(x, params, ROUTER, None)
    y, load = layer(x, params, ROUTER, policy, virtual_devices=2)
    np.testing.assert_allclose(y, exact, atol=1e-5)
    np.testing.assert_array_equal(load.load, free_load.load)
    assert int(load.dropped) == 0 and int(load.capacity) == capacity
    by_name, _ = layer(x, params, ROUTER, policy, transport="dropless")
    np.testing.assert_allclose(by_name, exact, atol=1e-5)


def test_fallback_has_gradients_on_both_sides(x, params):
    @partial(jax.jit, static_argnames="policy")
    def gradients(x, params, policy):
        return jax.grad(
            lambda x, params: (moe_layer(x, params, ROUTER, policy)[0] ** 2).sum(), (0, 1)
        )(x, params)

    exact = gradients(x, params, None)
    for capacity in (1, 1000):
        actual = gradients(x, params, CapacityPolicy(capacity=capacity, overflow="fallback"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, exact)


def test_expert_drop_skips_the_same_experts_in_every_group(x, params):
    policy = CapacityPolicy(expert_drop=0.25, capacity=1000)
    y, load = layer(x, params, ROUTER, policy, virtual_devices=5)
    skipped = np.argsort(np.asarray(load.demand), kind="stable")[:3]
    assert not np.asarray(load.load)[skipped].any()
    assert int(load.dropped_expert_drop) == int(np.asarray(load.demand)[skipped].sum())
    free, _ = layer(x, params, ROUTER, CapacityPolicy(expert_drop=0.25), virtual_devices=5)
    np.testing.assert_allclose(y, free, atol=1e-5)


@pytest.mark.parametrize("policy", [None, TOKEN_DROP, BATCH], ids=["none", "device", "batch"])
def test_padding_takes_no_slot_gives_0_and_may_hold_anything(policy, x, params):
    y, load = layer(x, params, ROUTER, policy, virtual_devices=2)
    wide = jnp.full((B, 2 * S, D), jnp.nan).at[:, 3 : 3 + S].set(x)
    valid = jnp.zeros((B, 2 * S), bool).at[:, 3 : 3 + S].set(True)
    padded, padded_load = layer(wide, params, ROUTER, policy, virtual_devices=2, valid=valid)
    np.testing.assert_allclose(padded[:, 3 : 3 + S], y, atol=1e-5)
    assert not np.asarray(padded)[~np.asarray(valid)].any()
    jax.tree.map(np.testing.assert_array_equal, padded_load, load)


@pytest.mark.parametrize("transport", ["einsum", "gather", "dropless"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_token_takes_no_slot_and_harms_nobody(transport, value, x, params):
    valid = jnp.ones((B, S), bool)
    policy = CapacityPolicy(capacity=2, group="batch")
    broken = x.at[2, 1, 3].set(value)
    y, load = layer(broken, params, ROUTER, policy, transport=transport, valid=valid)
    assert int(load.nonfinite_tokens) == 1 and int(load.tokens) == B * S
    # The same as if the token were not there, for this capacity does not follow the tokens.
    without, _ = layer(
        x, params, ROUTER, policy, transport=transport, valid=valid.at[2, 1].set(False)
    )
    np.testing.assert_allclose(y, without, atol=1e-6)
    assert not np.asarray(y[2, 1]).any()


def test_broken_tokens_and_padding_leave_the_weights_gradients_finite(x, params):
    broken = x.at[2, 1].set(jnp.nan).at[0, 0].set(jnp.inf)
    valid = jnp.ones((B, S), bool).at[0, 0].set(False)
    for policy in (None, TOKEN_DROP):
        grads = jax.jit(
            jax.grad(
                lambda p, policy=policy: (
                    moe_layer(broken, p, ROUTER, policy, valid=valid)[0] ** 2
                ).sum()
            )
        )(params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_what_stands_in_padding_never_reaches_the_shared_expert(x, params):
    ones = jnp.ones((3, x.shape[-1]))
    with_shared = dataclasses.replace(params, shared=SharedExpert(gate=ones, up=ones, down=ones.T))
    valid = jnp.ones((B, S), bool).at[0, 0].set(False)

    @jax.jit
    def value_and_grads(x):
        return jax.value_and_grad(
            lambda p: (moe_layer(x, p, ROUTER, TOKEN_DROP, valid=valid)[0] ** 2).sum()
        )(with_shared)

    clean, broken = value_and_grads(x), value_and_grads(x.at[0, 0].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, broken, clean)


def test_priority_is_looked_at_before_the_score(x, params):
    priority = jnp.arange(B * S, dtype=jnp.int32).reshape(B, S)
    policy = CapacityPolicy(capacity=2, group="batch")
    y, _ = layer(x, params, ROUTER, policy, priority=priority)
    last = CapacityPolicy(capacity=2, group="batch", metric="last")
    np.testing.assert_allclose(y, layer(x, params, ROUTER, last)[0], atol=1e-6)


def test_random_draws_follow_layer_and_group_and_the_layer_may_be_traced(x, params):
    policy = CapacityPolicy(capacity=1, metric="random", group="batch", seed=3)
    y_static, one = layer(x, params, ROUTER, policy, layer=1)
    y_one, _ = layer(x, params, ROUTER, policy, layer=jnp.int32(1))
    y_two, _ = layer(x, params, ROUTER, policy, layer=2)
    assert np.array_equal(y_static, y_one)
    assert np.abs(y_one - y_two).max() > 1e-3
    assert int(one.load.max()) == 1


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("policy", [None, CapacityPolicy(capacity=1)], ids=["none", "one slot"])
def test_the_shared_expert_is_added_once_for_valid_tokens(kind, policy, x, params):
    common = reference.make_params(num_experts=E, features=D, shared=kind, seed=4).shared
    valid = jnp.ones((B, S), bool).at[1, 2].set(False)
    alone, _ = layer(x, params, ROUTER, policy, virtual_devices=2, valid=valid)
    both, _ = layer(
        x,
        dataclasses.replace(params, shared=common),
        ROUTER,
        policy,
        virtual_devices=2,
        valid=valid,
    )
    expected = reference.swiglu(x, common.gate, common.up, common.down)
    if kind == "gated":
        expected = expected / (1 + np.exp(-np.asarray(x @ common.router.T, np.float64)))
    expected = np.where(np.asarray(valid)[..., None], expected, 0)
    np.testing.assert_allclose(both - alone, expected, atol=1e-5)


def test_a_selection_bias_moves_tokens_but_enters_no_weight(x, params):
    router = RouterConfig(num_experts=E, top_k=K, score="sigmoid", normalize=True, scale=2.0)
    bias = jnp.zeros(E).at[7].set(10.0)
    _, load = layer(x, dataclasses.replace(params, bias=bias), router, None)
    assert int(load.demand[7]) == B * S

    @jax.jit
    def plan_with(x, bias):
        logits = router_logits(x.reshape(-1, D), params.router)
        return route(select(logits, router, bias=bias), None)

    plan = plan_with(x, bias)
    np.testing.assert_allclose(plan.choice_weight.sum(-1), 2.0, rtol=1e-6)


@pytest.mark.parametrize("policy", [None, TOKEN_DROP], ids=["none", "device"])
def test_bfloat16_routes_in_float32(policy, x, params):
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    widened = jax.tree.map(lambda w: w.astype(jnp.float32), low)
    y, load = layer(x.astype(jnp.bfloat16), low, ROUTER, policy)
    exact, exact_load = layer(x.astype(jnp.bfloat16).astype(jnp.float32), widened, ROUTER, policy)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(load.load, exact_load.load)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=0.03, atol=0.03)


def test_tokens_alone_are_sequences_of_one_position(x, params):
    flat = x.reshape(-1, D)
    y, load = layer(flat, params, ROUTER, TOKEN_DROP, virtual_devices=4)
    rows, rows_load = layer(flat[:, None], params, ROUTER, TOKEN_DROP, virtual_devices=4)
    assert y.shape == flat.shape
    np.testing.assert_array_equal(y, rows[:, 0])
    np.testing.assert_array_equal(load.load, rows_load.load)


def test_it_can_be_mapped_over(x, params):
    twice = jnp.stack([x, -x])
    for policy in (None, TOKEN_DROP):
        y = jax.jit(jax.vmap(lambda x, policy=policy: moe_layer(x, params, ROUTER, policy)[0]))(
            twice
        )
        for actual, one in zip(y, twice, strict=True):
            np.testing.assert_allclose(actual, layer(one, params, ROUTER, policy)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": jnp.zeros((0, S, D))}, InputError, "at least one token"),
        ({"x": jnp.zeros((B, 0, D))}, InputError, "at least one token"),
        ({"x": jnp.zeros((B, S, D + 1))}, InputError, "params.router has shape"),
        ({"valid": jnp.ones((B, S + 1), bool)}, InputError, "valid has shape"),
        ({"priority": jnp.ones((S, B), jnp.int32)}, InputError, "priority has shape"),
        (
            {"x": jnp.zeros((B, D)), "policy": CapacityPolicy(capacity=1, group="sequence")},
            InputError,
            "group='sequence'",
        ),
        ({"transport": "carrier pigeon"}, PolicyError, "einsum, gather, dropless"),
        (
            {"transport": "gather", "policy": CapacityPolicy(capacity=1, scope="device")},
            PolicyError,
            "scope='device'",
        ),
        (
            {"transport": "einsum", "policy": CapacityPolicy(capacity=1, overflow="fallback")},
            PolicyError,
            "fallback",
        ),
        ({"virtual_devices": 0}, PolicyError, "virtual_devices=0"),
        ({"virtual_devices": 13}, PolicyError, "ep_size=13"),
        ({"router": RouterConfig(num_experts=4, top_k=1)}, InputError, "params.router has shape"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, message, x, params):
    options = {"x": x, "params": params, "router": ROUTER, "policy": TOKEN_DROP} | options
    with pytest.raises(error, match=message):
        moe_layer(**options)


def test_experts_that_do_not_fit_the_router_are_refused(x, params):
    fewer = jax.tree.map(lambda w: w[:4], params.experts)
    with pytest.raises(InputError, match="hold 4 experts"):
        moe_layer(x, dataclasses.replace(params, experts=fewer), ROUTER, None)


def test_a_foreign_mesh_is_refused_rather_than_ignored(x, params, devices):
    mesh = jax.make_mesh(
        (2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2]
    )
    with pytest.raises(MeshError, match="use cam_jax"):
        moe_layer(x, params, ROUTER, None, mesh=mesh)
