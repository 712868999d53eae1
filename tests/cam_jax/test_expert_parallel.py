"""The layer on a mesh equals the layer on one device with the same groups, and holds its ceiling.

One layer (12 experts, top-3, with a shared expert) on eight CPU devices.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cam_jax import (
    CapacityPolicy,
    ExpertWeights,
    MoEParams,
    RouterConfig,
    SharedExpert,
    make_mesh,
    moe_layer,
)
from cam_jax.errors import MeshError, PolicyError
from cam_jax.expert_parallel import param_specs
from cam_jax.mesh import TOKENS

E, K, D, F, B, S = 12, 3, 8, 4, 11, 5
ROUTER = RouterConfig(num_experts=E, top_k=K, normalize=True)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = MoEParams(
    router=normal(0, E, D),
    experts=ExpertWeights(gate=normal(1, E, F, D), up=normal(2, E, F, D), down=normal(3, E, D, F)),
    shared=SharedExpert(
        gate=normal(4, F, D), up=normal(5, F, D), down=normal(6, D, F), router=normal(7, 1, D)
    ),
)
# Three expert-parallel devices' worth of skew: the first experts are asked for most.
X = normal(8, B, S, D) + 0.6 * PARAMS.router[0]
VALID = jnp.asarray(np.random.default_rng(0).random((B, S)) < 0.8)
PRIORITY = jnp.asarray(np.random.default_rng(1).integers(0, 3, (B, S)), jnp.int32)


@functools.partial(jax.jit, static_argnames=("policy", "mesh", "virtual", "transport", "router"))
def layer(x, params, policy, mesh=None, virtual=1, transport=None, router=ROUTER, priority=None):
    return moe_layer(
        x,
        params,
        router,
        policy,
        mesh=mesh,
        virtual_devices=virtual,
        valid=VALID,
        priority=priority,
        layer=1,
        transport=transport,
    )


def assert_same(
    policy, *, data=1, expert, tensor=1, x=X, params=PARAMS, priority=None, transport=None
):
    mesh = make_mesh(data=data, expert=expert, tensor=tensor)
    router = RouterConfig(num_experts=params.router.shape[0], top_k=K, normalize=True)
    options = {"policy": policy, "router": router, "priority": priority}
    y, load = layer(x, params, mesh=mesh, transport=transport, **options)
    expected, expected_load = layer(x, params, virtual=(data, expert), **options)
    assert np.allclose(y, expected, atol=1e-5)
    for name in vars(load):
        assert np.array_equal(getattr(load, name), getattr(expected_load, name)), name
    return load


POLICIES = {
    "none": None,
    "score": CapacityPolicy(capacity_factor=1.0),
    "random": CapacityPolicy(capacity_factor=0.7, metric="random", renormalize=True),
    "expand": CapacityPolicy(capacity_factor=1.0, expand="local", max_experts_per_token=3),
    "device": CapacityPolicy(capacity_factor=0.6, scope="device", expand=2, protect_top_k=True),
    "sequence": CapacityPolicy(capacity_factor=1.0, group="sequence", overflow="reroute"),
    "batch": CapacityPolicy(capacity_factor=0.8, group="batch", expand="local", expert_drop=0.2),
    "fallback": CapacityPolicy(capacity_factor=0.8, overflow="fallback"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_on_eight_expert_devices(name, devices):
    """12 experts do not divide over 8 devices: the last two hold dead ones only."""
    load = assert_same(POLICIES[name], expert=8)
    assert name in ("none", "fallback") or int(load.dropped) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, (1, 4, 2)) for name in POLICIES]
    + [("score", (4, 2, 1)), ("score", (1, 1, 4)), ("batch", (2, 1, 1)), ("none", (2, 2, 2))],
)
def test_every_policy_on_every_shape_of_mesh(name, sizes, devices):
    assert_same(POLICIES[name], data=sizes[0], expert=sizes[1], tensor=sizes[2])


def test_data_expert_and_tensor_together(devices):
    assert_same(POLICIES["score"], data=2, expert=2, tensor=2, priority=PRIORITY)
    assert_same(POLICIES["batch"], data=2, expert=2, tensor=2)
    assert_same(POLICIES["device"], data=2, expert=2, tensor=2)


def test_a_fallback_that_fits_runs_the_buffers(devices):
    load = assert_same(CapacityPolicy(capacity=100, overflow="fallback"), expert=4)
    assert (int(load.dropped), int(load.capacity)) == (0, 100)


@pytest.mark.parametrize("name", ["none", "score", "device", "batch"])
def test_all_tokens_to_one_device(name, devices):
    """Adversarial routing: every token wants experts 0, 1 and 2, which two devices hold."""
    router = jnp.zeros((E, D)).at[:K].set(5.0)
    params = MoEParams(router=router, experts=PARAMS.experts)
    load = assert_same(POLICIES[name], expert=4, x=jnp.abs(X), params=params)
    assert np.array_equal(np.asarray(load.demand)[K:], np.zeros(E - K))


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_ragged_exchange_moves_what_gathering_moves(sizes, devices):
    """The transport of TPUs with its one primitive replaced; 12 experts on 8, and all to one."""
    data, expert, tensor = sizes
    same = functools.partial(
        assert_same, None, data=data, expert=expert, tensor=tensor, transport="ragged"
    )
    same()
    router = jnp.zeros((E, D)).at[:K].set(5.0)
    same(x=jnp.abs(X), params=MoEParams(router=router, experts=PARAMS.experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "transport"),
    [
        ("none", (1, 4, 1), "gathered"),
        ("none", (2, 2, 2), "ragged"),
        ("score", (2, 2, 2), None),
        ("batch", (1, 4, 2), None),
        ("device", (1, 4, 1), None),
        ("fallback", (1, 4, 1), None),
    ],
)
def test_gradients_are_those_of_one_device(name, sizes, transport, devices):
    data, expert, tensor = sizes
    mesh = make_mesh(data=data, expert=expert, tensor=tensor)

    def gradient(**where):
        def loss(params, x):
            y, _ = moe_layer(x, params, ROUTER, POLICIES[name], **where)
            return jnp.mean(y**2)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X[:8])

    found = gradient(mesh=mesh, transport=transport)
    expected = gradient(virtual_devices=(data, expert))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


def test_a_broken_token_disturbs_no_device(devices):
    x = X.at[2, 1].set(jnp.nan).at[9, 0, 0].set(jnp.inf)
    valid = VALID.at[2, 1].set(True).at[9, 0].set(True)
    mesh = make_mesh(expert=4)
    run = jax.jit(lambda x: moe_layer(x, PARAMS, ROUTER, POLICIES["score"], mesh=mesh, valid=valid))
    y, load = run(x)
    assert int(load.nonfinite_tokens) == 2
    broken = np.zeros((B, S), bool)
    broken[[2, 9], [1, 0]] = True
    assert np.isfinite(np.asarray(y)[~broken]).all()


def collectives(policy, *, expert=4):
    """Kinds and shapes of the collectives of the compiled layer, everything lying where it runs."""
    mesh = make_mesh(expert=expert)
    put = functools.partial(jax.tree.map, lambda leaf, spec: jax.device_put(
        leaf, NamedSharding(mesh, spec)))  # fmt: skip
    x, params = put(X[:8], P(TOKENS)), put(PARAMS, param_specs(PARAMS))

    def run(x, params):
        y, load = moe_layer(x, params, ROUTER, policy, mesh=mesh)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(TOKENS))), load

    text = jax.jit(run).lower(x, params).compile().as_text()
    kinds = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
    found = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)
    return [(kind, shape) for shape, kind in found]


def test_token_drop_is_two_all_to_alls_and_one_small_reduction(devices):
    found = collectives(POLICIES["score"])
    exchanges = [shape for kind, shape in found if kind == "all-to-all"]
    assert len(exchanges) == 2
    assert all("f32" in shape for shape in exchanges)
    others = [entry for entry in found if entry[0] != "all-to-all"]
    assert [kind for kind, _ in others] == ["all-reduce"]
    assert "s32" in others[0][1]


def test_expanded_drop_sends_not_a_byte_more(devices):
    expanded = CapacityPolicy(capacity_factor=1.0, expand="local")
    assert collectives(expanded) == collectives(POLICIES["score"])


def test_device_scope_adds_one_exchange_of_ids(devices):
    found = collectives(POLICIES["device"])
    exchanges = [shape for kind, shape in found if kind == "all-to-all"]
    assert len(exchanges) == 3
    assert sum("s32" in shape for shape in exchanges) == 1


def test_new_data_compiles_nothing_new(devices):
    mesh = make_mesh(expert=4)
    layer(X, PARAMS, POLICIES["score"], mesh=mesh)
    before = layer._cache_size()
    layer(X[::-1] * 2, PARAMS, POLICIES["score"], mesh=mesh)
    assert layer._cache_size() == before


def test_what_does_not_fit_is_refused(devices):
    with pytest.raises(MeshError, match="expert=8 devices for 4 experts"):
        small = jax.tree.map(lambda leaf: leaf[:4], PARAMS.experts)
        moe_layer(
            X,
            MoEParams(router=PARAMS.router[:4], experts=small),
            RouterConfig(num_experts=4, top_k=2),
            None,
            mesh=make_mesh(expert=8),
        )
    with pytest.raises(MeshError, match="tensor=8"):
        moe_layer(X, PARAMS, ROUTER, None, mesh=make_mesh(expert=1, tensor=8))
    with pytest.raises(MeshError, match="virtual_devices=2"):
        moe_layer(X, PARAMS, ROUTER, None, mesh=make_mesh(expert=2), virtual_devices=2)
    with pytest.raises(MeshError, match="a batch of 3 for data=2 x expert=2 = 4 devices"):
        moe_layer(X[:3], PARAMS, ROUTER, None, mesh=make_mesh(data=2, expert=2))
    with pytest.raises(PolicyError, match="needs 'all_to_all'"):
        mesh = make_mesh(expert=2)
        moe_layer(X, PARAMS, ROUTER, POLICIES["score"], mesh=mesh, transport="ragged")
    with pytest.raises(PolicyError, match="'gather' on a mesh"):
        mesh = make_mesh(expert=2)
        moe_layer(X, PARAMS, ROUTER, POLICIES["score"], mesh=mesh, transport="gather")
