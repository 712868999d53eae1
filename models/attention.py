"""Attention over keys that carry their positions, and the multi-head module built on it.

Padding, causality and the sliding window are one comparison of positions (see `cache`). Scores and
their softmax are float32. Long inputs are taken in blocks of queries, so that memory grows linearly
with the number of queries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from cam_jax.mesh import TENSOR
from cam_jax.models.config import AttentionConfig, DecoderConfig
from cam_jax.models.norm import linear, rms_norm
from cam_jax.models.partition import constrain, constrain_entry
from cam_jax.models.rope import rotate

# Queries of one block. 256 keeps a block's scores (B x H x 256 x keys, float32) near the size of
# the activations for usual head counts, and one block still fills a matmul unit.
QUERY_BLOCK = 256

# A masked score: finite, so that a row with no key at all gives a mean and not NaN.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)

Entries = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What every layer's attention shares in one call.

    Attributes:
        cos, sin: [B, S, rope.dim / 2] float32.
        query_positions: [B, S] int32.
        key_positions: [B, keys] int32, NO_TOKEN where there is none; keys = S without a cache or
            with an empty one, else S_max.
        column: [] int32, the first column to write in the cache, None without a cache.
        local: whether the call's own keys are all there is to attend to.
        mesh: the device mesh, None for one device.
    """

    cos: jax.Array
    sin: jax.Array
    query_positions: jax.Array
    key_positions: jax.Array
    column: jax.Array | None
    local: bool
    mesh: Mesh | None = None


def attend(
    query: Float[Array, "B H S dim"],
    key: Float[Array, "B N T dim"],
    value: Float[Array, "B N T out"],
    *,
    query_positions: Int[Array, "B S"],
    key_positions: Int[Array, "B T"],
    scale: float,
    window: int | None = None,
    block: int = QUERY_BLOCK,
) -> Float[Array, "B H S out"]:
    """Causal softmax attention by position; H is a multiple of N, the key heads.

    A query sees the keys whose position is at most its own and, with a window, nearer than window.
    A query that sees no key gets a finite, meaningless row.
    """

    def one_block(part: jax.Array, positions: jax.Array) -> jax.Array:
        return _attend_block(part, key, value, positions, key_positions, scale=scale, window=window)

    if query.shape[2] <= block:
        return one_block(query, query_positions)
    return _by_blocks(one_block, query, query_positions, block)


def _attend_block(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """`attend` with all scores at once; the queries of a key head are one matrix."""
    batch, heads, length, _ = query.shape
    rows = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    scores = jnp.einsum("bnrd,bntd->bnrt", rows, key, preferred_element_type=jnp.float32)
    visible = key_positions[:, None, :] <= query_positions[:, :, None]
    if window is not None:
        visible &= key_positions[:, None, :] > query_positions[:, :, None] - window
    scores = scores.reshape(batch, heads, length, -1) * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1)
    weights = weights.astype(value.dtype).reshape(batch, key.shape[1], -1, key.shape[2])
    out = jnp.einsum("bnrt,bntd->bnrd", weights, value, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, length, -1).astype(query.dtype)


def _by_blocks(
    one_block: Callable[[jax.Array, jax.Array], jax.Array],
    query: jax.Array,
    positions: jax.Array,
    block: int,
) -> jax.Array:
    """Maps one_block over blocks of queries; a gradient recomputes a block, it keeps none."""
    batch, heads, length, dim = query.shape
    count = -(-length // block)
    spare = count * block - length
    queries = jnp.pad(query, ((0, 0), (0, 0), (0, spare), (0, 0)))
    places = jnp.pad(positions, ((0, 0), (0, spare)))
    parts = jax.lax.map(
        lambda part: jax.checkpoint(one_block)(*part),
        (
            jnp.moveaxis(queries.reshape(batch, heads, count, block, dim), 2, 0),
            jnp.moveaxis(places.reshape(batch, count, block), 1, 0),
        ),
    )
    joined = jnp.moveaxis(parts, 0, 2)
    return joined.reshape(batch, heads, count * block, -1)[:, :, :length]


def write_entry(
    entries: Entries,
    name: str,
    new: jax.Array,
    layer: jax.Array | int,
    context: AttentionContext,
) -> dict[str, jax.Array]:
    """Entries with new [B, N, S, dim] at [layer, :, :, column : column + S]."""
    assert context.column is not None  # forward sets it with the cache
    stack = entries[name]
    # One type for all, which literals beside a traced int32 are not in 64-bit mode.
    start = [jnp.asarray(index, jnp.int32) for index in (layer, 0, 0, context.column, 0)]
    updated = jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), start)
    return {**entries, name: constrain_entry(updated, context.mesh)}


