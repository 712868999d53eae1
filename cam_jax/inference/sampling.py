"""Draws one token per row from logits. Every option is traced: changing it compiles nothing.

Letters: B rows, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from cam_jax.errors import InputError

# Below this a float32 division could meet a denormal, which some devices flush to 0.
_SMALLEST_TEMPERATURE = 1e-30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "seed"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the sampler needs, as scalars that a jitted function takes as arguments.

    Attributes:
        temperature: float32; 0 takes the most likely token.
        top_k: int32; only the ``top_k`` most likely tokens are drawn (V = all).
        top_p: float32; only the smallest set of most likely tokens that together reach it (1 =
            all).
        seed: uint32; row ``i`` draws from ``fold_in(fold_in(key(seed), i), step)``.
    """

    temperature: Float[Array, ""] | np.float32
    top_k: Int[Array, ""] | np.int32
    top_p: Float[Array, ""] | np.float32
    seed: Integer[Array, ""] | np.uint32


def check_sampling(
    *,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any,
    vocab_size: int,
) -> Sampling:
    """The options of ``generate``, checked.

    Raises:
        InputError: a temperature that is negative or not finite, ``top_k`` < 1, ``top_p`` outside
        (0, 1], a seed
            outside [0, 2**32); names the argument.
    """
    if not is_number(temperature) or not 0 <= float(temperature) <= np.finfo(np.float32).max:
        raise InputError(
            f"temperature must be a finite float32 >= 0 (0 = greedy), got {temperature!r}"
        )
    if top_k is not None and (not is_integer(top_k) or int(top_k) < 1):
        raise InputError(f"top_k must be an integer >= 1 or None (all tokens), got {top_k!r}")
    if top_p is not None and (not is_number(top_p) or not 0 < float(top_p) <= 1):
        raise InputError(f"top_p must be in (0, 1] or None (all tokens), got {top_p!r}")
    if not is_integer(seed) or not 0 <= int(seed) < 2**32:
        raise InputError(f"seed must be an integer in [0, 2**32), got {seed!r}")
    return Sampling(
        temperature=np.float32(temperature),
        top_k=np.int32(vocab_size if top_k is None else min(int(top_k), vocab_size)),
        top_p=np.float32(1.0 if top_p is None else top_p),
        seed=np.uint32(seed),
    )


def row_keys(
    seed: Integer[Array, ""] | np.uint32, rows: int, step: Int[Array, ""]
) -> Key[Array, " B"]:
    """One key per row, from the seed, the row's index and the step alone: batch mates change
    nothing.
    """
    # The generator is named, so that a seed means the same whatever the process's default is.
    key = jax.random.key(seed, impl="threefry2x32")

    def row_key(row: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(key, row), step)

    return jax.vmap(row_key)(jnp.arange(rows, dtype=jnp.int32))


def keep_likely(
    logits: Float[Array, "B V"],
    top_k: Int[Array, ""] | np.int32,
    top_p: Float[Array, ""] | np.float32,
) -> Bool[Array, "B V"]:
    """Which tokens may be drawn: ``top_k`` first, then ``top_p`` of what is left (as Hugging Face
    orders them).

    At least one token of each row is kept. Tokens that tie with the last one kept are kept too.
    """
    vocab = logits.shape[-1]
    falling = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)
    weights = jax.nn.softmax(jnp.where(rank < top_k, falling, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    # A sum that rounds to 1 before the end must not cut the tail when top_p is 1.
    inside = (rank < top_k) & ((before < top_p) | (top_p >= 1.0))
    count = jnp.maximum(jnp.sum(inside, axis=-1, dtype=jnp.int32), 1)
    cut = jnp.take_along_axis(falling, count[:, None] - 1, axis=-1)
    return logits >= cut


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, step: Int[Array, ""]
) -> Int[Array, " B"]:
    """One token per row, int32.

    Greedy takes the argmax (lower id first among equals); otherwise logits are divided by the
    temperature, cut by ``top_k`` and ``top_p``, and drawn by adding Gumbel noise. Only the branch
    that is asked for runs.
    """
    rows, vocab = logits.shape
    logits = logits.astype(jnp.float32)

    def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        temperature = jnp.maximum(sampling.temperature, jnp.float32(_SMALLEST_TEMPERATURE))
        # The maximum is taken off first, so that a tiny temperature gives -inf, never inf - inf.
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature

        def cut(scaled: Float[Array, "B V"]) -> Float[Array, "B V"]:
            kept = keep_likely(scaled, sampling.top_k, sampling.top_p)
            return jnp.where(kept, scaled, -jnp.inf)

        everything = (sampling.top_k >= vocab) & (sampling.top_p >= 1.0)
        scaled = jax.lax.cond(everything, lambda x: x, cut, scaled)
        keys = row_keys(sampling.seed, rows, step)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)
        return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.asarray(sampling.temperature) > 0, draw, greedy, logits)


def is_integer(value: object) -> bool:
    """Whether the value is a Python or NumPy integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def is_number(value: object) -> bool:
    """Whether the value is a Python or NumPy integer or float."""
    return is_integer(value) or isinstance(value, float | np.floating)
