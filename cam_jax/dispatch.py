"""From tokens to slots and back: dispatch, combine, and their gradients.

T tokens, N choices (experts a token may have), slots = bins · W. Both directions are gathers, in
the forward and in the backward pass: the plan knows each slot's token and each token's slots, so
rows are never scattered and added. Indices outside (empty slots, unused choices) read zeros.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from cam_jax.errors import InputError
from cam_jax.plan import RoutingPlan
from cam_jax.varying import vary_together

_UNROLL = 16  # choices; more (expansion to many local experts) are a loop, to compile quickly


def dispatch(x: Float[Array, "T D"], plan: RoutingPlan) -> Float[Array, "bins W D"]:
    """Every slot's token, 0 in empty slots: [E, C, D], or [devices, W, D] for scope="device".

    Raises:
        InputError: not the tokens that the plan was made for.
    """
    if x.ndim != 2 or x.shape[0] != plan.num_tokens:
        raise InputError(
            f"dispatch: x has shape {x.shape}, the plan is of {plan.num_tokens} tokens"
        )
    rows = take_rows(x, plan.token.reshape(-1), plan.choice_slot)
    return rows.reshape(*plan.token.shape, x.shape[-1])


def combine(y_e: Float[Array, "bins W D"], plan: RoutingPlan) -> Float[Array, "T D"]:
    """The weighted sum of what a token's experts made of it, in float32; 0 if it has none.

    Differentiable in ``y_e`` and in the weights (through ``plan.choice_weight``).

    Raises:
        InputError: not the slots of the plan.
    """
    if y_e.ndim != 3 or y_e.shape[:2] != plan.token.shape:
        raise InputError(f"combine: y_e has shape {y_e.shape}, the plan's slots {plan.token.shape}")
    rows = y_e.reshape(-1, y_e.shape[-1])
    return combine_rows(
        rows,
        plan.token.reshape(-1),
        plan.weight.reshape(-1),
        plan.choice_slot,
        plan.choice_weight,
    )


def merge_groups(plan: RoutingPlan) -> RoutingPlan:
    """Makes one plan of G plans with leading axis [G]: tokens [G·T], slots [bins, G·W].

    A bin's slots of all groups are then neighbours, so that its weights are read once.

    Raises:
        InputError: more slots than an int32 can number.
    """
    groups, bins, width = plan.token.shape
    tokens, choices = plan.num_tokens, plan.choice_slot.shape[-1]
    if max(bins * groups * width, groups * tokens * choices) > np.iinfo(np.int32).max:
        raise InputError(
            f"{groups} groups x {bins} bins x {width} slots exceed int32: use smaller batches"
        )
    group = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    token = jnp.where(plan.token < tokens, plan.token + group * tokens, groups * tokens)
    bin_, position = plan.choice_slot // width, plan.choice_slot % width
    slot = jnp.where(bin_ < bins, (bin_ * groups + group) * width + position, bins * groups * width)

    def by_bin(leaf: Array) -> Array:
        return leaf.swapaxes(0, 1).reshape(bins, groups * width)

    def by_token(leaf: Array) -> Array:
        return leaf.reshape(groups * tokens, choices)

    return dataclasses.replace(
        plan,
        token=by_bin(token),
        expert=by_bin(plan.expert),
        weight=by_bin(plan.weight),
        choice_slot=by_token(slot),
        choice_expert=by_token(plan.choice_expert),
        choice_weight=by_token(plan.choice_weight),
        load=plan.load.sum(0),
        num_tokens=groups * tokens,
    )


# --- the two primitives, on flat slots ---


def take_rows(
    x: Float[Array, "T D"], token: Int[Array, " slots"], choice_slot: Int[Array, "T N"]
) -> Float[Array, "slots D"]:
    """`x[token]`, 0 where token is T. ``choice_slot`` is its inverse: each token's slots."""
    return _take_rows(*vary_together(x, token, choice_slot))


@jax.custom_vjp
def _take_rows(x: Array, token: Array, choice_slot: Array) -> Array:
    return _rows(x, token)


def _take_rows_forward(x: Array, token: Array, choice_slot: Array) -> tuple[Array, Array]:
    return _rows(x, token), choice_slot


def _take_rows_backward(choice_slot: Array, grad: Array) -> tuple[Array, None, None]:
    total = _sum_over_choices(lambda slot: _rows(grad, slot).astype(jnp.float32), choice_slot)
    return total.astype(grad.dtype), None, None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def combine_rows(
    y: Float[Array, "slots D"],
    token: Int[Array, " slots"],
    weight: Float[Array, " slots"],
    choice_slot: Int[Array, "T N"],
    choice_weight: Float[Array, "T N"],
) -> Float[Array, "T D"]:
    """`sum over n of choice_weight[t, n] · y[choice_slot[t, n]]` without a [T, N, D] array.

    ``token`` and ``weight`` are the same from the slots' side; they serve the backward pass.
    """
    return _combine_rows(*vary_together(y, token, weight, choice_slot, choice_weight))


@jax.custom_vjp
def _combine_rows(
    y: Array, token: Array, weight: Array, choice_slot: Array, choice_weight: Array
) -> Array:
    return _sum_over_choices(
        lambda slot, share: share[:, None] * _rows(y, slot), choice_slot, choice_weight
    ).astype(y.dtype)


def _combine_rows_forward(
    y: Array, token: Array, weight: Array, choice_slot: Array, choice_weight: Array
) -> tuple[Array, tuple[Array, ...]]:
    out = _combine_rows(y, token, weight, choice_slot, choice_weight)
    return out, (y, token, weight, choice_slot)


def _combine_rows_backward(
    saved: tuple[Array, ...], grad: Array
) -> tuple[Array, None, None, None, Array]:
    y, token, weight, choice_slot = saved
    d_y = (weight[:, None] * _rows(grad, token)).astype(y.dtype)
    wide = grad.astype(jnp.float32)
    d_weight = _for_each_choice(lambda slot: (wide * _rows(y, slot)).sum(-1), choice_slot)
    return d_y, None, None, None, d_weight


_combine_rows.defvjp(_combine_rows_forward, _combine_rows_backward)


def _rows(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


def _sum_over_choices(term: Callable[..., Array], *per_choice: Array) -> Array:
    """Sum over n of `term(*columns n of per_choice)`, one [T, D] term at a time."""
    columns = [leaf.T for leaf in per_choice]
    num_choices = columns[0].shape[0]

    def add(n: int | Array, total: Array) -> Array:
        return total + term(*(column[n] for column in columns))

    total = term(*(column[0] for column in columns))
    if num_choices > _UNROLL:
        return lax.fori_loop(1, num_choices, add, total)
    for n in range(1, num_choices):
        total = add(n, total)
    return total


def _for_each_choice(term: Callable[[Array], Array], choice_slot: Array) -> Array:
    """[T, N] of `term(column n)`, one choice at a time."""
    columns = choice_slot.T
    if columns.shape[0] <= _UNROLL:
        return jnp.stack([term(column) for column in columns], 1)
    return lax.map(term, columns).T
