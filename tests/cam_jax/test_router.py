"""Selection: scores, ties, bias, groups, weights, and rows that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax import RouterConfig, select_from_scores
from cam_jax import route as eager_route
from cam_jax import select as eager_select
from cam_jax.errors import InputError, PolicyError

NAN, INF = np.nan, np.inf
select = jax.jit(eager_select, static_argnums=1)
route = jax.jit(eager_route, static_argnums=1)


def weights_of(selection):
    """[T, E] weights of the model as trained."""
    return np.asarray(route(selection, None).combine_tensor().sum(-1))


def test_softmax_over_all_experts_without_and_with_normalisation():
    logits = jnp.log(jnp.array([[1.0, 2.0, 3.0, 4.0]]))
    raw = select(logits, RouterConfig(num_experts=4, top_k=2))
    assert np.array_equal(raw.experts, [[3, 2]])
    assert np.allclose(raw.scores, [[0.1, 0.2, 0.3, 0.4]])
    assert np.allclose(weights_of(raw), [[0, 0, 0.3, 0.4]])
    norm = select(logits, RouterConfig(num_experts=4, top_k=2, normalize=True, scale=2.5))
    assert np.allclose(weights_of(norm), [[0, 0, 2.5 * 3 / 7, 2.5 * 4 / 7]])


def test_top_1_keeps_its_dimension_and_normalises_per_token():
    logits = jnp.array([[0.0, 1.0], [3.0, 1.0]])
    one = select(logits, RouterConfig(num_experts=2, top_k=1, normalize=True))
    assert one.experts.shape == (2, 1)
    assert np.allclose(weights_of(one), [[0, 1], [1, 0]])


def test_ties_go_to_the_lower_expert_id():
    tied = select(jnp.zeros((2, 6)), RouterConfig(num_experts=6, top_k=3))
    assert np.array_equal(tied.experts, [[0, 1, 2]] * 2)


def test_a_selection_bias_selects_and_never_enters_a_weight():
    logits = jnp.array([[0.0, 0.0, 1.0]])
    router = RouterConfig(num_experts=3, top_k=2, score="sigmoid", normalize=True)
    biased = select(logits, router, bias=jnp.array([0.0, 100.0, 0.0]))
    assert np.array_equal(biased.experts, [[1, 2]])
    half, high = 0.5, 1 / (1 + np.exp(-1))
    assert np.allclose(weights_of(biased), [[0, half / (half + high), high / (half + high)]])


def test_group_limited_selection():
    logits = jnp.log(jnp.array([[0.4, 1e-9, 0.3, 0.29, 1e-3, 1e-3]]))
    by_max = RouterConfig(num_experts=6, top_k=2, num_groups=3, top_groups=1)
    assert np.array_equal(select(logits, by_max).experts, [[0, 1]])
    by_two = RouterConfig(num_experts=6, top_k=2, num_groups=3, top_groups=1, group_score="top2")
    assert np.array_equal(select(logits, by_two).experts, [[2, 3]])
    masked = select(logits, by_two).choice
    assert np.isneginf(np.asarray(masked)[0, [0, 1, 4, 5]]).all()


def test_masked_groups_lose_against_negative_biased_scores():
    router = RouterConfig(
        num_experts=4, top_k=2, score="sigmoid", num_groups=2, top_groups=1, group_score="top2"
    )
    chosen = select(jnp.zeros((1, 4)), router, bias=jnp.array([-2.0, -2.0, -3.0, -3.0]))
    assert np.array_equal(chosen.experts, [[0, 1]])


@pytest.mark.parametrize("row", [[NAN, 0, 0, 0], [0, INF, 0, 0], [-INF] * 4, [INF, NAN, -INF, 0]])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_row_that_is_not_finite_selects_nothing_and_disturbs_nobody(row, score):
    router = RouterConfig(num_experts=4, top_k=2, score=score, normalize=True)
    good = jnp.array([[1.0, 2.0, 3.0, 0.0]])
    both = select(jnp.concatenate([jnp.array([row], jnp.float32), good]), router)
    alone = select(good, router)
    assert np.array_equal(both.finite, [False, True])
    assert np.array_equal(both.experts[1:], alone.experts)
    plan = route(both, None)
    assert np.array_equal(plan.kept()[0], [False] * 4)
    assert np.array_equal(weights_of(both)[1:], weights_of(alone))
    assert (int(plan.load.nonfinite_tokens), int(plan.load.dropped_nonfinite)) == (1, 2)
    assert int(plan.load.tokens) == 2
    assert int(plan.load.demand.sum()) == 2
    assert ((np.asarray(both.experts) >= 0) & (np.asarray(both.experts) < 4)).all()


def test_a_single_minus_infinity_masks_that_expert():
    router = RouterConfig(num_experts=3, top_k=2, normalize=True)
    plan = route(select(jnp.array([[0.0, -INF, 0.0], [-INF, -INF, 5.0]]), router), None)
    assert np.array_equal(plan.kept(), [[True, False, True], [False, False, True]])
    assert np.allclose(plan.combine_tensor().sum(-1), [[0.5, 0, 0.5], [0, 0, 1]])


def test_a_masked_expert_in_the_top_k_enters_no_weight():
    # groups (0, 1) and (2, 3); of the better one only expert 2 can be had
    router = RouterConfig(num_experts=4, top_k=2, num_groups=2, top_groups=1, normalize=True)
    plan = route(select(jnp.array([[0.0, 0.0, 3.0, -INF]]), router), None)
    assert np.array_equal(plan.combine_tensor().sum(-1), [[0, 0, 1, 0]])


def test_a_masked_expert_does_not_mask_its_group():
    router = RouterConfig(num_experts=4, top_k=1, num_groups=2, top_groups=1, group_score="top2")
    assert np.array_equal(select(jnp.array([[0.0, 0.0, 9.0, -INF]]), router).experts, [[2]])
    both = select(jnp.array([[0.0, 0.0, -INF, -INF]]), router)
    assert np.array_equal(both.experts, [[0]])


def test_minus_zero_and_zero_are_a_tie():
    tied = select_from_scores(jnp.array([[-0.0, 0.0, -1.0]]), 1)
    assert np.array_equal(tied.experts, [[0]])


def test_logits_are_compared_in_float32_whatever_they_came_in():
    logits = jnp.array([[1.0, 1.0009766, 0.5]], jnp.float32)
    assert np.array_equal(select(logits, RouterConfig(num_experts=3, top_k=1)).experts, [[1]])
    half = select(logits.astype(jnp.bfloat16), RouterConfig(num_experts=3, top_k=1))
    assert half.scores.dtype == jnp.float32


def test_given_scores_are_raw_weights():
    given = select_from_scores(jnp.array([[0.5, -1.0, 2.0], [NAN, 1.0, 1.0]]), 2)
    assert np.allclose(weights_of(given), [[0.5, 0, 2.0], [0, 0, 0]])


def test_gradients_flow_through_the_scores():
    router = RouterConfig(num_experts=4, top_k=2, normalize=True)

    def total(logits):
        plan = route(select(logits, router), None)
        return (plan.choice_weight * jnp.array([1.0, 3.0])).sum()

    logits = jax.random.normal(jax.random.key(0), (5, 4))
    total = jax.jit(total)
    analytic = jax.jit(jax.grad(total))(logits)
    step = 1e-2 * jax.random.normal(jax.random.key(1), (5, 4))
    numeric = (total(logits + step) - total(logits - step)) / 2
    assert np.allclose((analytic * step).sum(), numeric, rtol=1e-2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"top_k": 0},
        {"top_k": 9},
        {"top_k": 3, "num_groups": 4, "top_groups": 1},
        {"top_k": 2, "num_groups": 3},
        {"top_k": 2, "num_groups": 2, "top_groups": 3},
        {"top_k": 2, "num_groups": 8, "top_groups": 2, "group_score": "top2"},
        {"top_k": 1.5},
        {"top_k": "2"},
        {"top_k": 2, "scale": np.nan},
        {"top_k": 2, "normalize": "yes"},
        {"top_k": 2, "score": "relu"},
        {"top_k": 2, "group_score": "mean"},
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_routers_are_refused(sizes):
    with pytest.raises(PolicyError):
        RouterConfig(num_experts=8, **sizes)


def test_wrong_number_of_experts_is_refused():
    with pytest.raises(InputError, match="and 4 experts"):
        select(jnp.zeros((2, 5)), RouterConfig(num_experts=4, top_k=1))
