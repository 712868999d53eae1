"""Drawing tokens: greedy, temperature, top-k, top-p, seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.errors import InputError
from cam_jax.inference.sampling import check_sampling, keep_likely, row_keys, sample

draw = jax.jit(sample)
keep = jax.jit(keep_likely)
STEP = jnp.int32(0)


@jax.jit
def key_words(seed, step):
    return jax.random.key_data(row_keys(seed, 3, step))


def options(**changes):
    given = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0, "vocab_size": 5}
    return check_sampling(**(given | changes))


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0, 2.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert draw(logits, options(), STEP).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = jnp.array([[1.0, 300.0, 2.0, -300.0, 299.0]])
    assert draw(logits, options(temperature=temperature), STEP).tolist() == [1]


def reference(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """One row, as a loop: most likely first until k tokens or enough probability."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits - logits.max()).astype(np.float64))
    total = weights[order[:top_k]].sum()
    kept, reached = [], 0.0
    for token in order[:top_k]:
        if kept and top_p < 1 and reached / total >= top_p:
            break
        kept.append(token)
        reached += weights[token]
    return logits >= logits[kept].min()


@given(
    st.lists(st.integers(-60, 60), min_size=5, max_size=5),
    st.integers(1, 5),
    st.sampled_from([0.03, 0.31, 0.57, 0.83, 0.97, 1.0]),
)
def test_top_k_then_top_p(values, top_k, top_p):
    logits = np.array(values, np.float32) / 16
    found = keep(jnp.asarray(logits)[None], np.int32(top_k), np.float32(top_p))
    assert np.asarray(found)[0].tolist() == reference(logits, top_k, top_p).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [(None, None, 5), (3, None, 3), (None, 0.6, 2), (1, None, 1), (99, 1.0, 5), (3, 1e-9, 1)],
)
def test_frequencies_follow_the_distribution(top_k, top_p, allowed):
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))
    temperature, rows = 1.3, 4000
    chosen = draw(
        jnp.tile(logits, (rows, 1)),
        options(temperature=temperature, top_k=top_k, top_p=top_p),
        STEP,
    )
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected[np.argsort(-expected)[allowed:]] = 0
    expected /= expected.sum()
    counts = np.bincount(np.asarray(chosen), minlength=5)
    # Five standard deviations of a binomial.
    assert (np.abs(counts - rows * expected) <= 5 * np.sqrt(rows * expected)).all()


def test_rows_do_not_depend_on_each_other_and_steps_differ():
    logits = jnp.zeros((6, 5))
    many = draw(logits, options(temperature=1.0, seed=7), STEP)
    few = draw(logits[:2], options(temperature=1.0, seed=7), STEP)
    assert many[:2].tolist() == few.tolist()
    keys = {
        tuple(words)
        for seed in (0, 1)
        for step in (0, 1)
        for words in np.asarray(key_words(np.uint32(seed), jnp.int32(step))).tolist()
    }
    assert len(keys) == 12


def test_options_do_not_compile():
    logits = jnp.arange(10.0).reshape(2, 5)
    draw(logits, options(), STEP)
    before = draw._cache_size()
    for changes in (
        {"temperature": 0.7},
        {"temperature": 1, "top_k": 2},
        {"top_p": 0.5, "seed": 9},
    ):
        draw(logits, options(**changes), jnp.int32(3))
    assert draw._cache_size() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", 2.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 0.5),
    ],
)
def test_refused(name, value):
    with pytest.raises(InputError, match=f"^{name}"):
        options(**{name: value})
