"""From router logits to gate scores, and from scores to each token's experts."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from cam_jax.errors import InputError, PolicyError

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
Leaf = Any  # an array, or what a tree transformation puts in its place


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a model family turns router logits into experts and weights. Hashable.

    Attributes:
        num_experts: E.
        top_k: K, experts per token.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalize: divide by the sum over the token's top-k (`norm_topk_prob`).
        scale: multiplies every weight (`routed_scaling_factor`).
        num_groups: expert groups of group-limited selection (`n_group`); 1 = no groups.
        top_groups: groups that a token may choose from (`topk_group`).
        group_score: a group's score: the "max" of its experts (DeepSeek-V2), or the sum of its
            "top2" (DeepSeek-V3).

    Raises:
        PolicyError: sizes that cannot hold together.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise PolicyError(f"{name}={value!r}: expected an integer")
        if not isinstance(self.normalize, bool):
            raise PolicyError(f"normalize={self.normalize!r}: expected True or False")
        if not isinstance(self.scale, int | float) or not math.isfinite(self.scale):
            raise PolicyError(f"scale={self.scale!r}: expected a finite number")
        _check_top_k(self.top_k, self.num_experts)
        for name, options in (("score", Score), ("group_score", GroupScore)):
            if getattr(self, name) not in get_args(options):
                raise PolicyError(f"{name}={getattr(self, name)!r}: expected {get_args(options)}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise PolicyError(
                f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise PolicyError(
                f"top_groups={self.top_groups}: expected 1 to num_groups={self.num_groups}"
            )
        group_size = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * group_size:
            raise PolicyError(
                f"top_k={self.top_k} experts cannot come from top_groups={self.top_groups} groups "
                f"of {group_size}"
            )
        if self.group_score == "top2" and self.num_groups > 1 and group_size < 2:
            raise PolicyError(f"group_score='top2' needs groups of two, these hold {group_size}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the tokens of one group want. Leaves may carry leading axes (groups).

    Attributes:
        scores: [T, E] float32 gate scores, unmodified; the experts' order and every weight.
        choice: [T, E] float32 selection scores, the tokens' order; -inf = not selectable.
        experts: [T, K] int32, the top-k by ``choice``, best first; ties: the lower expert id.
        denominator: [T] float32, what a gate score is divided by to become a weight.
        finite: [T] bool, False where the router's logits were NaN or infinite.
        scale: static, multiplies every weight.
    """

    scores: Leaf
    choice: Leaf
    experts: Leaf
    denominator: Leaf
    finite: Leaf
    scale: float = field(metadata={"static": True})


def select(
    logits: Num[Array, "T E"], router: RouterConfig, *, bias: Num[Array, " E"] | None = None
) -> Selection:
    """Scores every expert and picks each token's top-k, in float32.

    A row with NaN, +inf, or -inf everywhere is not finite: it selects nothing (and cannot disturb
    another row). A single -inf masks that expert.

    Args:
        logits: router logits; computed in float32, since bfloat16 logits change the selection.
        router: the family's rules.
        bias: added to the scores for selection only; never part of a weight (DeepSeek-V3).

    Raises:
        InputError: the logits are not those of ``router.num_experts`` experts.
    """
    num_experts = router.num_experts
    if logits.ndim != 2 or logits.shape[-1] != num_experts:
        raise InputError(
            f"router logits have shape {logits.shape}: expected [T, {num_experts}], the tokens of "
            f"one group and {num_experts} experts; vmap for several groups"
        )
    if bias is not None and bias.shape != (num_experts,):
        raise InputError(f"bias has shape {bias.shape}: expected [{num_experts}]")
    logits = logits.astype(jnp.float32)
    finite = _finite_rows(logits)
    # Sanitised before the softmax: one infinity makes its whole row NaN, and NaN sorts first.
    safe = jnp.where(finite[:, None], logits, 0.0)
    scores = jax.nn.softmax(safe, -1) if router.score == "softmax" else jax.nn.sigmoid(safe)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)
    choice = jnp.where((safe == -jnp.inf) | jnp.isnan(choice), -jnp.inf, choice)
    if router.num_groups > 1:
        choice = _mask_groups(choice, router)
    return _selection(
        scores,
        choice,
        finite,
        top_k=router.top_k,
        normalize=router.normalize,
        scale=float(router.scale),
    )


def select_from_scores(scores: Num[Array, "T E"], top_k: int) -> Selection:
    """A selection from gate scores that are given; weights are the raw scores.

    Rows that are not finite are treated as `select` treats logits.

    Raises:
        PolicyError: ``top_k`` outside 1..E.
    """
    _check_top_k(top_k, scores.shape[-1])
    scores = scores.astype(jnp.float32)
    finite = _finite_rows(scores)
    safe = jnp.where(finite[:, None], scores, 0.0)
    return _selection(
        jnp.where(safe == -jnp.inf, 0.0, safe),
        safe,
        finite,
        top_k=top_k,
        normalize=False,
        scale=1.0,
    )


def _selection(
    scores: Float[Array, "T E"],
    choice: Float[Array, "T E"],
    finite: Bool[Array, " T"],
    *,
    top_k: int,
    normalize: bool,
    scale: float,
) -> Selection:
    choice = jnp.where(choice == 0, 0.0, choice)  # -0.0 and 0.0 are a tie
    best, experts = jax.lax.top_k(choice, top_k)
    if normalize:  # over the experts that can be had; a masked one may fill up the list
        picked = jnp.take_along_axis(scores, experts, -1).sum(-1, where=best > -jnp.inf)
        denominator = jnp.maximum(picked, jnp.finfo(jnp.float32).tiny)
    else:
        denominator = jnp.ones(scores.shape[0], jnp.float32)
    return Selection(
        scores=scores,
        choice=choice,
        experts=experts,
        denominator=denominator,
        finite=finite,
        scale=scale,
    )


def _finite_rows(values: Float[Array, "T E"]) -> Bool[Array, " T"]:
    broken = jnp.isnan(values) | (values == jnp.inf)
    return ~broken.any(-1) & (values > -jnp.inf).any(-1)


def _mask_groups(choice: Float[Array, "T E"], router: RouterConfig) -> Float[Array, "T E"]:
    """-inf outside each token's best groups: zero would still win over a negative biased score."""
    grouped = choice.reshape(choice.shape[0], router.num_groups, -1)
    if router.group_score == "max":
        group_scores = grouped.max(-1)
    else:
        best, second = jnp.moveaxis(jax.lax.top_k(grouped, 2)[0], -1, 0)
        # A masked second expert adds nothing; it does not mask its group.
        group_scores = best + jnp.where(second > -jnp.inf, second, 0.0)
    best = jax.lax.top_k(group_scores, router.top_groups)[1]
    return jnp.where(one_hot_any(best, router.num_groups)[:, :, None], grouped, -jnp.inf).reshape(
        choice.shape
    )


def one_hot_any(ids: Int[Array, "T N"], size: int) -> Bool[Array, "T size"]:
    """True at [t, i] where token t's list holds i; ids outside 0..size-1 mark nothing."""
    return (ids[:, :, None] == jnp.arange(size, dtype=ids.dtype)).any(1)


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise PolicyError(f"top_k={top_k}: expected 1 to the number of experts, {num_experts}")
