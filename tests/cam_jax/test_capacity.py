"""The policy refuses what cannot hold, and the ceiling is the documented float64 arithmetic."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.capacity import (
    CapacityPolicy,
    buffer_capacity,
    expert_capacity,
    policy_capacity,
    traced_capacity,
)
from cam_jax.errors import PolicyError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"capacity_factor": -1}, "capacity_factor=-1"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan"),
        ({"capacity_factor": math.inf}, "capacity_factor=inf"),
        ({"capacity_factor": True}, "capacity_factor=True"),
        ({"capacity_factor": "1.5"}, "capacity_factor='1.5'"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 1.5}, "capacity=1.5"),
        ({"capacity": 4, "capacity_factor": 1.0}, "give one of them"),
        ({"metric": "best"}, "metric='best'"),
        ({"expand": -1}, "expand=-1"),
        ({"expand": 0}, "expand=0"),
        ({"expand": "global"}, "expand='global'"),
        ({"expand": True}, "expand=True"),
        ({"max_experts_per_token": 0}, "max_experts_per_token=0"),
        ({"scope": "node"}, "scope='node'"),
        ({"group": "token"}, "group='token'"),
        ({"overflow": "spill"}, "overflow='spill'"),
        ({"decode": "never"}, "decode='never'"),
        ({"reroute_rounds": 0}, "reroute_rounds=0"),
        ({"expert_drop": 1.0}, "expert_drop=1.0"),
        ({"expert_drop": -0.1}, "expert_drop=-0.1"),
        ({"expert_drop": math.nan}, "expert_drop=nan"),
        ({"min_capacity": 0}, "min_capacity=0"),
        ({"min_capacity": 5, "capacity": 2}, "min_capacity=5"),
        ({"capacity_factor": 10**400}, "capacity_factor=1000"),
        ({"seed": -1}, "seed=-1"),
        ({"protect_top_k": 1}, "protect_top_k=1"),
        ({"renormalize": None}, "renormalize=None"),
        ({"overflow": "fallback", "expand": "local"}, "expand='local'"),
        ({"overflow": "fallback", "expert_drop": 0.1}, "expert_drop=0.1"),
        ({"overflow": "fallback", "scope": "device"}, "scope='device'"),
        ({"scope": "device", "group": "batch"}, "group='batch'"),
        ({"scope": "device", "group": "sequence"}, "group='sequence'"),
        ({"scope": "device", "overflow": "reroute"}, "overflow='reroute'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refused(options, words):
    with pytest.raises(PolicyError, match=words.replace("(", r"\(")):
        CapacityPolicy(**options)


@pytest.mark.usefixtures("unchecked")
def test_a_policy_is_a_static_value():
    assert CapacityPolicy(capacity_factor=1) == CapacityPolicy(capacity_factor=1.0)
    assert hash(CapacityPolicy(capacity_factor=1)) == hash(CapacityPolicy(capacity_factor=1.0))
    assert hash(CapacityPolicy(capacity=np.int64(3))) == hash(CapacityPolicy(capacity=3))
    assert not CapacityPolicy().limited
    assert CapacityPolicy(capacity=3).limited


def test_the_order_of_evaluation_decides():
    # 1.1 · 8 · (400 / 64) is 55.000000000000007 in float64: 56 slots; exact arithmetic has 55.
    assert expert_capacity(400, num_experts=64, top_k=8, capacity_factor=1.1) == 56


@pytest.mark.parametrize(
    ("tokens", "factor", "minimum", "expected"),
    [
        (64, 1.0, 1, 8),
        (64, 1.5, 1, 12),
        (65, 1.0, 1, 9),
        (1, 0.1, 1, 1),
        (0, 1.0, 2, 2),
        (1, 1.0, 4, 4),
    ],
)
def test_hand_computed(tokens, factor, minimum, expected):
    got = expert_capacity(
        tokens, num_experts=16, top_k=2, capacity_factor=factor, min_capacity=minimum
    )
    assert got == expected


def test_a_huge_factor_allocates_nothing_beyond_the_tokens():
    policy = CapacityPolicy(capacity_factor=1e300)
    assert policy_capacity(policy, 10, num_experts=4, top_k=2) == 2**31 - 1
    assert buffer_capacity(policy, 10, num_experts=4, top_k=2) == 10
    assert buffer_capacity(CapacityPolicy(capacity=16384), 10, num_experts=4, top_k=2) == 10


@pytest.mark.usefixtures("unchecked")
def test_arguments_are_checked():
    with pytest.raises(PolicyError, match="num_tokens=-1"):
        expert_capacity(-1, num_experts=4, top_k=1, capacity_factor=1.0)
    with pytest.raises(PolicyError, match="capacity_factor=0"):
        expert_capacity(1, num_experts=4, top_k=1, capacity_factor=0)


_LOOKUP = jnp.arange(65)


@given(
    factor=st.floats(0.01, 20.0),
    experts=st.integers(1, 256),
    top_k=st.integers(1, 8),
    minimum=st.integers(1, 5),
)
def test_the_device_looks_up_what_the_host_computes(factor, experts, top_k, minimum):
    policy = CapacityPolicy(capacity_factor=factor, min_capacity=minimum)
    sizes = {"num_experts": experts, "top_k": top_k}
    looked_up = traced_capacity(policy, _LOOKUP, max_tokens=64, **sizes)
    assert np.array_equal(looked_up, [policy_capacity(policy, n, **sizes) for n in range(65)])


def test_x64_changes_no_capacity():
    policy = CapacityPolicy(capacity_factor=1.1)
    with jax.enable_x64(True):
        got = traced_capacity(policy, jnp.int32(400), max_tokens=400, num_experts=64, top_k=8)
    assert (int(got), got.dtype) == (56, jnp.int32)
