"""The decoder all families share: embedding, layers under `lax.scan`, norm, output projection.

Equal layers are one stack and one scan, so compile time does not grow with depth. `Decoder` is an
ordinary NNX module; the functions below take its parameters as a plain pytree, which is what
`jax.jit` handles fastest and what is donated, sharded and saved:

    params = {"embed": [V, D], "segments": [{...}, ...], "final_norm": [D], "lm_head": [V, D]}

with one dictionary per segment whose leaves are [layers of the segment, ...]; "lm_head" is absent
when the embeddings are tied.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from cam_jax.errors import InputError
from cam_jax.load_stats import LoadStats
from cam_jax.mesh import TENSOR
from cam_jax.models.attention import AttentionContext
from cam_jax.models.block import CallContext, cache_entries
from cam_jax.models.cache import NO_TOKEN, Cache, key_positions, token_positions
from cam_jax.models.config import DecoderConfig
from cam_jax.models.norm import rms_norm
from cam_jax.models.params import Params, param_specs, stack_params, unstack_params
from cam_jax.models.partition import constrain, constrain_entry
from cam_jax.models.rope import rope_tables
from cam_jax.models.segments import Policies, policy_per_layer, run_segment, stacked_blocks

__all__ = [
    "Decoder",
    "forward",
    "init_cache",
    "init_params",
    "logits",
    "param_specs",
    "stack_params",
    "unstack_params",
]


class Decoder(nnx.Module):
    """Parameters: embed [V, D], segments (stacked Blocks), final_norm [D], lm_head [V, D]."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.config = config
        draw = nnx.initializers.normal(config.initializer_range)
        table = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(draw(rngs.params(), table, dtype))
        self.segments = nnx.List(
            [stacked_blocks(config, segment, rngs, dtype) for segment in config.segments]
        )
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(draw(rngs.params(), table, dtype))

    def __call__(
        self,
        ids: Int[Array, "B S"],
        *,
        valid: Bool[Array, "B S"] | None = None,
        cache: Cache | None = None,
        policy: Policies = None,
        mesh: Mesh | None = None,
        virtual_devices: int | tuple[int, int] = 1,
        priority: Int[Array, "B S"] | None = None,
        transport: str | None = None,
        unroll: bool = False,
    ) -> tuple[Float[Array, "B S D"], Cache | None, LoadStats | None]:
        """As `forward`."""
        config = self.config
        policies = policy_per_layer(config, policy)
        if valid is None:
            valid = jnp.ones(ids.shape, bool)
        _check_batch(ids, valid, cache)
        # Whatever id a caller pads with (-1, -100) must not reach the table.
        x = jnp.take(self.embed[...], jnp.where(valid, ids, 0), axis=0, mode="fill")
        x = constrain(x, mesh)
        attention, grown = _attention_context(config, valid, cache, mesh)
        if cache is not None:
            x = _refuse_overrun(x, cache)
        context = CallContext(
            attention=attention,
            valid=valid,
            priority=priority,
            mesh=mesh,
            virtual_devices=virtual_devices,
            transport=transport,
        )
        entries = None if cache is None else cache.entries
        loads: list[LoadStats] = []
        for segment, blocks in zip(config.segments, self.segments, strict=True):
            x, entries, found = run_segment(
                segment, blocks, x, entries, context, policies, unroll=unroll
            )
            loads.extend(found)
        x = rms_norm(x, self.final_norm[...], config.norm_eps)
        if grown is not None and entries is not None:
            grown = replace(grown, entries=entries)
        load = jax.tree.map(lambda *parts: jnp.concatenate(parts), *loads) if loads else None
        return x, grown, load

    def logits(
        self, hidden: Float[Array, "*batch D"], mesh: Mesh | None = None
    ) -> Float[Array, "*batch V"]:
        """Scores of every token of the vocabulary, float32, from hidden states after the norm."""
        table = self.embed if self.config.tie_embeddings else self.lm_head
        scores = jnp.einsum(
            "...d,vd->...v",
            hidden,
            table[...].astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return constrain(scores, mesh, *(None,) * (scores.ndim - 2), TENSOR)


def _check_batch(ids: jax.Array, valid: jax.Array, cache: Cache | None) -> None:
    """Refuses shapes that do not belong together."""
    if ids.ndim != 2 or 0 in ids.shape:
        raise InputError(
            f"ids must be [rows, positions] with at least one of each, got {ids.shape}"
        )
    if valid.shape != ids.shape:
        raise InputError(f"valid has shape {valid.shape}, but ids have {ids.shape}")
    if cache is None:
        return
    if cache.positions.shape[0] != ids.shape[0]:
        raise InputError(
            f"the cache is for {cache.positions.shape[0]} rows, ids have {ids.shape[0]}"
        )
    used = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
    if used + ids.shape[1] > cache.capacity:
        raise InputError(
            f"{ids.shape[1]} positions do not fit into the cache: {used} of its {cache.capacity} "
            "columns are in use; make it longer with init_cache(length=...)"
        )


def _refuse_overrun(x: jax.Array, cache: Cache) -> jax.Array:
    """x, or NaN throughout if a traced cache turns out too short.

    An update past the end would be shifted back without a word and overwrite earlier tokens. Inside
    a compiled loop nothing can be raised, so the result is made unusable instead of wrong.
    """
    fits = cache.length + x.shape[1] <= cache.capacity
    return jnp.where(fits, x, jnp.nan)


def _attention_context(
    config: DecoderConfig, valid: jax.Array, cache: Cache | None, mesh: Mesh | None
) -> tuple[AttentionContext, Cache | None]:
    """Positions and rotary tables of this call, and the cache's bookkeeping after it."""
    positions = token_positions(valid, None if cache is None else cache.counts)
    cos, sin = rope_tables(config.rope, positions)
    keys = key_positions(valid, positions)
    grown = None
    local = cache is None or cache.empty
    if cache is not None:
        grown = Cache(
            entries=cache.entries,
            positions=jax.lax.dynamic_update_slice(
                cache.positions, keys, (jnp.int32(0), cache.length)
            ),
            counts=cache.counts + jnp.sum(valid, axis=1, dtype=jnp.int32),
            length=cache.length + valid.shape[1],
            empty=False,
        )
    return (
        AttentionContext(
            cos=cos,
            sin=sin,
            query_positions=positions,
            key_positions=keys if grown is None or local else grown.positions,
            column=None if cache is None else cache.length,
            local=local,
            mesh=mesh,
        ),
        grown,
    )


@lru_cache(maxsize=64)
def _graphdef(config: DecoderConfig) -> Any:
    """The decoder's structure without its parameters; any dtype of parameters can be merged in."""
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return nnx.split(abstract)[0]


def _merged(config: DecoderConfig, params: Params) -> Decoder:
    """The decoder holding these parameters."""
    segments = dict(enumerate(params["segments"]))
    return nnx.merge(_graphdef(config), {**params, "segments": segments})


@partial(jax.jit, static_argnames=("config", "dtype"))
def _drawn(config: DecoderConfig, key: jax.Array, dtype: DTypeLike) -> Params:
    decoder = Decoder(config, rngs=nnx.Rngs(key), dtype=dtype)
    pure = nnx.to_pure_dict(nnx.split(decoder)[1])
    segments = [pure["segments"][index] for index in range(len(config.segments))]
    return {**pure, "segments": segments}


def init_params(config: DecoderConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Fresh parameters: weights normal with config.initializer_range, norms one, biases zero.

    Args:
        config: the model.
        key: a key of `jax.random`.
        dtype: of every parameter but the selection bias, which is float32, and int8 experts.

    Returns:
        The stacked pytree that `forward` takes.
    """
    return _drawn(config, key, jnp.dtype(dtype))


def init_cache(
    config: DecoderConfig,
    batch: int,
    length: int,
    dtype: DTypeLike = jnp.float32,
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """An empty cache for batch rows and length columns, padding included.

    On a mesh (inside `jax.jit`) keys and values lie where their sequences and heads do.

    Raises:
        InputError: batch or length is below 1.
    """
    if batch < 1 or length < 1:
        raise InputError(f"a cache needs at least one row and column, got {batch} x {length}")
    return Cache(
        entries={
            name: constrain_entry(
                jnp.zeros((config.num_layers, batch, heads, length, features), dtype), mesh
            )
            for name, (heads, features) in cache_entries(config).items()
        },
        positions=jnp.full((batch, length), NO_TOKEN, jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        length=jnp.zeros((), jnp.int32),
        empty=True,
    )


def forward(
    config: DecoderConfig,
    params: Params,
    ids: Int[Array, "B S"],
    *,
    valid: Bool[Array, "B S"] | None = None,
    cache: Cache | None = None,
    policy: Policies = None,
    mesh: Mesh | None = None,
    virtual_devices: int | tuple[int, int] = 1,
    priority: Int[Array, "B S"] | None = None,
    transport: str | None = None,
    unroll: bool = False,
) -> tuple[Float[Array, "B S D"], Cache | None, LoadStats | None]:
    """Hidden states of every position; pure, differentiable in params, made for `jax.jit`.

    A token's position is the number of tokens before it in its row, so padding on either side
    changes nothing where valid is true. Hidden states at padding are finite and meaningless.

    Args:
        config: static.
        params: as `init_params` or `stack_params` give them.
        ids: token ids; any number at padding.
        valid: which positions hold tokens, None for all.
        cache: None, or the cache of the positions before; donate it. Its policy is the caller's:
            pass None to exempt a decode step.
        policy: static; None, one policy, or a tuple with one per MoE layer.
        mesh, virtual_devices, transport: static; as `cam_jax.moe_layer` takes them.
        priority: per token, larger is kept first.
        unroll: static; layers are no loop in the compiled program, which then takes longer to
            compile but keeps what the gradient needs without copying it (training a small model
            on a CPU is 15 % faster).

    Returns:
        hidden [B, S, D] after the final norm, in the embedding's dtype; the grown cache, None
        without one; LoadStats with a leading axis of MoE layers, None if there are none.

    Raises:
        InputError: shapes that do not fit each other, or a call longer than the cache has room for
            (if only seen when running inside jit, the result is NaN throughout).
        PolicyError: a tuple of policies of the wrong length.
    """
    return _merged(config, params)(
        ids,
        valid=valid,
        cache=cache,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
        priority=priority,
        transport=transport,
        unroll=unroll,
    )


def logits(
    config: DecoderConfig,
    params: Params,
    hidden: Float[Array, "*batch D"],
    *,
    mesh: Mesh | None = None,
) -> Float[Array, "*batch V"]:
    """Scores of every token of the vocabulary, float32, from forward's hidden states.

    On a mesh the vocabulary lies over "tensor".
    """
    return _merged(config, params).logits(hidden, mesh)
