"""What must hold for every routing, whatever the scores, the padding and the policy.

One shape (T=12, E=6, K=2) and a handful of policies, each compiled once; hypothesis chooses the
data. The option grid against the plain-loop reference runs in the slow tier.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cam_jax import CapacityPolicy, capacity_pass, route, select_from_scores
from cam_jax.errors import PolicyError
from tests.routing_reference import reference_route

T, E, K = 12, 6, 2
POLICIES = [
    CapacityPolicy(capacity_factor=1.0),
    CapacityPolicy(capacity_factor=0.7, expand="local", max_experts_per_token=2),
    CapacityPolicy(capacity_factor=1.0, metric="random", overflow="reroute", reroute_rounds=2),
    CapacityPolicy(capacity_factor=1.0, scope="device", metric="last", expert_drop=0.2),
    CapacityPolicy(capacity_factor=1.3, expand=2, protect_top_k=True, renormalize=True),
]
# Few distinct values, so that ties are common.
TIED = hnp.arrays(np.float32, (T, E), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
SCORES = st.one_of(TIED, hnp.arrays(np.float32, (T, E), elements=st.floats(0, 1, width=32)))
MASKS = hnp.arrays(bool, (T,))


@jax.jit
def _select(scores):
    return select_from_scores(scores, K)


_route = jax.jit(route, static_argnums=1, static_argnames="ep_size")


def routed(scores, policy, *, valid=None, priority=None, ep_size=2, ep_rank=1, top_k=K):
    scores = jnp.asarray(scores)
    selection = _select(scores) if top_k == K else select_from_scores(scores, top_k)
    return _route(
        selection,
        policy,
        valid=jnp.ones(scores.shape[0], bool) if valid is None else jnp.asarray(valid),
        priority=None if priority is None else jnp.asarray(priority),
        layer=jnp.int32(1),
        group_index=jnp.int32(2),
        ep_size=ep_size,
        ep_rank=jnp.int32(ep_rank),
    )


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@given(scores=SCORES, valid=MASKS)
def test_no_ceiling_is_exceeded_and_no_slot_used_twice(policy, scores, valid):
    plan = routed(scores, policy, valid=valid)
    kept, ceiling = np.asarray(plan.kept()), int(plan.load.capacity)
    per_bin = kept.sum(0) if policy.scope == "expert" else kept.reshape(T, 2, 3).sum((0, 2))
    assert per_bin.max() <= ceiling * (1 if policy.scope == "expert" else 3)
    assert not kept[~valid].any()

    token, expert = np.asarray(plan.token).ravel(), np.asarray(plan.expert).ravel()
    assert ((token == T) == (expert == E)).all()
    pairs = list(zip(token[token < T], expert[token < T], strict=True))
    assert len(set(pairs)) == len(pairs) == kept.sum()
    assert all(kept[t, e] for t, e in pairs)

    slots, choices = np.asarray(plan.choice_slot), np.asarray(plan.choice_expert)
    used = slots[choices < E]
    assert len(set(used)) == len(used)
    assert (slots[choices == E] == token.size).all()
    assert np.array_equal(token[used], np.nonzero(choices < E)[0])
    assert np.array_equal(expert[used], choices[choices < E])
    weights = np.asarray(plan.choice_weight)
    assert (weights[choices == E] == 0).all()
    assert np.array_equal(np.asarray(plan.weight).ravel()[used], weights[choices < E])


@given(scores=SCORES)
def test_under_score_what_is_kept_beats_what_is_dropped(scores):
    plan = routed(scores, POLICIES[0])
    kept, asked = np.asarray(plan.kept()), np.asarray(routed(scores, None).kept())
    for e in range(E):
        dropped = scores[asked[:, e] & ~kept[:, e], e]
        if dropped.size:
            assert kept[:, e].sum() == int(plan.load.capacity)
            assert scores[kept[:, e], e].min() >= dropped.max()


@given(scores=SCORES, valid=MASKS)
def test_every_original_assignment_is_kept_or_counted_as_dropped(scores, valid):
    for policy in POLICIES:
        load = routed(scores, policy, valid=valid).load
        kept_originals = int(load.load.sum() - load.expanded - load.rerouted)
        assert int(load.demand.sum()) == kept_originals + int(load.dropped)


@given(scores=SCORES, valid=MASKS)
def test_a_large_capacity_is_no_policy(scores, valid):
    large = routed(scores, CapacityPolicy(capacity_factor=100.0), valid=valid)
    trained = routed(scores, None, valid=valid)
    assert np.array_equal(large.kept(), trained.kept())
    assert np.array_equal(large.choice_weight, trained.choice_weight)


@pytest.mark.parametrize("policy", POLICIES[:3], ids=range(3))
@given(
    scores=SCORES,
    valid=MASKS,
    junk=hnp.arrays(np.float32, (T, E), elements=st.floats(-9, 9, width=32)),
)
def test_padding_changes_nothing(policy, scores, valid, junk):
    """The valid rows, alone and in order, behind each other, route as they do among padding."""
    count = int(valid.sum())
    scattered, packed = np.where(valid[:, None], scores, junk), junk[::-1].copy()
    packed[:count] = scores[valid]
    among = routed(scattered, policy, valid=valid)
    alone = routed(packed, policy, valid=np.arange(T) < count)
    assert np.array_equal(np.asarray(among.kept())[valid], np.asarray(alone.kept())[:count])
    assert jax.tree.all(jax.tree.map(np.array_equal, among.load, alone.load))


@given(seed=st.integers(0, 2**32 - 1))
def test_permuting_tokens_without_ties_permutes_the_result(seed):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(T * E).reshape(T, E).astype(np.float32)
    order = rng.permutation(T)
    for policy in (POLICIES[0], POLICIES[1], POLICIES[4]):
        plain, permuted = routed(scores, policy), routed(scores[order], policy)
        assert np.array_equal(np.asarray(plain.kept())[order], permuted.kept())


@given(
    scores=SCORES,
    row=hnp.arrays(np.float32, (E,), elements=st.sampled_from([0.5, np.nan, np.inf, -np.inf])),
)
def test_a_broken_row_changes_no_other_row(scores, row):
    broken = scores.copy()
    broken[5] = row
    asks_nothing = scores.copy()
    asks_nothing[5] = np.nan
    bad = not np.isfinite(row).all() and (np.isnan(row).any() or (row == np.inf).any())
    if not bad and not np.isneginf(row).all():
        return
    for policy in POLICIES:
        a, b = routed(broken, policy), routed(asks_nothing, policy)
        assert np.array_equal(a.kept(), b.kept())
        assert not np.asarray(a.kept())[5].any()
        assert np.isfinite(np.asarray(a.choice_weight)).all()


def _random_policy(rng):
    while True:
        options = {
            "capacity_factor": rng.choice([None, 0.3, 0.7, 1.0, 1.5, 3.0, 50.0]),
            "metric": rng.choice(["score", "first", "last", "random"]),
            "expand": rng.choice([None, None, "local", 1, 2, 5]),
            "protect_top_k": rng.random() < 0.3,
            "max_experts_per_token": rng.choice([None, None, 1, 2, 3]),
            "scope": rng.choice(["expert", "expert", "device"]),
            "overflow": rng.choice(["drop", "drop", "reroute"]),
            "reroute_rounds": rng.choice([1, 2, 3]),
            "expert_drop": rng.choice([0.0, 0.0, 0.25, 0.5]),
            "min_capacity": rng.choice([1, 1, 3]),
            "seed": rng.randrange(5),
        }
        try:
            return CapacityPolicy(**options)
        except PolicyError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_option_grid_against_plain_loops(seed):
    """Kept sets and counts of random policies equal those of the plain-loop reference."""
    rng, data = random.Random(seed), np.random.default_rng(seed)
    policy, ep_size = _random_policy(rng), rng.choice([1, 2, 3, 4, 6])
    for tied, masked, share in itertools.product([True, False], [True, False], [1.0, 0.5]):
        if tied:
            choice = data.integers(0, 4, (T, E)).astype(np.float32)
        else:
            choice = data.random((T, E), np.float32) + np.linspace(0, 1, E, dtype=np.float32)
        if masked:
            choice[data.random((T, E)) < 0.2] = -np.inf
            choice[np.isneginf(choice).all(1)] = 1.0
        valid = data.random(T) < share
        priority = data.integers(-2, 2, T).astype(np.int32)
        rank = int(data.integers(ep_size))
        plan = routed(choice, policy, valid=valid, priority=priority, ep_size=ep_size, ep_rank=rank)
        expected, counts = reference_route(
            np.where(np.isneginf(choice), 0, choice),
            K,
            policy,
            valid=valid,
            priority=priority,
            draws=np.asarray(capacity_pass.random_draws(policy.seed, 1, 2, jnp.asarray(valid), E)),
            ep_size=ep_size,
            ep_rank=rank,
            choice=choice,
        )
        assert np.array_equal(plan.kept(), expected)
        assert np.array_equal(plan.load.load, expected.sum(0))
        for name, value in counts.items():
            assert np.array_equal(getattr(plan.load, name), value), name
