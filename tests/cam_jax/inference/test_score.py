"""Scores and logits: the same numbers, whatever stands on padding, and never [B, S, V] at once."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax import CapacityPolicy
from cam_jax.errors import InputError
from cam_jax.inference import score as scoring
from tests.cam_jax.inference import tiny

ROWS = tiny.prompts(5, 1, 9, 7, seed=1)
# One policy for each of the two layers.
MIXED = (
    CapacityPolicy(capacity_factor=0.7, group="batch", expand="local"),
    CapacityPolicy(capacity_factor=0.7, metric="random"),
)


def with_devices(policy):
    lm = tiny.model()
    return type(lm)(config=lm.config, params=lm.params, policy=policy, virtual_devices=2)


def expected_scores(logits, ids, mask):
    """By definition: each token under the logits at the real token before it."""
    found = np.zeros(ids.shape, np.float64)
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for i, row in enumerate(mask):
        real = np.flatnonzero(row)
        for before, here in itertools.pairwise(real):
            found[i, here] = logprobs[i, before, ids[i, here]]
    return found[:, 1:]


@pytest.mark.parametrize("policy", [None, MIXED], ids=["none", "mixed"])
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_scores_are_those_of_the_logits(policy, kind):
    lm = with_devices(policy)
    ids, mask = tiny.padded(ROWS, "left" if kind == "holes" else kind)
    if kind == "holes":
        mask[2, [0, 3, 4]] = 0
    scores = lm.score(ids, mask)
    assert scores.shape == (4, 8) and scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected_scores(lm.logits(ids, mask), ids, mask), atol=3e-5)
    first = mask[:, 1:].astype(bool) & (np.cumsum(mask, axis=1)[:, 1:] > 1)
    assert not scores[~first].any() and scores[first].all()


@given(st.sampled_from([16, 36]), st.integers(0, 2**32))
def test_padding_changes_no_logit(length, seed):
    """Up to 300 % padding, on both sides, with ids that no model has."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1000, 1000, (4, length))
    mask = np.zeros((4, length), int)
    for i, row in enumerate(ROWS):
        start = rng.integers(0, length - len(row) + 1)
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    lm = with_devices(MIXED)
    plain_ids, plain_mask = tiny.padded(ROWS, "right")
    base = np.asarray(lm.logits(plain_ids, plain_mask))[plain_mask > 0]
    found = lm.logits(ids, mask)
    assert found.shape == (4, length, tiny.VOCABULARY) and found.dtype == np.float32
    np.testing.assert_allclose(np.asarray(found)[mask > 0], base, atol=3e-5)
    report, plain = lm.routing(ids, mask), lm.routing(plain_ids, plain_mask)
    assert report.load.tolist() == plain.load.tolist()
    assert report.tokens == sum(map(len, ROWS))


def largest_array(jaxpr) -> int:
    """Elements of the largest array that a program makes, its inner programs included."""
    sizes = [int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [
        largest_array(getattr(sub, "jaxpr", sub))
        for eqn in jaxpr.eqns
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        if hasattr(getattr(sub, "jaxpr", sub), "eqns")
    ]
    return max([*sizes, *inner], default=0)


@pytest.mark.parametrize(("rows", "length"), [(2, 64), (8, 256), (1, 16), (3, 48)])
def test_logits_of_all_positions_never_exist_at_once(rows, length):
    lm = tiny.model()
    config = lm.config
    hidden = jax.ShapeDtypeStruct((rows, length, config.hidden_size), np.float32)
    targets = jax.ShapeDtypeStruct((rows, length), np.int32)
    traced = jax.make_jaxpr(lambda p, h, t: scoring.next_token_logprobs(config, p, h, t))(
        lm.params, hidden, targets
    )
    assert largest_array(traced.jaxpr) <= rows * length * config.vocab_size / 2


def test_scores_and_routing_of_one_pass_are_those_of_two():
    lm = with_devices(MIXED)
    ids, mask = tiny.padded(ROWS, "right")
    scores, report = lm.score_with_routing(ids, mask)
    assert scores.tolist() == lm.score(ids, mask).tolist()
    assert report.load.tolist() == lm.routing(ids, mask).load.tolist()


@pytest.mark.parametrize(
    "policy", [None, CapacityPolicy(capacity_factor=0.7)], ids=["no ceiling", "per device"]
)
def test_rows_that_fill_a_batch_up_change_nothing(policy):
    """Three real rows of two devices stay two and one, whatever is filled up around them."""
    lm = with_devices(policy)
    ids, mask = tiny.padded(ROWS[:3], "right")
    scores, report = lm.score_with_routing(ids, mask)
    ids, mask = (np.pad(a, ((0, 3), (0, 0))) for a in (np.maximum(ids, 0), mask))
    filled, again = lm.score_with_routing(ids, mask, allow_empty_rows=True)
    np.testing.assert_allclose(filled[:3], scores, atol=1e-5)
    assert not filled[3:].any() and again.tokens == report.tokens
    assert again.demand.tolist() == report.demand.tolist()
    assert again.load.tolist() == report.load.tolist()
    assert again.notes == report.notes


@pytest.mark.parametrize("call", ["logits", "score", "routing"])
@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 50]], None, r"input_ids\[0, 1\] is 50"),
        ([1, 2], None, r"input_ids must have shape \[B, S\]"),
        (np.zeros((0, 3), int), None, "input_ids is empty"),
        ([[1.0]], None, "input_ids must hold integer"),
        ("ab", None, "input_ids must hold integer"),
        ([[1]], [[1, 1]], "attention_mask has shape"),
        ([[1]], [[0]], "attention_mask has no real token in row 0"),
        ([[1] * 65], None, "row 0 has 65 tokens.* 64 positions"),
    ],
)
def test_refused(call, ids, mask, message):
    with pytest.raises(InputError, match=message):
        getattr(tiny.model(), call)(ids, mask)


def test_one_token_has_no_next():
    assert tiny.model().score([[3], [4]]).shape == (2, 0)
