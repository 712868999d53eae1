"""Multi-head latent attention: keys and values of all heads come from one small latent per token.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1), transformers `models/deepseek_v2` and
`deepseek_v3`. Only the latent and the rotated key that all heads share are cached, latent_rank +
rope_dim numbers per token. A call that attends to its own keys alone expands them to heads, which
takes fewer operations; one that reads the cache moves the expansion to the other side of the
products instead (queries into the latent's space, results out of it), so that cached tokens are
never expanded.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from cam_jax.mesh import TENSOR
from cam_jax.models.attention import AttentionContext, Entries, attend, read_entry, write_entry
from cam_jax.models.config import DecoderConfig, MLAConfig
from cam_jax.models.norm import linear, rms_norm
from cam_jax.models.partition import constrain
from cam_jax.models.rope import rotate

# The norms of the latents do not follow rms_norm_eps, in DeepSeek's own code as in transformers.
LATENT_EPS = 1e-6


class LatentAttention(nnx.Module):
    """MLA with or without a latent for the queries.

    Parameters (weights [out, in], R = latent_rank, Q = query_rank): q [H * (nope + rope), D], or
    q_a [Q, D], q_a_norm [Q] and q_b [H * (nope + rope), Q]; kv_a [R + rope, D], kv_a_norm [R],
    kv_b [H * (nope + value), R]; o [D, H * value]; q_a_bias, kv_a_bias and o_bias where the family
    has them.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        a = config.attention
        assert isinstance(a, MLAConfig)  # `block.make_attention` chooses by this type
        self.config = a
        self.interleaved = config.rope.interleaved
        hidden, latent = config.hidden_size, a.latent_rank + a.rope_dim
        queries = a.num_heads * (a.nope_dim + a.rope_dim)
        draw = nnx.initializers.normal(config.initializer_range)

        def weight(out: int, into: int) -> nnx.Param:
            return nnx.Param(draw(rngs.params(), (out, into), dtype))

        if a.query_rank is None:
            self.q = weight(queries, hidden)
        else:
            self.q_a = weight(a.query_rank, hidden)
            self.q_a_norm = nnx.Param(jnp.ones(a.query_rank, dtype))
            self.q_b = weight(queries, a.query_rank)
        self.kv_a = weight(latent, hidden)
        self.kv_a_norm = nnx.Param(jnp.ones(a.latent_rank, dtype))
        self.kv_b = weight(a.num_heads * (a.nope_dim + a.value_dim), a.latent_rank)
        self.o = weight(hidden, a.num_heads * a.value_dim)
        if a.bias:
            if a.query_rank is not None:
                self.q_a_bias = nnx.Param(jnp.zeros(a.query_rank, dtype))
            self.kv_a_bias = nnx.Param(jnp.zeros(latent, dtype))
            self.o_bias = nnx.Param(jnp.zeros(hidden, dtype))

    @staticmethod
    def cache_entries(config: MLAConfig) -> dict[str, tuple[int, int]]:
        """Per cached array, its heads and features: the normed latent, then the rotated key.

        One array for both, since the products with queries take them side by side.
        """
        return {"latent": (1, config.latent_rank + config.rope_dim)}

    def __call__(
        self,
        x: Float[Array, "B S D"],
        context: AttentionContext,
        *,
        window: int | None,
        entries: Entries | None,
        layer: jax.Array | int,
    ) -> tuple[Float[Array, "B S D"], Entries | None]:
        """Attends and returns the entries with this call's latents written in."""
        q_nope, q_rope = self._queries(x, context)
        latent = self._latents(x, context)
        if entries is not None:
            entries = write_entry(entries, "latent", latent, layer, context)
        if entries is None or context.local:
            out = self._expanded(q_nope, q_rope, latent, context, window)
        else:
            cached = read_entry(entries, "latent", layer).astype(x.dtype)
            out = self._absorbed(q_nope, q_rope, cached, context, window)
        flat = jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1)
        y = linear(flat, self.o[...], self._optional("o_bias"))
        return constrain(y, context.mesh), entries

    def _queries(self, x: jax.Array, context: AttentionContext) -> tuple[jax.Array, jax.Array]:
        """Queries by head: [B, H, S, nope] and the rotated [B, H, S, rope]."""
        a = self.config
        if a.query_rank is None:
            y = linear(x, self.q[...])
        else:
            inner = linear(x, self.q_a[...], self._optional("q_a_bias"))
            y = linear(rms_norm(inner, self.q_a_norm[...], LATENT_EPS), self.q_b[...])
        y = jnp.swapaxes(y.reshape(*x.shape[:2], a.num_heads, -1), 1, 2)
        y = constrain(y, context.mesh, TENSOR)
        return y[..., : a.nope_dim], self._rotated(y[..., a.nope_dim :], context)

    def _latents(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        """What is cached of each token: normed latent and rotated key, [B, 1, S, R + rope]."""
        rank = self.config.latent_rank
        y = linear(x, self.kv_a[...], self._optional("kv_a_bias"))[:, None]
        latent = rms_norm(y[..., :rank], self.kv_a_norm[...], LATENT_EPS)
        return jnp.concatenate((latent, self._rotated(y[..., rank:], context)), axis=-1)

    def _rotated(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        return rotate(x, context.cos, context.sin, interleaved=self.interleaved)

    def _expanded(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        latent: jax.Array,
        context: AttentionContext,
        window: int | None,
    ) -> jax.Array:
        """Attention by head over the call's own tokens, [B, H, S, value]."""
        a = self.config
        wide = linear(latent[:, 0, :, : a.latent_rank], self.kv_b[...])
        wide = jnp.swapaxes(wide.reshape(*wide.shape[:2], a.num_heads, -1), 1, 2)
        wide = constrain(wide, context.mesh, TENSOR)
        k_rope = jnp.broadcast_to(latent[..., a.latent_rank :], q_rope.shape)
        return attend(
            jnp.concatenate((q_nope, q_rope), axis=-1),
            jnp.concatenate((wide[..., : a.nope_dim], k_rope), axis=-1),
            wide[..., a.nope_dim :],
            query_positions=context.query_positions,
            key_positions=context.key_positions,
            scale=a.scale,
            window=window,
        )

    def _absorbed(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        cached: jax.Array,
        context: AttentionContext,
        window: int | None,
    ) -> jax.Array:
        """Attention in the latent's space, where all heads share one key, [B, H, S, value]."""
        a = self.config
        weights = self.kv_b[...].astype(q_nope.dtype).reshape(a.num_heads, -1, a.latent_rank)
        q_latent = _by_head("bhsn,hnr->bhsr", q_nope, weights[:, : a.nope_dim])
        q_latent = constrain(q_latent, context.mesh, TENSOR)
        out = attend(
            jnp.concatenate((q_latent, q_rope), axis=-1),
            cached,
            cached,  # the rotated part too, cut off below: cheaper than copying the latents out
            query_positions=context.query_positions,
            key_positions=context.key_positions,
            scale=a.scale,
            window=window,
        )
        return _by_head("bhsr,hvr->bhsv", out[..., : a.latent_rank], weights[:, a.nope_dim :])

    def _optional(self, name: str) -> jax.Array | None:
        """The parameter of that name, None where the family has none."""
        parameter = getattr(self, name, None)
        return None if parameter is None else parameter[...]


def _by_head(indices: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """One product per head, summed in float32, in x's dtype."""
    return jnp.einsum(indices, x, weights, preferred_element_type=jnp.float32).astype(x.dtype)