def read_entry(entries: Entries, name: str, layer: jax.Array | int) -> jax.Array:
    """One layer's [B, N, S_max, dim]."""
    return jax.lax.dynamic_index_in_dim(entries[name], layer, axis=0, keepdims=False)


class Attention(nnx.Module):
    """Multi-head attention with grouped keys, RoPE, and each family's norms, biases and clipping.

    Parameters (weights [out, in]): q, k, v, o, their `_bias` where the family has them, q_norm and
    k_norm ([heads * head_dim] or [head_dim]).
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        a = config.attention
        assert isinstance(a, AttentionConfig)  # `block.make_attention` chooses by this type
        self.config = a
        self.eps = config.norm_eps
        self.interleaved = config.rope.interleaved
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        draw = nnx.initializers.normal(config.initializer_range)

        def weight(out: int, into: int) -> nnx.Param:
            return nnx.Param(draw(rngs.params(), (out, into), dtype))

        self.q = weight(queries, config.hidden_size)
        self.k = weight(keys, config.hidden_size)
        self.v = weight(keys, config.hidden_size)
        self.o = weight(config.hidden_size, queries)
        if a.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros(queries, dtype))
            self.k_bias = nnx.Param(jnp.zeros(keys, dtype))
            self.v_bias = nnx.Param(jnp.zeros(keys, dtype))
        if a.out_bias:
            self.o_bias = nnx.Param(jnp.zeros(config.hidden_size, dtype))
        if a.qk_norm is not None:
            full = a.qk_norm == "full"
            self.q_norm = nnx.Param(jnp.ones(queries if full else a.head_dim, dtype))
            self.k_norm = nnx.Param(jnp.ones(keys if full else a.head_dim, dtype))

    @staticmethod
    def cache_entries(config: AttentionConfig) -> dict[str, tuple[int, int]]:
        """Per cached array, its heads and features."""
        shape = (config.num_kv_heads, config.head_dim)
        return {"key": shape, "value": shape}

    def __call__(
        self,
        x: Float[Array, "B S D"],
        context: AttentionContext,
        *,
        window: int | None,
        entries: Entries | None,
        layer: jax.Array | int,
    ) -> tuple[Float[Array, "B S D"], Entries | None]:
        """Attends and returns the entries with this call's keys and values written in."""
        a = self.config
        q = constrain(self._project(x, "q", a.num_heads), context.mesh, TENSOR)
        k = constrain(self._project(x, "k", a.num_kv_heads), context.mesh, TENSOR)
        v = constrain(self._project(x, "v", a.num_kv_heads), context.mesh, TENSOR)
        q = rotate(q, context.cos, context.sin, interleaved=self.interleaved)
        k = rotate(k, context.cos, context.sin, interleaved=self.interleaved)
        if entries is not None:
            entries = write_entry(entries, "key", k, layer, context)
            entries = write_entry(entries, "value", v, layer, context)
            if not context.local:
                k = read_entry(entries, "key", layer).astype(q.dtype)
                v = read_entry(entries, "value", layer).astype(q.dtype)
        out = attend(
            q,
            k,
            v,
            query_positions=context.query_positions,
            key_positions=context.key_positions,
            scale=a.scale,
            window=window,
        )
        flat = jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1)
        y = linear(flat, self.o[...], self._optional("o_bias"))
        return constrain(y, context.mesh), entries

    def _project(self, x: jax.Array, name: str, heads: int) -> jax.Array:
        """Projection, norm and clipping of "q", "k" or "v", by head: [B, heads, S, dim]."""
        a = self.config
        y = linear(x, getattr(self, name)[...], self._optional(f"{name}_bias"))
        norm = None if name == "v" else self._optional(f"{name}_norm")
        if norm is not None and a.qk_norm == "full":
            y = rms_norm(y, norm, self.eps)
        if a.clip is not None:
            y = jnp.clip(y, -a.clip, a.clip)
        y = y.reshape(*y.shape[:2], heads, a.head_dim)
        if norm is not None and a.qk_norm == "head":
            y = rms_norm(y, norm, self.eps)
        return jnp.swapaxes(y, 1, 2)

    def _optional(self, name: str) -> jax.Array | None:
        """The parameter of that name, None where the family has none."""
        parameter = getattr(self, name, None)
        return None if parameter is None else parameter[...]
