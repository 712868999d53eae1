"""`route`: from what tokens want to who fills which slot. One group; vmap for several.

The steps, in order: who is a candidate (top-k, expansion, Expert Drop) -> each expert keeps the
best of its candidates (`capacity_pass.fill`: where a token is dropped) -> unplaced assignments are
offered elsewhere (`reroute`) -> at most n experts per token -> the plan.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cam_jax import capacity_pass
from cam_jax.candidates import Candidates, find_candidates
from cam_jax.capacity import CapacityPolicy, buffer_capacity, traced_capacity
from cam_jax.errors import InputError, PolicyError
from cam_jax.load_stats import LoadStats
from cam_jax.plan import RoutingPlan
from cam_jax.reroute import reroute
from cam_jax.router import Selection, one_hot_any

NO_POLICY = CapacityPolicy()


def route(
    selection: Selection,
    policy: CapacityPolicy | None,
    *,
    valid: Bool[Array, " T"] | None = None,
    priority: Int[Array, " T"] | None = None,
    demand: Int[Array, " E"] | None = None,
    layer: int | Int[Array, ""] = 0,
    group_index: int | Int[Array, ""] = 0,
    ep_size: int = 1,
    ep_rank: int | Int[Array, "*T"] = 0,
    local: Bool[Array, "*T E"] | None = None,
) -> RoutingPlan:
    """Decides which expert processes which token of one group, under ``policy``.

    Pure, with static shapes: safe under jit, vmap, grad (through scores and weights) and shard_map.
    No expert gets more than the logical ceiling of the group's valid tokens, ever.

    Args:
        selection: what the T tokens want, from `select` or `select_from_scores`.
        policy: static. None: no ceiling, the model as trained. How tokens are grouped is the
            caller's business here (these T tokens compete), and a plan with overflow="fallback"
            drops: `moe_layer` is what runs the exact pass then.
        valid: which tokens are real; the others take no slot and count nowhere.
        priority: larger is kept first, before the metric is looked at.
        demand: what Expert Drop ranks experts by, so that all groups skip the same ones; None:
            this selection's own demand.
        layer, group_index: folded into the keys of metric="random"; may be traced.
        ep_size: devices that the experts are spread over, in blocks of ceil(E/ep_size).
        ep_rank: the device of these tokens, [] or one per token; may be traced. Its experts are
            the ones that expansion offers.
        local: the experts that expansion offers instead, [E] or [T, E].

    Returns:
        A plan whose buffer has min(C, T) slots per expert, C being the ceiling for all T tokens.

    Raises:
        PolicyError: ep_size or ep_rank out of range, or Expert Drop leaves no expert.
        InputError: an argument whose shape does not fit the selection.
    """
    if not isinstance(selection, Selection):
        raise InputError(
            f"route takes a Selection (cam_jax.select, cam_jax.select_from_scores), got a "
            f"{type(selection).__name__}"
        )
    policy = check_policy_type(policy)
    num_tokens, num_experts = selection.scores.shape
    top_k = selection.experts.shape[-1]
    _check(num_tokens, num_experts, ep_size, ep_rank, valid, priority, demand, local)
    if valid is not None and valid.dtype != bool:
        raise InputError(f"valid has dtype {valid.dtype}: expected a bool mask")
    valid = jnp.ones(num_tokens, bool) if valid is None else valid

    candidates = find_candidates(
        selection,
        policy,
        valid=valid,
        demand=demand,
        ep_size=ep_size,
        ep_rank=ep_rank,
        local=local,
    )
    if policy.metric == "random":
        draws = capacity_pass.random_draws(policy.seed, layer, group_index, valid, num_experts)
    else:
        draws = None
    keys = capacity_pass.order_keys(
        selection,
        policy,
        protected=candidates.top_k if policy.protect_top_k else None,
        priority=priority,
        draws=draws,
    )

    sizes = {"num_experts": num_experts, "top_k": top_k}
    valid_tokens = valid.sum(dtype=jnp.int32)
    ceiling = traced_capacity(policy, valid_tokens, max_tokens=num_tokens, **sizes)
    if policy.limited:
        width = buffer_capacity(policy, num_tokens, **sizes)
        kept = capacity_pass.keep(
            candidates.all, keys, ceiling=ceiling, width=width, policy=policy, ep_size=ep_size
        )
    else:
        width, kept = num_tokens, candidates.all
    after_ceiling = kept
    if policy.limited and policy.overflow == "reroute":
        kept = reroute(
            selection, candidates, kept, keys, ceiling=ceiling, width=width, policy=policy
        )
    rerouted = kept & ~after_ceiling

    choices, kept = _choices(selection, policy, kept, candidates)
    token, expert, choice_slot = capacity_pass.pack(
        kept, choices, width=width, ep_size=ep_size if policy.scope == "device" else None
    )
    weights = _weights(selection, policy, kept)
    load = _load_stats(
        selection, policy, candidates, valid, after_ceiling, rerouted, kept, ceiling, valid_tokens
    )
    return RoutingPlan(
        token=token,
        expert=expert,
        weight=weights.at[token, expert].get(mode="fill", fill_value=0.0),
        choice_slot=choice_slot,
        choice_expert=choices,
        choice_weight=_take(weights, choices),
        load=load,
        num_tokens=num_tokens,
        num_experts=num_experts,
    )


def _choices(
    selection: Selection,
    policy: CapacityPolicy,
    kept: Bool[Array, "T E"],
    candidates: Candidates,
) -> tuple[Int[Array, "T N"], Bool[Array, "T E"]]:
    """Each token's kept experts as a list of static length, E where there is none.

    With max_experts_per_token the list is cut to the best n, which decides what stays kept.
    """
    num_experts, top_k = selection.scores.shape[-1], selection.experts.shape[-1]
    most = policy.max_experts_per_token
    only_top_k = candidates.most_extra == 0 and not (
        policy.limited and policy.overflow == "reroute"
    )
    if only_top_k and (most is None or most >= top_k):
        return jnp.where(
            jnp.take_along_axis(kept, selection.experts, -1), selection.experts, num_experts
        ), kept
    length = min(num_experts, top_k + candidates.most_extra)
    if most is not None:
        length = min(length, most)
    best, experts = jax.lax.top_k(jnp.where(kept, selection.choice, -jnp.inf), length)
    choices = jnp.where(best > -jnp.inf, experts, num_experts)
    return choices, kept if most is None else one_hot_any(choices, num_experts)


def _weights(
    selection: Selection, policy: CapacityPolicy, kept: Bool[Array, "T E"]
) -> Float[Array, "T E"]:
    """Weights of the kept assignments, exactly 0 elsewhere (no bias ever enters one)."""
    scores = jnp.where(kept, selection.scores, 0.0)
    if policy.renormalize:
        kept_sum = scores.sum(-1)
        denominator = jnp.where(kept_sum == 0, 1.0, kept_sum)
    else:
        denominator = selection.denominator
    return scores / denominator[:, None] * selection.scale


def _take(weights: Float[Array, "T E"], choices: Int[Array, "T N"]) -> Float[Array, "T N"]:
    return jnp.take_along_axis(weights, choices, -1, mode="fill", fill_value=0.0)


def _load_stats(
    selection: Selection,
    policy: CapacityPolicy,
    candidates: Candidates,
    valid: Bool[Array, " T"],
    after_ceiling: Bool[Array, "T E"],
    rerouted: Bool[Array, "T E"],
    kept: Bool[Array, "T E"],
    ceiling: Int[Array, ""],
    valid_tokens: Int[Array, ""],
) -> LoadStats:
    def count(mask: Bool[Array, "..."]) -> Int[Array, ""]:
        return mask.sum(dtype=jnp.int32)

    num_experts, top_k = selection.scores.shape[-1], selection.experts.shape[-1]
    original, eligible = candidates.original, candidates.top_k
    nonfinite = count(valid & ~selection.finite)
    load = kept.sum(0, dtype=jnp.int32)
    return LoadStats(
        demand=original.sum(0, dtype=jnp.int32),
        load=load,
        tokens=valid_tokens,
        capacity=ceiling,
        slots=num_experts * jnp.minimum(ceiling, valid_tokens)
        if policy.limited
        else load.sum(dtype=jnp.int32),
        dropped_capacity=count(eligible & ~after_ceiling),
        dropped_max_experts=count(eligible & after_ceiling & ~kept),
        dropped_expert_drop=count(original & ~eligible),
        dropped_nonfinite=top_k * nonfinite,
        nonfinite_tokens=nonfinite,
        unserved_tokens=count(valid & ~kept.any(-1)),
        expanded=count(kept & ~original & ~rerouted),
        rerouted=count(kept & rerouted),
        top_k=top_k,
    )


def check_policy_type(policy: CapacityPolicy | None) -> CapacityPolicy:
    """The policy, or the one without a ceiling.

    Raises:
        PolicyError: something else.
    """
    if policy is not None and not isinstance(policy, CapacityPolicy):
        raise PolicyError(f"policy must be a CapacityPolicy or None, got a {type(policy).__name__}")
    return policy or NO_POLICY


def check_priority(priority: Array | np.ndarray) -> None:
    """Refuses a priority that int32 would cut.

    Raises:
        InputError: not integers, or host values beyond int32.
    """
    if priority.dtype != bool and not jnp.issubdtype(priority.dtype, jnp.integer):
        raise InputError(f"priority has dtype {priority.dtype}: expected integers")
    if isinstance(priority, np.ndarray) and priority.size:
        limits = np.iinfo(np.int32)
        if priority.min() < limits.min or priority.max() > limits.max:
            raise InputError(
                f"priority goes from {priority.min()} to {priority.max()}: expected int32 values"
            )


def _check(
    num_tokens: int,
    num_experts: int,
    ep_size: int,
    ep_rank: int | Int[Array, "*T"],
    valid: Array | None,
    priority: Array | None,
    demand: Array | None,
    local: Array | None,
) -> None:
    if num_tokens == 0:
        raise InputError("route: the selection holds no tokens")
    if not 1 <= ep_size <= num_experts:
        raise PolicyError(f"ep_size={ep_size}: expected 1 to the number of experts, {num_experts}")
    if isinstance(ep_rank, int | np.integer | np.ndarray):
        ranks = np.asarray(ep_rank)
        if ranks.size and not 0 <= ranks.min() <= ranks.max() < ep_size:
            raise PolicyError(f"ep_rank={ep_rank}: expected 0 to ep_size - 1 = {ep_size - 1}")
    if priority is not None:
        check_priority(priority)
    for name, given, shapes in (
        ("valid", valid, [(num_tokens,)]),
        ("priority", priority, [(num_tokens,)]),
        ("demand", demand, [(num_experts,)]),
        ("local", local, [(num_experts,), (num_tokens, num_experts)]),
        ("ep_rank", ep_rank if hasattr(ep_rank, "shape") else None, [(), (num_tokens,)]),
    ):
        if given is not None and given.shape not in shapes:
            raise InputError(f"{name} has shape {given.shape}: expected {shapes}")
    if math.prod((num_tokens, num_experts)) > 2**31 - 1:
        raise InputError(
            f"{num_tokens} tokens x {num_experts} experts in one group exceed int32 slot numbers: "
            "use smaller groups"
        )
