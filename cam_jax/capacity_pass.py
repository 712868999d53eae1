"""The capacity pass: each expert (or device) keeps the best of its candidates, up to its ceiling.

This is where a token is dropped. Candidates are compared by, in this order: protected top-k first
(if asked), larger priority, the metric, the lower token index (and, for scope="device", the lower
expert id).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from cam_jax.capacity import CapacityPolicy
from cam_jax.router import Selection

Keys = tuple[Shaped[Array, "T E"], ...]


def order_keys(
    selection: Selection,
    policy: CapacityPolicy,
    *,
    protected: Bool[Array, "T E"] | None,
    priority: Int[Array, " T"] | None,
    draws: Float[Array, "T E"] | None,
) -> Keys:
    """What candidates are compared by, most important first; larger is kept first."""
    shape = selection.scores.shape
    keys: list[Array] = []
    if protected is not None:
        keys.append(protected)
    if priority is not None:
        keys.append(jnp.broadcast_to(priority[:, None], shape))
    if policy.metric == "score":
        # -0.0 and 0.0 are a tie, which a total order would not see.
        keys.append(jnp.where(selection.scores == 0, 0.0, selection.scores))
    elif policy.metric == "last":
        positions = jnp.arange(shape[0], dtype=jnp.int32)
        keys.append(jnp.broadcast_to(positions[:, None], shape))
    elif policy.metric == "random":
        assert draws is not None
        keys.append(draws)
    elif keys:  # metric "first" alone needs no key: the lower token index decides
        positions = jnp.arange(shape[0], dtype=jnp.int32)
        keys.append(jnp.broadcast_to(~positions[:, None], shape))
    return tuple(keys)


def random_draws(
    seed: int,
    layer: int | Int[Array, ""],
    group_index: int | Int[Array, ""],
    valid: Bool[Array, " T"],
    num_experts: int,
) -> Float[Array, "T E"]:
    """One float32 per token and expert, from keys of (seed, layer, group, rank among the valid).

    Independent of padding, of sharding, of x64 mode and of the configured generator.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, layer), group_index)
    rank = jnp.cumsum(valid, dtype=jnp.int32) - 1

    def draw(token_rank: Int[Array, ""]) -> Float[Array, " E"]:
        return jax.random.uniform(jax.random.fold_in(key, token_rank), (num_experts,), jnp.float32)

    return jax.vmap(draw)(jnp.maximum(rank, 0))


def fill(
    candidates: Bool[Array, "bins M"],
    keys: tuple[Shaped[Array, "bins M"], ...],
    *,
    limit: Int[Array, " bins"],
    width: int,
) -> Int[Array, "bins width"]:
    """The best ``limit`` candidates of each bin, best first; M where there are fewer.

    Ties go to the lower index, which both `jax.lax.top_k` and a stable sort guarantee.
    """
    length = candidates.shape[-1]
    width = min(width, length)
    if not keys:
        order = jax.lax.top_k(candidates.astype(jnp.int32), width)[1]
    elif len(keys) == 1:  # the common case, and top_k is several times faster than a sort
        # A lone key is a metric, so a candidate's is above the lowest value of its type.
        order = jax.lax.top_k(jnp.where(candidates, keys[0], _lowest(keys[0])), width)[1]
    else:
        position = jax.lax.broadcasted_iota(jnp.int32, candidates.shape, 1)
        operands = (~candidates, *(_descending(key) for key in keys), position)
        order = jax.lax.sort(operands, num_keys=len(operands) - 1, is_stable=True)[-1][:, :width]
    placed = jnp.take_along_axis(candidates, order, -1)  # candidates come first
    placed &= jnp.arange(width) < limit[:, None]
    return jnp.where(placed, order, length).astype(jnp.int32)


