"""The baseline: an interpolated bigram model over the same tokens as the trained model.

p(b | a) = w_2 n(a, b) / n(a)  +  w_1 n(b) / N  +  w_0 / V   (Jelinek and Mercer)

The weights are fitted by expectation maximisation on a part of the training stream that the counts
for the fit have not seen; the counts used afterwards are those of the whole training stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

# The share of the training stream (its end) on which the weights are fitted.
FIT_SHARE = 0.1
_FIT_ROUNDS = 50
_SMALLEST_WEIGHT = 1e-9


@dataclass(frozen=True, kw_only=True)
class Bigram:
    """Counts [V, V] (row: previous token) and weights of (uniform, unigram, bigram), in all 1."""

    counts: Float[np.ndarray, "V V"]
    weights: tuple[float, float, float]

    def log_probabilities(
        self, previous: Int[np.ndarray, " N"], following: Int[np.ndarray, " N"]
    ) -> Float[np.ndarray, " N"]:
        """Natural log-probability of each ``following`` token after its ``previous`` one."""
        parts = _components(self.counts, previous, following)
        weights = _effective(np.asarray(self.weights), self.counts.sum(axis=1)[previous] > 0)
        return np.log((parts * weights).sum(axis=1))


def fit_bigram(stream: Int[np.ndarray, " N"], *, vocab_size: int) -> Bigram:
    """Count ``stream`` and fit the weights as the module says."""
    cut = int(len(stream) * (1 - FIT_SHARE))
    weights = fit_weights(count_pairs(stream[:cut], vocab_size), stream[cut:])
    return Bigram(counts=count_pairs(stream, vocab_size), weights=weights)


def count_pairs(stream: Int[np.ndarray, " N"], vocab_size: int) -> Float[np.ndarray, "V V"]:
    """How often each token follows each other one."""
    flat = stream[:-1].astype(np.int64) * vocab_size + stream[1:]
    pairs = np.bincount(flat, minlength=vocab_size * vocab_size)
    return pairs.reshape(vocab_size, vocab_size).astype(np.float64)


def fit_weights(
    counts: Float[np.ndarray, "V V"], stream: Int[np.ndarray, " N"]
) -> tuple[float, float, float]:
    """Weights of (uniform, unigram, bigram) that make ``stream`` most likely under ``counts``."""
    previous, following = stream[:-1], stream[1:]
    parts = _components(counts, previous, following)
    seen = counts.sum(axis=1)[previous] > 0
    weights = np.full(3, 1 / 3)
    for _ in range(_FIT_ROUNDS):
        share = parts * _effective(weights, seen)
        share /= share.sum(axis=1, keepdims=True)
        # After an unseen token there is no bigram to weigh: those positions say nothing about w_2.
        bigram = share[seen, 2].mean() if seen.any() else 0.0
        lower = share[:, :2].sum(axis=0)
        weights = np.append((1 - bigram) * lower / lower.sum(), bigram)
        # Never quite 0, so that no text is impossible.
        weights = np.maximum(weights, _SMALLEST_WEIGHT)
        weights /= weights.sum()
    uniform, unigram, bigram = weights.tolist()
    return uniform, unigram, bigram


def _components(
    counts: Float[np.ndarray, "V V"],
    previous: Int[np.ndarray, " N"],
    following: Int[np.ndarray, " N"],
) -> Float[np.ndarray, "N 3"]:
    rows = counts.sum(axis=1)
    unigram = counts.sum(axis=0)
    return np.stack(
        [
            np.full(len(previous), 1 / len(counts)),
            unigram[following] / unigram.sum(),
            counts[previous, following] / np.maximum(rows[previous], 1),
        ],
        axis=1,
    )


def _effective(weights: Float[np.ndarray, " 3"], seen: np.ndarray) -> Float[np.ndarray, "N 3"]:
    """The weights per position: after a token never seen, the bigram's goes to the other two."""
    lower = np.append(weights[:2] / weights[:2].sum(), 0.0)
    return np.where(seen[:, None], weights, lower)
