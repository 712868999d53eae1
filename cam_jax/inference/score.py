"""Log-probabilities of given tokens, and what routing did with them, without ever holding [B, S,
V].

Letters: B rows, S positions, D features, V vocabulary, L MoE layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32

from cam_jax.inference.policies import Policy, row_devices
from cam_jax.load_stats import LoadStats
from cam_jax.models import decoder
from cam_jax.models.config import DecoderConfig
from cam_jax.models.partition import readable

# Rows of the output projection that are alive at once: enough for a full matmul, little memory (100
# MB at V=50k).
_CHUNK_TOKENS = 512

_STATIC = ("config", "policy", "mesh", "virtual_devices")


@functools.partial(jax.jit, static_argnames=_STATIC)
def logits_of(
    params: Any,
    ids: Int32[Array, "B S"],
    valid: Bool[Array, "B S"],
    *,
    config: DecoderConfig,
    policy: Policy,
    mesh: Any,
    virtual_devices: int | tuple[int, int],
) -> Float32[Array, "B S V"]:
    """Logits of every position."""
    hidden, _, _ = decoder.forward(
        config,
        params,
        ids,
        valid=valid,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
    )
    return readable(decoder.logits(config, params, hidden, mesh=mesh), mesh)


@functools.partial(jax.jit, static_argnames=_STATIC)
def load_of(
    params: Any,
    ids: Int32[Array, "B S"],
    valid: Bool[Array, "B S"],
    *,
    config: DecoderConfig,
    policy: Policy,
    mesh: Any,
    virtual_devices: int | tuple[int, int],
) -> LoadStats | None:
    """Load statistics of each MoE layer (leading axis L), None for a model without one."""
    _, _, load = decoder.forward(
        config,
        params,
        ids,
        valid=valid,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
    )
    return readable(load, mesh)


@functools.partial(jax.jit, static_argnames=_STATIC)
def score_of(
    params: Any,
    ids: Int32[Array, "B S"],
    valid: Bool[Array, "B S"],
    *,
    config: DecoderConfig,
    policy: Policy,
    mesh: Any,
    virtual_devices: int | tuple[int, int],
) -> tuple[Float32[Array, "B S"], LoadStats | None]:
    """Log-probability of every token given those before it, and the load statistics of the same
    pass.

    Rows are padded on the right. Column j of the first result is log p(token j | tokens < j); 0 for
    the first token of a row and for padding.
    """
    hidden, _, load = decoder.forward(
        config,
        params,
        ids,
        valid=valid,
        policy=policy,
        mesh=mesh,
        virtual_devices=virtual_devices,
    )
    # Shifted by one: the hidden state at j - 1 predicts token j. Column 0 has no predecessor and is
    # masked.
    before = jnp.roll(hidden, 1, axis=1)
    logprobs = next_token_logprobs(config, params, before, ids, mesh=mesh)
    return readable((jnp.where(valid, logprobs, 0.0).at[:, 0].set(0.0), load), mesh)


def next_token_logprobs(
    config: DecoderConfig,
    params: Any,
    hidden: Float[Array, "B S D"],
    targets: Int32[Array, "B S"],
    *,
    mesh: Mesh | None = None,
) -> Float32[Array, "B S"]:
    """log softmax(logits(hidden))[targets], in chunks of positions."""
    rows, length = targets.shape
    width = _chunk(-(-rows // row_devices(mesh)), length)

    def chunk(part: tuple[Array, Array]) -> Array:
        hidden, targets = part
        logits = decoder.logits(config, params, hidden, mesh=mesh)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def split(values: Array) -> Array:
        """[B, S, ...] -> [chunks, B, width, ...]."""
        chunks = values.reshape(rows, length // width, width, *values.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    parts = jax.lax.map(chunk, (split(hidden), split(targets)))
    return jnp.moveaxis(parts, 0, 1).reshape(rows, length).astype(jnp.float32)


def _chunk(rows: int, length: int) -> int:
    """Positions per chunk: the largest proper divisor of the length that keeps a chunk small."""
    wanted = max(1, _CHUNK_TOKENS // rows)
    return max(
        (d for d in range(1, max(2, length // 2 + 1)) if length % d == 0 and d <= wanted), default=1
    )
