"""The mesh against one device over all that equality could depend on.

Experts per device (1, 3, 8, and what does not divide), shapes of the mesh on 1, 2, 4 and 8 devices,
policies that between them use every option, padding on either side and in between, whole empty
rows, and routers that send everything to one expert or to one device. One program per policy and
mesh serves all the data.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import (
    CapacityPolicy,
    ExpertWeights,
    MoEParams,
    RouterConfig,
    SharedExpert,
    make_mesh,
    moe_layer,
)

pytestmark = pytest.mark.slow

D, F, B, S = 8, 4, 9, 5

# Experts, mesh: per device 1, 3, 8, 8, 3 (of 5 on 2), 2 (of 7 on 4), and one device.
PLACES = {
    "1 each on 8": (8, (1, 8, 1)),
    "3 each on 4": (12, (1, 4, 1)),
    "8 each on 2x2": (16, (2, 2, 1)),
    "8 each on 2, tensor 2": (16, (1, 2, 2)),
    "5 on 2, data 2, tensor 2": (5, (2, 2, 2)),
    "7 on 4, tensor 2": (7, (1, 4, 2)),
    "1 device": (6, (1, 1, 1)),
}

# Every option of CapacityPolicy, and every value of those that have few.
POLICIES = {
    "none": None,
    "first": CapacityPolicy(capacity_factor=0.9, metric="first"),
    "last, renormalised": CapacityPolicy(capacity_factor=0.9, metric="last", renormalize=True),
    "random": CapacityPolicy(capacity=2, metric="random", seed=5),
    "expanded": CapacityPolicy(capacity_factor=1.1, expand="local"),
    "best local": CapacityPolicy(
        capacity_factor=1.0, expand=2, protect_top_k=True, max_experts_per_token=2
    ),
    "device": CapacityPolicy(capacity_factor=0.7, scope="device"),
    "device, expanded": CapacityPolicy(capacity_factor=0.7, scope="device", expand=1),
    "sequence": CapacityPolicy(capacity_factor=0.8, group="sequence", expand="local"),
    "batch": CapacityPolicy(capacity_factor=0.8, group="batch", min_capacity=2),
    "reroute": CapacityPolicy(capacity_factor=0.8, overflow="reroute", reroute_rounds=2),
    "batch, reroute": CapacityPolicy(capacity_factor=0.8, group="batch", overflow="reroute"),
    "fallback": CapacityPolicy(capacity_factor=1.0, overflow="fallback"),
    "expert drop": CapacityPolicy(capacity_factor=1.2, expert_drop=0.3, expand="local"),
}


@functools.partial(jax.jit, static_argnames=("router", "policy", "mesh", "virtual"))
def layer(x, params, valid, priority, *, router, policy, mesh=None, virtual=1):
    return moe_layer(
        x,
        params,
        router,
        policy,
        mesh=mesh,
        virtual_devices=virtual,
        valid=valid,
        priority=priority,
        layer=3,
    )


@functools.cache
def parameters(experts):
    draw = np.random.default_rng(experts).standard_normal

    def normal(*shape):
        return jnp.asarray(draw(shape), jnp.float32)

    return MoEParams(
        router=normal(experts, D),
        experts=ExpertWeights(
            gate=normal(experts, F, D), up=normal(experts, F, D), down=normal(experts, D, F)
        ),
        shared=SharedExpert(
            gate=normal(F, D), up=normal(F, D), down=normal(D, F), router=normal(1, D)
        ),
    )


def data_sets(experts, local):
    """(x, router weights, valid) by name."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((B, S, D)).astype(np.float32)
    own = np.asarray(parameters(experts).router)
    everything = np.ones((B, S), bool)
    left = np.arange(S) >= rng.integers(0, S, B)[:, None]
    right = left[:, ::-1]
    rows = rng.random((B, S)) < 0.7
    rows[[2, 8]] = False
    one, device = np.zeros((2, experts, D), np.float32)
    one[0] = device[:local] = 5.0
    positive = np.abs(x)
    return {
        "no padding": (x, own, everything),
        "left": (x + own[0], own, left),
        "right": (x + own[0], own, right),
        "holes and empty rows": (x, own, rows),
        "all to one expert": (positive, one, left),
        "all to one device": (positive, device + 0.01 * own, right),
    }


# A quarter of all pairs, in which each policy and each place comes often; CAM_JAX_EXAMPLES: all.
PAIRS = [
    (place, policy)
    for i, place in enumerate(PLACES)
    for j, policy in enumerate(POLICIES)
    if (i + j) % 4 == 0 or "CAM_JAX_EXAMPLES" in os.environ
]


@pytest.mark.parametrize(("place", "policy"), PAIRS)
def test_a_mesh_computes_what_one_device_does(place, policy, devices):
    experts, (data, expert, tensor) = PLACES[place]
    router = RouterConfig(num_experts=experts, top_k=2, normalize=True)
    options = {"router": router, "policy": POLICIES[policy]}
    mesh = make_mesh(data=data, expert=expert, tensor=tensor, devices=devices)
    priority = jnp.asarray(np.random.default_rng(2).integers(0, 3, (B, S)), jnp.int32)
    for name, (x, weights, valid) in data_sets(experts, -(-experts // expert)).items():
        params = MoEParams(
            router=jnp.asarray(weights),
            experts=parameters(experts).experts,
            shared=parameters(experts).shared,
        )
        y, load = layer(x, params, valid, priority, mesh=mesh, **options)
        expected, loads = layer(x, params, valid, priority, virtual=(data, expert), **options)
        np.testing.assert_allclose(y, expected, atol=2e-5, rtol=1e-5, err_msg=name)
        assert not np.asarray(y)[~valid].any(), name
        for field in vars(load):
            np.testing.assert_array_equal(
                getattr(load, field), getattr(loads, field), err_msg=f"{name}: {field}"
            )
