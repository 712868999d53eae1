"""Multi-head latent attention: both forms, what is cached, padding, without transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.models import decoder
from cam_jax.models.mla import LatentAttention
from cam_jax.models.params import param_specs
from tests.models.tiny import params_of, run, step, tiny, tokens

# Attention is what these tests are about: two dense layers compile in a fraction of the time.
DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}


def test_parameters():
    def shapes(config):
        return {
            path.removeprefix("layers.0.attn."): spec.shape
            for path, spec in param_specs(config).items()
            if path.startswith("layers.0.attn.")
        }

    rest = {"kv_a": (16, 16), "kv_a_norm": (12,), "kv_b": (44, 12), "o": (16, 20)}
    assert shapes(tiny("deepseek_v2")) == rest | {"q": (40, 16)}
    queries = {"q_a": (10, 16), "q_a_norm": (10,), "q_b": (40, 10)}
    assert shapes(tiny("deepseek_v3")) == rest | queries
    biases = {"q_a_bias": (10,), "kv_a_bias": (16,), "o_bias": (16,)}
    assert shapes(tiny("deepseek_v3", attention_bias=True)) == rest | queries | biases


def test_the_latent_is_cached_not_the_heads():
    config = tiny("deepseek_v3")
    assert LatentAttention.cache_entries(config.attention) == {"latent": (1, 16)}
    cache = decoder.init_cache(config, 2, 9)
    assert {name: leaf.shape for name, leaf in cache.entries.items()} == {
        "latent": (3, 2, 1, 9, 16)
    }


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v2", {"attention_bias": True}),
        ("deepseek_v3", {"rope_scaling": YARN}),
    ],
)
def test_reading_the_cache_equals_expanding_it(family, options):
    """Prefill expands the latents, later calls move the expansion to the queries."""
    config = tiny(family, **DENSE, **options)
    params = params_of(config)
    ids = tokens(2, 11)
    with jax.default_matmul_precision("highest"):
        expected, _ = run(config, params, ids)
        cache = decoder.init_cache(config, 2, 11)
        found = []
        for part in (ids[:, :6], ids[:, 6:]):
            scores, cache = step(config, params, part, cache)
            found.append(scores)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=2e-5)


def test_padding_and_positions():
    config = tiny("deepseek_v3", **DENSE, rope_scaling=YARN)
    params = params_of(config)
    ids = tokens(1, 6)

    def padded(x, left):
        return jnp.pad(x, ((0, 0), (left, 4 - left)), constant_values=-1)

    rows = jnp.concatenate([padded(ids, left) for left in (0, 2, 4)])
    with jax.default_matmul_precision("highest"):
        found, _ = run(config, params, rows, rows >= 0)
    for row, left in ((1, 2), (2, 4)):
        np.testing.assert_allclose(found[row, left : left + 6], found[0, :6], atol=2e-5)


def test_mscale_matters_from_position_one_on():
    config = tiny("deepseek_v2", **DENSE, rope_scaling=YARN)
    a = config.attention
    other = dataclasses.replace(
        config, attention=dataclasses.replace(a, scale=(a.nope_dim + a.rope_dim) ** -0.5)
    )
    params, ids = params_of(config), tokens(1, 6)
    one, two = (np.asarray(run(c, params, ids)[0]) for c in (config, other))
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert (np.abs(one - two)[0, 1:].max(axis=-1) > 1e-3).all()
