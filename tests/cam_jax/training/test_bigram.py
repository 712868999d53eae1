"""The baseline against numbers worked out by hand."""

import math

import numpy as np

from cam_jax.training.bigram import Bigram, count_pairs, fit_bigram, fit_weights

STREAM = np.array([0, 1, 0, 1, 0, 2], np.int32)  # pairs 01 10 01 10 02


def test_counts():
    assert count_pairs(STREAM, 3).tolist() == [[0, 2, 1], [2, 0, 0], [0, 0, 0]]


def test_probabilities_by_hand():
    model = Bigram(counts=count_pairs(STREAM, 3), weights=(0.1, 0.3, 0.6))
    found = np.exp(model.log_probabilities(np.array([0, 1]), np.array([1, 2])))
    # After 0: 1 came twice of three times; 1 is two of the five tokens that follow something.
    assert math.isclose(found[0], 0.6 * 2 / 3 + 0.3 * 2 / 5 + 0.1 / 3)
    assert math.isclose(found[1], 0.6 * 0 + 0.3 * 1 / 5 + 0.1 / 3)


def test_after_an_unseen_token_the_other_two_share_the_weight():
    model = Bigram(counts=count_pairs(STREAM, 3), weights=(0.1, 0.3, 0.6))
    found = math.exp(model.log_probabilities(np.array([2]), np.array([0]))[0])
    assert math.isclose(found, 0.75 * 2 / 5 + 0.25 / 3)


def test_each_context_is_a_distribution():
    rng = np.random.default_rng(0)
    model = fit_bigram(rng.integers(0, 7, 500).astype(np.int32), vocab_size=8)
    for previous in range(8):
        row = model.log_probabilities(np.full(8, previous), np.arange(8))
        assert math.isclose(np.exp(row).sum(), 1.0)


def test_fitted_weights_are_the_likeliest():
    rng = np.random.default_rng(1)
    stream = np.cumsum(rng.integers(1, 3, 3000)).astype(np.int32) % 6
    counts = count_pairs(stream[:2000], 6)
    weights = fit_weights(counts, stream[2000:])
    assert math.isclose(sum(weights), 1.0)

    def likelihood(weights):
        model = Bigram(counts=counts, weights=weights)
        return model.log_probabilities(stream[2000:-1], stream[2001:]).sum()

    best = likelihood(weights)
    for other in [(0.1, 0.1, 0.8), (0.01, 0.3, 0.69), (0.3, 0.3, 0.4)]:
        assert likelihood(other) <= best + 1e-9
