"""Every family under policies: loose ceilings change nothing, meshes compute what one device does.

What parity without a policy cannot show: that shared experts and selection bias go with dropped
tokens, padding and expert parallelism.
"""

import os
from functools import partial

import jax
import numpy as np
import pytest

from cam_jax import CapacityPolicy, make_mesh
from cam_jax.models import decoder
from tests.cam_jax.test_mesh_grid import POLICIES
from tests.models.tiny import TINY, params_of, tiny, tokens

pytestmark = pytest.mark.slow

# Every policy on every family; a quarter of the pairs, in which each comes often, unless all are
# asked for (CAM_JAX_EXAMPLES).
PAIRS = [
    (family, policy)
    for i, family in enumerate(sorted(TINY))
    for j, policy in enumerate(POLICIES)
    if (i + j) % 4 == 0 or "CAM_JAX_EXAMPLES" in os.environ
]


@partial(jax.jit, static_argnames=("config", "policy", "mesh", "virtual"))
def run(config, params, ids, valid, *, policy=None, mesh=None, virtual=1):
    hidden, _, load = decoder.forward(
        config, params, ids, valid=valid, policy=policy, mesh=mesh, virtual_devices=virtual
    )
    return decoder.logits(config, params, hidden), load


def case(family):
    """A model of two layers, of which DeepSeek's first is dense, and four rows with padding."""
    config = tiny(family, num_hidden_layers=2)
    valid = np.ones((4, 6), bool)
    valid[1, :2] = valid[2, -3:] = False
    return config, params_of(config), tokens(4, 6), valid


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_loose_ceiling_changes_nothing(family):
    config, params, ids, valid = case(family)
    policy = CapacityPolicy(capacity_factor=float(config.moe.router.num_experts))
    with jax.default_matmul_precision("highest"):
        expected, _ = run(config, params, ids, valid)
        found, load = run(config, params, ids, valid, policy=policy)
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=2e-5)
    assert np.asarray(load.dropped).sum() == 0
    assert (np.asarray(load.tokens) == valid.sum()).all()


@pytest.mark.parametrize(("family", "policy"), PAIRS)
def test_a_mesh_computes_what_one_device_does(family, policy, devices):
    config, params, ids, valid = case(family)
    mesh = make_mesh(data=2, expert=2, devices=devices)
    ceiling = POLICIES[policy]
    with jax.default_matmul_precision("highest"):
        expected, load = run(config, params, ids, valid, policy=ceiling, virtual=(2, 2))
        found, loads = run(config, params, ids, valid, policy=ceiling, mesh=mesh)
    assert np.isfinite(np.asarray(found)).all()
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=2e-5)
    np.testing.assert_array_equal(loads.load, load.load)
