"""The reference cases of tests/data/routing_dev.npz: kept sets exactly, weights to 1e-6."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import CapacityPolicy, route, select_from_scores

DATA = np.load(Path(__file__).parents[1] / "data" / "routing_dev.npz")
CASES = json.loads(str(DATA["meta_json"]))


def both_plans(scores, top_k, policy, devices):
    """The plan, and the one that renormalizes: one compilation for both."""

    def plans(scores):
        selection = select_from_scores(scores, top_k)
        renormalized = dataclasses.replace(policy, renormalize=True)
        return route(selection, policy, **devices), route(selection, renormalized, **devices)

    return jax.jit(plans)(scores)


def test_all_cases_are_there():
    assert len(CASES) == 40


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case):
    name, expands = case["name"], case["strategy"] == "overselect"
    policy = CapacityPolicy(
        capacity_factor=case["gamma"],
        metric="score" if expands else case["strategy"],
        expand="local" if expands else None,
    )
    devices = {}
    if case["local"] is not None:
        size = len(case["local"])
        devices = {"ep_size": case["E"] // size, "ep_rank": case["local"][0] // size}
    scores = jnp.asarray(DATA[f"{name}.scores"])
    plan, renormalized = both_plans(scores, case["top_k"], policy, devices)
    assert np.array_equal(plan.kept(), DATA[f"{name}.kept"])
    weights = plan.combine_tensor().sum(-1)
    assert np.abs(weights - DATA[f"{name}.weights"]).max() <= 1e-6
    assert int(plan.load.capacity) == case["capacity"]
    assert int(plan.load.load.max()) == case["max_load_after"]
    assert int(plan.load.load.sum()) == case["slots_after"]
    assert int(plan.load.unserved_tokens) == case["zero_expert_tokens"]
    assert int(plan.kept().sum(-1).max()) == case["max_experts_per_token"]
    weights = renormalized.combine_tensor().sum(-1)
    assert np.abs(weights - DATA[f"{name}.weights_renorm"]).max() <= 1e-6
