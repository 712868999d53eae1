"""The routing semantics written out as plain loops over tokens and experts, slow and obvious.

Shares no code with the library: it is what the vectorised routing is held against.
"""

import math

import numpy as np


def reference_capacity(policy, tokens, num_experts, top_k):
    if policy.capacity is not None:
        return max(policy.capacity, policy.min_capacity)
    if policy.capacity_factor is None:
        return tokens
    slots = policy.capacity_factor * top_k * (tokens / num_experts)
    return max(policy.min_capacity, math.ceil(slots))


def reference_route(
    scores, top_k, policy, *, valid, priority=None, draws=None, ep_size=1, ep_rank=0, choice=None
):
    """Kept assignments [T, E] and counts, from finite scores [T, E] (-inf in choice: masked)."""
    num_tokens, num_experts = scores.shape
    choice = scores if choice is None else choice
    per_device = -(-num_experts // ep_size)
    tokens = [t for t in range(num_tokens) if valid[t]]
    ceiling = reference_capacity(policy, len(tokens), num_experts, top_k)

    def best_experts(token, among, count):
        ranked = sorted((e for e in among), key=lambda e: (-choice[token, e], e))
        return ranked[:count]

    selectable = {t: [e for e in range(num_experts) if choice[t, e] > -np.inf] for t in tokens}
    original = {t: best_experts(t, selectable[t], top_k) for t in tokens}
    demand = [sum(e in original[t] for t in tokens) for e in range(num_experts)]

    skip = math.floor(policy.expert_drop * num_experts + 0.5)
    skipped = set(sorted(range(num_experts), key=lambda e: (demand[e], e))[:skip])
    selectable = {t: [e for e in selectable[t] if e not in skipped] for t in tokens}

    candidates = {t: [e for e in original[t] if e not in skipped] for t in tokens}
    top = {t: set(candidates[t]) for t in tokens}
    if policy.expand is not None:
        for t in tokens:
            local = [e for e in selectable[t] if e // per_device == ep_rank]
            count = len(local) if policy.expand == "local" else policy.expand
            for e in best_experts(t, local, count):
                if e not in candidates[t]:
                    candidates[t].append(e)

    def rank(t, e):
        if policy.metric == "score":
            metric = -scores[t, e]
        elif policy.metric == "first":
            metric = t
        elif policy.metric == "last":
            metric = -t
        else:
            metric = -draws[t, e]
        return (
            0 if policy.protect_top_k and e in top[t] else 1 if policy.protect_top_k else 0,
            -priority[t] if priority is not None else 0,
            metric,
            t,
            e,
        )

    kept = {t: [] for t in tokens}
    if ceiling >= len(tokens) * num_experts or not policy.limited:
        for t in tokens:
            kept[t] = list(candidates[t])
    elif policy.scope == "expert":
        for e in range(num_experts):
            for t in sorted((t for t in tokens if e in candidates[t]), key=lambda t: rank(t, e))[
                :ceiling
            ]:
                kept[t].append(e)
    else:
        for d in range(ep_size):
            mine = [e for e in range(num_experts) if e // per_device == d]
            pairs = sorted(
                ((t, e) for t in tokens for e in mine if e in candidates[t]),
                key=lambda pair: rank(*pair),
            )
            for t, e in pairs[: len(mine) * ceiling]:
                kept[t].append(e)

    after_ceiling = {t: set(kept[t]) for t in tokens}
    rerouted = {t: set() for t in tokens}
    if policy.overflow == "reroute" and policy.limited:
        for _ in range(policy.reroute_rounds):
            load = [sum(e in kept[t] for t in tokens) for e in range(num_experts)]
            free = [max(ceiling - n, 0) for n in load]
            proposals = {}
            for t in tokens:
                unplaced = sum(e not in after_ceiling[t] for e in top[t]) - len(rerouted[t])
                count = max(0, min(unplaced, top_k - len(kept[t])))
                among = [e for e in selectable[t] if free[e] > 0 and e not in kept[t]]
                proposals[t] = best_experts(t, among, count)
            for e in range(num_experts):
                asking = sorted((t for t in tokens if e in proposals[t]), key=lambda t: rank(t, e))
                for t in asking[: free[e]]:
                    kept[t].append(e)
                    rerouted[t].add(e)

    dropped_max = 0
    if policy.max_experts_per_token is not None:
        for t in tokens:
            best = best_experts(t, kept[t], policy.max_experts_per_token)
            dropped_max += sum(e in top[t] and e not in best for e in after_ceiling[t])
            kept[t] = best

    mask = np.zeros(scores.shape, bool)
    for t in tokens:
        mask[t, kept[t]] = True
    counts = {
        "capacity": ceiling,
        "demand": demand,
        "dropped_expert_drop": sum(len(original[t]) - len(top[t]) for t in tokens),
        "dropped_capacity": sum(len(top[t] - after_ceiling[t]) for t in tokens),
        "dropped_max_experts": dropped_max,
        "unserved_tokens": sum(not kept[t] for t in tokens),
        "rerouted": sum(len(rerouted[t] & set(kept[t])) for t in tokens),
        "expanded": sum(
            e not in original[t] and e not in rerouted[t] for t in tokens for e in kept[t]
        ),
    }
    return mask, counts