def keep(
    candidates: Bool[Array, "T E"],
    keys: Keys,
    *,
    ceiling: Int[Array, ""],
    width: int,
    policy: CapacityPolicy,
    ep_size: int,
) -> Bool[Array, "T E"]:
    """Which candidates find a slot under the ceiling of their expert, or of their device."""
    num_tokens, num_experts = candidates.shape
    if policy.scope == "expert":
        order = fill(
            candidates.T,
            tuple(key.T for key in keys),
            limit=jnp.broadcast_to(ceiling, (num_experts,)),
            width=width,
        )
        return mark(order, num_tokens).T
    per_device = -(-num_experts // ep_size)
    real = jnp.clip(num_experts - per_device * jnp.arange(ep_size), 0, per_device)
    order = fill(
        by_device(candidates, ep_size),
        tuple(by_device(key, ep_size) for key in keys),
        # n·C overflows int32 only where it exceeds every possible candidate.
        limit=(real * jnp.minimum(ceiling, num_tokens)).astype(jnp.int32),
        width=per_device * width,
    )
    marked = mark(order, num_tokens * per_device).reshape(ep_size, num_tokens, per_device)
    return marked.transpose(1, 0, 2).reshape(num_tokens, -1)[:, :num_experts]


def mark(order: Int[Array, "bins W"], length: int) -> Bool[Array, "bins M"]:
    """True at the indices that each bin lists; ``length`` marks nothing."""
    empty = jnp.zeros((order.shape[0], length), bool)
    bins = jnp.arange(order.shape[0], dtype=order.dtype)[:, None]
    return empty.at[bins, order].set(True, mode="drop")


def by_device(values: Shaped[Array, "T E"], ep_size: int) -> Shaped[Array, "ep_size M"]:
    """[T, E] -> [devices, T·ceil(E/devices)], token-major, dead experts False or 0."""
    num_tokens, num_experts = values.shape
    per_device = -(-num_experts // ep_size)
    padded = jnp.pad(values, ((0, 0), (0, ep_size * per_device - num_experts)))
    return padded.reshape(num_tokens, ep_size, per_device).transpose(1, 0, 2).reshape(ep_size, -1)


def pack(
    kept: Bool[Array, "T E"], choices: Int[Array, "T N"], *, width: int, ep_size: int | None
) -> tuple[Int[Array, "bins W"], Int[Array, "bins W"], Int[Array, "T N"]]:
    """Numbers the slots: each bin lists its kept tokens by index (devices: token, then expert).

    Args:
        kept: no bin holds more than its slots.
        choices: the kept experts of each token, E where none.
        width: slots per expert.
        ep_size: the number of bins if they are devices, else None.

    Returns:
        token and expert [bins, W] (T and E where empty), and the slots of ``choices`` [T, N].
    """
    num_tokens, num_experts = kept.shape
    per_bin = 1 if ep_size is None else -(-num_experts // ep_size)
    bins = num_experts if ep_size is None else ep_size
    slots = per_bin * width
    # A kept assignment's position in its bin: how many kept ones come before it.
    position = jnp.cumsum(by_device(kept, bins), -1, dtype=jnp.int32) - 1
    token_ids = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    bin_ids, within = choices // per_bin, choices % per_bin
    at = position.at[bin_ids, token_ids * per_bin + within].get(mode="fill", fill_value=0)
    choice_slot = jnp.where(choices < num_experts, bin_ids * slots + at, bins * slots)

    def scatter(values: Int[Array, "T N"], empty: int) -> Int[Array, "bins W"]:
        flat = jnp.full(bins * slots, empty, jnp.int32)
        return flat.at[choice_slot].set(values, mode="drop").reshape(bins, slots)

    token = scatter(jnp.broadcast_to(token_ids, choices.shape), num_tokens)
    return token, scatter(choices, num_experts), choice_slot


def _lowest(key: Num[Array, "..."]) -> Num[Array, ""]:
    if jnp.issubdtype(key.dtype, jnp.floating):
        return jnp.array(-jnp.inf, key.dtype)
    return jnp.array(jnp.iinfo(key.dtype).min, key.dtype)


def _descending(key: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """A key whose ascending order is the descending order of ``key`` (~ cannot overflow)."""
    return -key if jnp.issubdtype(key.dtype, jnp.floating) else ~key
