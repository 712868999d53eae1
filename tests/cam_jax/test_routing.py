"""Hand-computed cases of every option of the policy, ties included.

Four tokens t0..t3 and three experts A B C with top-1 unless a test says otherwise. Kept sets are
written as one string per token.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import (
    CapacityPolicy,
    RouterConfig,
    combine,
    dispatch,
    route,
    select,
    select_from_scores,
)
from cam_jax.errors import InputError, PolicyError

NAMES = "ABCDEFGH"
#                    A    B    C
SCORES = np.array([[0.6, 0.3, 0.1],   # t0
                   [0.9, 0.0, 0.1],   # t1
                   [0.6, 0.1, 0.3],   # t2   t0 and t2 tie for A
                   [0.2, 0.7, 0.1]],  # t3
                  np.float32)  # fmt: skip


def kept(plan):
    return ["".join(NAMES[e] for e in np.flatnonzero(row)) for row in np.asarray(plan.kept())]


_select = jax.jit(select_from_scores, static_argnums=1)
_route = jax.jit(route, static_argnums=1, static_argnames="ep_size")


def plan_of(
    scores=SCORES, top_k=1, *, valid=None, priority=None, demand=None, devices=None, **policy
):
    return _route(
        _select(jnp.asarray(scores, jnp.float32), top_k),
        CapacityPolicy(**policy),
        valid=None if valid is None else jnp.asarray(valid, bool),
        priority=None if priority is None else jnp.asarray(priority, jnp.int32),
        demand=None if demand is None else jnp.asarray(demand, jnp.int32),
        **(devices or {}),
    )


def test_no_ceiling_drops_nothing():
    plan = plan_of()
    assert kept(plan) == ["A", "A", "A", "B"]
    assert np.array_equal(plan.load.demand, [3, 1, 0])
    assert int(plan.load.dropped) == 0
    assert float(plan.load.slot_use) == 1.0
    assert kept(route(select_from_scores(jnp.asarray(SCORES), 1), None)) == kept(plan)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("score", ["A", "A", "", "B"]),  # t1 has the best score; t0 ties with t2, lower index wins
        ("first", ["A", "A", "", "B"]),
        ("last", ["", "A", "A", "B"]),
    ],
)
def test_metric(metric, expected):
    plan = plan_of(capacity=2, metric=metric)
    assert kept(plan) == expected
    assert np.array_equal(plan.load.load, [2, 1, 0])
    assert int(plan.load.dropped_capacity) == 1
    assert int(plan.load.unserved_tokens) == 1
    assert float(plan.load.slot_use) == 3 / 6


def test_all_tied_keeps_the_lower_indices():
    plan = plan_of(np.full((5, 2), 0.5), capacity=3)
    assert kept(plan) == ["A", "A", "A", "", ""]


def test_minus_zero_ties_with_zero():
    assert kept(plan_of(np.array([[-0.0, -1], [0.0, -1]]), capacity=1)) == ["A", ""]
    assert kept(plan_of(np.array([[0.0, -1], [-0.0, -1]]), capacity=1)) == ["A", ""]


def test_random_is_seeded_and_depends_on_layer_and_group():
    scores = np.tile(np.array([[1.0, 0.0]]), (32, 1))

    def chosen(seed=0, layer=0, group_index=0):
        return kept(
            plan_of(
                scores,
                capacity=8,
                metric="random",
                seed=seed,
                devices={"layer": layer, "group_index": group_index},
            )
        )

    assert chosen() == chosen()
    assert chosen().count("A") == 8
    others = [chosen(seed=1), chosen(layer=1), chosen(group_index=1)]
    assert all(other != chosen() for other in others)
    assert all(other.count("A") == 8 for other in others)
    traced = jax.jit(lambda layer: plan_of(scores, capacity=8, metric="random",
                                           devices={"layer": layer}).kept())  # fmt: skip
    assert np.array_equal(traced(jnp.int32(1)).any(-1), [k == "A" for k in chosen(layer=1)])


def test_random_draws_ignore_padding_and_x64():
    scores = np.tile(np.array([[1.0, 0.0]]), (12, 1))
    bare = kept(plan_of(scores[:8], capacity=3, metric="random"))
    valid = np.array([0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0], bool)
    padded = kept(plan_of(scores, capacity=3, metric="random", valid=valid))
    assert [k for k, real in zip(padded, valid, strict=True) if real] == bare
    with jax.enable_x64(True):
        assert kept(plan_of(scores[:8], capacity=3, metric="random")) == bare


def test_priority_comes_before_the_metric():
    plan = plan_of(capacity=1, priority=[0, 0, 5, 0])
    assert kept(plan) == ["", "", "A", "B"]
    # equal priorities: the score decides again
    assert kept(plan_of(capacity=1, priority=[2, 2, 2, 2])) == ["", "A", "", "B"]
    lowest = np.iinfo(np.int32).min
    plan = plan_of(capacity=2, metric="first", priority=[lowest, lowest, lowest + 1, lowest])
    assert kept(plan) == ["A", "", "A", "B"]


def test_expand_offers_the_local_experts():
    # one device holds A B C: everyone is a candidate everywhere
    plan = plan_of(capacity=2, expand="local")
    # A: t1 .9, then t0 .6 (ties t2).  B: t3 .7, t0 .3.  C: t2 .3, then t0 .1 (ties t1, t3)
    assert kept(plan) == ["ABC", "A", "C", "B"]
    assert int(plan.load.expanded) == 3
    assert int(plan.load.dropped_capacity) == 1
    # two devices hold (A B) and (C): the tokens of device 1 are offered C only
    plan = plan_of(capacity=2, expand="local", devices={"ep_size": 2, "ep_rank": 1})
    assert kept(plan) == ["AC", "A", "C", "B"]


def test_expand_to_the_m_best_counts_those_already_chosen():
    # t0 A.6 B.3: its single best local expert is A itself, so nothing is added
    assert kept(plan_of(capacity=4, expand=1)) == ["A", "A", "A", "B"]
    assert kept(plan_of(capacity=4, expand=2)) == ["AB", "AC", "AC", "AB"]


def test_local_overrides_the_device():
    by_group = plan_of(
        capacity=4, expand="local", devices={"local": jnp.array([False, True, False])}
    )
    assert kept(by_group) == ["AB", "AB", "AB", "B"]
    local = jnp.array([[True, False, False]] * 3 + [[False, False, True]])
    assert kept(plan_of(capacity=4, expand="local", devices={"local": local})) == [
        "A", "A", "A", "BC",
    ]  # fmt: skip
    ranks = jnp.array([0, 0, 1, 2])
    per_token = plan_of(capacity=4, expand="local", devices={"ep_size": 3, "ep_rank": ranks})
    assert kept(per_token) == ["A", "A", "AB", "BC"]


def test_a_candidate_may_displace_a_top_k_assignment_unless_protected():
    scores = np.array([[0.5, 0.4], [0.3, 0.35]])  # t0 chooses A, t1 chooses B
    assert kept(plan_of(scores, capacity=1, expand="local")) == ["AB", ""]
    assert kept(plan_of(scores, capacity=1, expand="local", protect_top_k=True)) == ["A", "B"]
    # protection comes even before priority
    plan = plan_of(scores, capacity=1, expand="local", protect_top_k=True, priority=[9, 0])
    assert kept(plan) == ["A", "B"]
    plan = plan_of(scores, capacity=1, expand="local", protect_top_k=True, metric="last")
    assert kept(plan) == ["A", "B"]


def test_max_experts_per_token_keeps_the_best_and_refills_nothing():
    scores = np.array([[0.5, 0.4, 0.1], [0.3, 0.35, 0.35]])
    plan = plan_of(scores, top_k=2, capacity=1, max_experts_per_token=1)
    # the pass keeps A: t0, B: t0, C: t1; then t0 gives B up, and t1 does not get it
    assert kept(plan) == ["A", "C"]
    assert (int(plan.load.dropped_max_experts), int(plan.load.dropped_capacity)) == (1, 1)
    assert np.array_equal(np.sort(np.asarray(plan.token).ravel()), [0, 1, 2])
    tied = plan_of(np.full((1, 3), 0.2), top_k=3, max_experts_per_token=2)
    assert kept(tied) == ["AB"]


def test_device_scope_limits_a_device_and_not_its_experts():
    scores = np.array([[0.9, 0.0, 0.0, 0.1], [0.8, 0.0, 0.0, 0.1],
                       [0.7, 0.0, 0.2, 0.1], [0.0, 0.6, 0.2, 0.1]])  # fmt: skip
    devices = {"ep_size": 2}
    # device 0 holds A B with 2·1 slots: t0 and t1, both on A
    plan = plan_of(scores, capacity=1, scope="device", devices=devices)
    assert kept(plan) == ["A", "A", "", ""]
    assert plan.token.shape == (2, 2)
    assert np.array_equal(plan.expert, [[0, 0], [4, 4]])
    assert kept(plan_of(scores, capacity=1, devices=devices)) == ["A", "", "", "B"]
    with pytest.raises(PolicyError, match="bins are devices"):
        plan.dispatch_tensor()


def test_device_scope_breaks_ties_by_token_then_expert():
    plan = plan_of(np.full((3, 2), 0.5), top_k=2, capacity=1, scope="device")
    # one device, 2·1 slots: t0 on A, then t0 on B come first
    assert kept(plan) == ["AB", "", ""]
    plan = plan_of(np.full((3, 2), 0.5), top_k=2, capacity=2, scope="device", metric="last")
    assert kept(plan) == ["", "AB", "AB"]


def test_device_scope_gives_the_last_device_only_its_real_experts():
    # three experts on two devices: (A B) and (C). C alone may have 1·C slots, not 2·C
    scores = np.tile(np.array([[0.0, 0.1, 0.9]]), (3, 1))
    plan = plan_of(scores, capacity=1, scope="device", devices={"ep_size": 2})
    assert kept(plan) == ["C", "", ""]
    assert plan.token.shape == (2, 2)


def test_reroute_fills_free_slots_only():
    plan = plan_of(capacity=1, overflow="reroute")
    # pass: A t1, B t3. t0 asks its best with a free slot: C (B is full); t2 asks C. t2 .3 > t0 .1
    assert kept(plan) == ["", "A", "C", "B"]
    assert (int(plan.load.dropped_capacity), int(plan.load.rerouted)) == (2, 1)
    assert int(plan.load.unserved_tokens) == 1
    assert float(plan.combine_tensor().sum(-1)[2, 2]) == pytest.approx(0.3)


def test_reroute_rounds_ask_again():
    scores = np.array([[0.9, 0.05, 0.03, 0.02], [0.8, 0.1, 0.06, 0.04], [0.7, 0.2, 0.06, 0.04]])
    one = plan_of(scores, capacity=1, overflow="reroute")
    assert kept(one) == ["A", "", "B"]  # t1 and t2 both ask B; t2 .2 > t1 .1
    two = plan_of(scores, capacity=1, overflow="reroute", reroute_rounds=2)
    assert kept(two) == ["A", "C", "B"]


def test_reroute_never_exceeds_top_k():
    scores = np.array([[0.9, 0.8, 0.1, 0.05], [0.8, 0.9, 0.05, 0.1]])
    plan = plan_of(scores, top_k=2, capacity=1, overflow="reroute", reroute_rounds=3)
    assert kept(plan) == ["AC", "BD"]
    # t0 is expanded onto B, C and D (t1 onto C and D), holds K already and does not reroute
    expanded = plan_of(scores, top_k=1, capacity=1, expand="local", overflow="reroute")
    assert int(expanded.load.rerouted) == 0


def test_expert_drop_skips_the_least_demanded():
    # demand A 3, B 1, C 0; round half up of 0.5·3 = 2 experts: C, then B
    plan = plan_of(expert_drop=0.5)
    assert kept(plan) == ["A", "A", "A", ""]
    assert int(plan.load.dropped_expert_drop) == 1
    assert np.array_equal(plan.load.demand, [3, 1, 0])
    # ties in demand: the lower id is skipped first
    assert kept(plan_of(np.array([[0.9, 0.1], [0.1, 0.9]]), expert_drop=0.5)) == ["", "B"]
    # somebody else's demand decides, if given
    assert kept(plan_of(expert_drop=0.3, demand=[0, 5, 5])) == ["", "", "", "B"]
    # skipped experts are no candidates for expansion or reroute
    assert kept(plan_of(expert_drop=0.3, expand="local", capacity=9)) == ["AB"] * 4
    assert kept(plan_of(expert_drop=0.3, overflow="reroute", capacity=2)) == ["A", "A", "B", "B"]
    # nor do assignments to them go elsewhere: t3 loses B for good, ceiling or not
    plan = plan_of(expert_drop=0.5, overflow="reroute", capacity=9)
    assert kept(plan) == ["A", "A", "A", ""]
    assert int(plan.load.rerouted) == 0
    with pytest.raises(PolicyError, match="skips all 3 experts"):
        plan_of(expert_drop=0.9)


def test_renormalize_divides_by_what_was_kept():
    scores = np.array([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]])
    plan = plan_of(scores, top_k=2, capacity=1, renormalize=True)
    assert kept(plan) == ["", "AB"]
    assert np.allclose(plan.combine_tensor().sum(-1)[1], [0.6, 0.4, 0])
    scores = np.array([[0.5, 0.5, 0.2], [0.6, 0.4, 0.0]])
    plan = plan_of(scores, top_k=2, capacity=1, renormalize=True)
    assert kept(plan) == ["B", "A"]
    assert np.allclose(plan.combine_tensor().sum(-1), [[0, 1, 0], [1, 0, 0]])


def test_min_capacity_and_a_ceiling_above_the_tokens():
    assert kept(plan_of(capacity_factor=0.1)) == ["", "A", "", "B"]
    plan = plan_of(capacity_factor=0.1, min_capacity=3)
    assert (kept(plan), int(plan.load.capacity)) == (["A", "A", "A", "B"], 3)
    plan = plan_of(capacity=100)
    assert (kept(plan), int(plan.load.capacity)) == (["A", "A", "A", "B"], 100)
    assert plan.token.shape == (3, 4)
    assert int(plan.load.slots) == 12


def test_padding_takes_no_slot_and_counts_nowhere():
    valid = [True, False, True, True]
    plan = plan_of(capacity_factor=1.0, valid=valid)  # three tokens, three experts: C = 1
    assert kept(plan) == ["A", "", "", "B"]
    assert int(plan.load.capacity) == 1
    assert plan.token.shape[1] == 2  # the buffer is that of four tokens
    assert np.array_equal(plan.load.demand, [2, 1, 0])
    assert int(plan.load.tokens) == 3
    nobody = plan_of(capacity_factor=1.0, valid=[False] * 4)
    assert kept(nobody) == [""] * 4
    assert int(nobody.load.unserved_tokens) == 0


def test_nonfinite_tokens_count_in_the_ceiling_only():
    scores = SCORES.copy()
    scores[1, 2] = np.nan
    plan = plan_of(scores, capacity_factor=1.0)  # four tokens: C = 2
    assert kept(plan) == ["A", "", "A", "B"]
    assert int(plan.load.capacity) == 2
    assert int(plan.load.dropped_nonfinite) == 1
    assert np.isfinite(np.asarray(plan.combine_tensor())).all()


def test_one_hot_views_agree_with_the_slots():
    plan = plan_of(top_k=2, capacity=2)
    dispatch, combine = np.asarray(plan.dispatch_tensor()), np.asarray(plan.combine_tensor())
    assert np.array_equal(dispatch.any(-1), plan.kept())
    assert dispatch.sum(0).max() == 1
    for t, e, c in zip(*np.nonzero(dispatch), strict=True):
        assert plan.token[e, c] == t
        assert combine[t, e, c] == SCORES[t, e]
    assert (np.asarray(plan.weight)[np.asarray(plan.token) == 4] == 0).all()


def test_vmap_over_groups_equals_each_group():
    scores = jax.random.uniform(jax.random.key(0), (3, 8, 4))
    policy = CapacityPolicy(capacity_factor=1.0, metric="random")

    def one(scores, group):
        return route(select_from_scores(scores, 2), policy, group_index=group, layer=1)

    together = jax.vmap(lambda *group: one(*group).kept())(scores, jnp.arange(3))
    for g in range(3):
        assert np.array_equal(together[g], one(scores[g], g).kept())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ep_size": 4}, PolicyError, "ep_size=4"),
        ({"ep_size": 0}, PolicyError, "ep_size=0"),
        ({"ep_size": 2, "ep_rank": 2}, PolicyError, "ep_rank=2"),
        ({"ep_size": 2, "ep_rank": np.int32(9)}, PolicyError, "ep_rank=9"),
        ({"priority": jnp.ones(4)}, InputError, "priority has dtype float32"),
        ({"priority": np.full(4, 2**32)}, InputError, "expected int32 values"),
        ({"valid": jnp.ones(3, bool)}, InputError, "valid"),
        ({"priority": jnp.zeros(5, jnp.int32)}, InputError, "priority"),
        ({"demand": jnp.zeros(4, jnp.int32)}, InputError, "demand"),
        ({"local": jnp.ones(4, bool)}, InputError, "local"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, words):
    selection = select_from_scores(jnp.asarray(SCORES), 1)
    with pytest.raises(error, match=words):
        route(selection, CapacityPolicy(capacity=1, expand="local"), **arguments)


def test_64_bit_mode_changes_no_type():
    policies = [
        CapacityPolicy(capacity=2),
        CapacityPolicy(),
        CapacityPolicy(capacity=1, overflow="reroute"),
    ]
    with jax.enable_x64(True):
        for policy in policies:
            plan = _route(_select(jnp.asarray(SCORES), 1), policy)
            assert {leaf.dtype.name for leaf in jax.tree.leaves(plan.load)} == {"int32"}
            figures = plan.load.straggler(), plan.load.dropped_share, plan.load.slot_use
            assert {figure.dtype.name for figure in figures} == {"float32"}


@pytest.mark.usefixtures("unchecked")
def test_common_slips_are_named():
    scores = jnp.asarray(SCORES)
    selection = select_from_scores(scores, 1)
    with pytest.raises(InputError, match="route takes a Selection"):
        route(scores, None)
    with pytest.raises(PolicyError, match="got a float"):
        route(selection, 1.5)
    with pytest.raises(InputError, match="vmap for several groups"):
        select(scores[None], RouterConfig(num_experts=3, top_k=1))
    plan = route(selection, CapacityPolicy(capacity=2))
    with pytest.raises(InputError, match="the plan is of 4 tokens"):
        dispatch(jnp.zeros((5, 2)), plan)
    with pytest.raises(InputError, match=r"the plan's slots \(3, 2\)"):
        combine(jnp.zeros((2, 2, 2)), plan)


def test_no_tokens_are_refused():
    with pytest.raises(InputError, match="no tokens"):
        route(select_from_scores(jnp.zeros((0, 3)), 1), None)
