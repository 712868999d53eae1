"""Attention by position: masks, grouped heads, windows, blocks; and the module's options."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cam_jax.models.attention import Attention, AttentionContext, attend
from cam_jax.models.cache import NO_TOKEN, key_positions, token_positions
from cam_jax.models.params import param_specs
from cam_jax.models.rope import rope_tables
from tests.models.tiny import olmoe

jitted = partial(jax.jit, static_argnames=("scale", "window", "block"))(attend)


def reference(q, k, v, q_pos, k_pos, scale, window=None):
    """Attention of one row, head by head, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, s in np.ndindex(q.shape[:3]):
        n = h // (q.shape[1] // k.shape[1])
        seen = np.asarray(k_pos[b]) <= int(q_pos[b, s])
        if window is not None:
            seen &= np.asarray(k_pos[b], np.int64) > int(q_pos[b, s]) - window
        if not seen.any():
            continue
        scores = (k[b, n][seen] @ q[b, h, s]) * scale
        weights = np.exp(scores - scores.max())
        out[b, h, s] = weights / weights.sum() @ v[b, n][seen]
    return out


def inputs(heads=4, kv_heads=2, length=7, keys=7, dim=4, out=3):
    rng = np.random.default_rng(1)
    shapes = [(2, heads, length, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, out)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


VALID = jnp.asarray([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 0]], bool)


@pytest.mark.parametrize(
    ("window", "kv_heads", "block"),
    [(None, 1, 256), (None, 2, 7), (None, 2, 3), (None, 4, 256), (1, 2, 256), (3, 2, 3)],
)
def test_attend_equals_the_reference_where_there_are_tokens(window, kv_heads, block):
    q, k, v = inputs(kv_heads=kv_heads)
    positions = token_positions(VALID)
    keys = key_positions(VALID, positions)
    out = jitted(
        q,
        k,
        v,
        query_positions=positions,
        key_positions=keys,
        scale=0.7,
        window=window,
        block=block,
    )
    expected = reference(q, k, v, positions, keys, 0.7, window)
    mask = np.asarray(VALID)[:, None, :, None]
    np.testing.assert_allclose(np.where(mask, out, 0), np.where(mask, expected, 0), atol=2e-6)


def test_a_row_without_any_key_is_finite_with_finite_gradients():
    q, k, v = inputs()

    def total(q, k, v):
        nothing = jnp.full((2, 7), NO_TOKEN, jnp.int32)
        positions = jnp.zeros((2, 7), jnp.int32)
        return attend(q, k, v, query_positions=positions, key_positions=nothing, scale=1.0).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in grads)


def test_blocks_change_neither_values_nor_gradients():
    q, k, v = inputs()
    positions = token_positions(VALID)
    keys = key_positions(VALID, positions)

    def loss(block, q, k, v):
        out = attend(q, k, v, query_positions=positions, key_positions=keys, scale=0.5, block=block)
        return jnp.sum(jnp.sin(out))

    whole = jax.jit(jax.grad(partial(loss, 8), argnums=(0, 1, 2)))(q, k, v)
    parts = jax.jit(jax.grad(partial(loss, 2), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_memory_of_long_prefill_grows_linearly():
    def temporaries(length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, 2, length, 4), jnp.float32)
        places = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def call(q, k, v, positions):
            return attend(
                q, k, v, query_positions=positions, key_positions=positions, scale=1.0, block=64
            )

        compiled = jax.jit(call).lower(shape, shape, shape, places).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.5 * temporaries(2048)


def module(config, seed=0):
    return Attention(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)


def context_of(config, valid):
    positions = token_positions(valid)
    cos, sin = rope_tables(config.rope, positions)
    return AttentionContext(
        cos=cos,
        sin=sin,
        query_positions=positions,
        key_positions=key_positions(valid, positions),
        column=None,
        local=True,
    )


def test_parameters_follow_the_configuration():
    prefix = "layers.0.attn."

    def shapes_of(config):
        specs = param_specs(config).items()
        return {path[len(prefix) :]: s.shape for path, s in specs if path.startswith(prefix)}

    assert shapes_of(olmoe(attention_bias=True)) == {
        "q": (16, 16),
        "k": (8, 16),
        "v": (8, 16),
        "o": (16, 16),
        "q_bias": (16,),
        "k_bias": (8,),
        "v_bias": (8,),
        "o_bias": (16,),
        "q_norm": (16,),
        "k_norm": (8,),
    }
    config = olmoe()
    per_head = dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, qk_norm="head")
    )
    shapes = shapes_of(per_head)
    assert shapes["q_norm"] == shapes["k_norm"] == (4,)
    assert "q_bias" not in shapes


def test_the_norm_spans_all_heads_before_they_are_split():
    config = olmoe()
    attention = module(config)
    x = jax.random.normal(jax.random.key(3), (1, 2, 16))
    q = attention._project(x, "q", 4)
    flat = np.asarray(jnp.swapaxes(q, 1, 2)).reshape(2, 16)
    # Over all heads the mean square is one; over single heads it is not.
    np.testing.assert_allclose((flat**2).mean(-1), 1.0, rtol=1e-3)
    assert np.abs((flat.reshape(2, 4, 4) ** 2).mean(-1) - 1.0).max() > 0.05


def test_the_head_norm_makes_each_head_of_unit_size():
    config = olmoe()
    config = dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, qk_norm="head")
    )
    x = jax.random.normal(jax.random.key(3), (1, 2, 16))
    q = np.asarray(module(config)._project(x, "q", 4))
    np.testing.assert_allclose((q**2).mean(-1), 1.0, rtol=1e-3)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_clipping_follows_the_norm_and_holds_for_all_three(name):
    config = olmoe(clip_qkv=0.25)
    attention = module(config)
    attention.q_norm[...] = jnp.full(16, 3.0)
    x = 0.3 * jax.random.normal(jax.random.key(3), (1, 5, 16))
    y = np.asarray(attention._project(x, name, 4 if name == "q" else 2))
    assert np.abs(y).max() == 0.25  # clipping before the norm would leave values beyond it
    assert (np.abs(y) < 0.25).any()


def test_equal_key_heads_make_grouped_heads_plain_ones():
    grouped, plain = olmoe(num_key_value_heads=2), olmoe(num_key_value_heads=4)
    small, large = module(grouped), module(plain, seed=1)
    for name in ("q", "o"):
        getattr(large, name)[...] = getattr(small, name)[...]

    def repeated(weight):
        return jnp.repeat(weight.reshape(2, 4, -1), 2, axis=0).reshape(16, -1)

    # The mean square over all keys does not change when every head is there twice.
    for name in ("k", "v"):
        getattr(large, name)[...] = repeated(getattr(small, name)[...])
    x = jax.random.normal(jax.random.key(4), (1, 6, 16))
    context = context_of(grouped, jnp.ones((1, 6), bool))
    one, _ = small(x, context, window=None, entries=None, layer=0)
    two, _ = large(x, context, window=None, entries=None, layer=0)
    np.testing.assert_allclose(one, two, atol=1e-6)
