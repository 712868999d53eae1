"""The capacity policy, and the arithmetic that turns a capacity factor into a number of slots.

A *capacity factor* γ means one thing in cam_jax: every expert keeps at most

    C = max(min_capacity, ceil(γ · K · T / E))

assignments of every group of ``T`` competing tokens, evaluated in float64 in the order γ·K·(T/E)
(He et al., ICLR 2026, section 3; the paper's pseudo-code floors, its code and this one round up).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from cam_jax.errors import PolicyError

Metric = Literal["score", "first", "last", "random"]
Scope = Literal["expert", "device"]
Group = Literal["device", "sequence", "batch"]
Overflow = Literal["drop", "reroute", "fallback"]
Decode = Literal["exempt", "capped"]

_INT32_MAX = np.iinfo(np.int32).max
_INTEGERS = (
    "capacity",
    "expand",
    "max_experts_per_token",
    "reroute_rounds",
    "min_capacity",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class CapacityPolicy:
    """What is done about tokens that would exceed an expert's capacity. Hashable: a static value.

    Attributes:
        capacity_factor: γ, relative to the mean load K·T/E; None (with ``capacity`` None) means no
            ceiling.
        capacity: the ceiling itself, in slots per expert and group, instead of γ.
        metric: which candidates an expert keeps: the highest gate "score", the "first" or "last"
            positions, or "random" ones (seeded). Ties: the lower token index.
        expand: Expanded Drop. None; "local": all experts on the token's own device become
            candidates too; an integer m: the m best of them by selection score (those already in
            the top-k are counted).
        protect_top_k: expanded candidates never displace a top-k assignment.
        max_experts_per_token: keep only this many of the experts that kept a token (no refill).
        scope: the ceiling holds per "expert", or for all experts of a "device" together.
        group: which tokens compete: those of one "device" (the paper), "sequence" or "batch".
        overflow: "drop"; "reroute" unplaced assignments to experts with free slots; "fallback" to
            an exact dropless pass whenever anything would be dropped.
        reroute_rounds: how often unplaced assignments are proposed anew.
        expert_drop: the paper's baseline: skip this share of the experts, least demanded first.
        renormalize: divide gate scores by the sum of the kept ones.
        min_capacity: a lower bound of C.
        decode: decode steps are "exempt" from the policy (as published) or "capped" too.
        seed: of the "random" metric.

    Raises:
        PolicyError: an option out of its range, or two options that exclude each other.
    """

    capacity_factor: float | None = None
    capacity: int | None = None
    metric: Metric = "score"
    expand: Literal["local"] | int | None = None
    protect_top_k: bool = False
    max_experts_per_token: int | None = None
    scope: Scope = "expert"
    group: Group = "device"
    overflow: Overflow = "drop"
    reroute_rounds: int = 1
    expert_drop: float = 0.0
    renormalize: bool = False
    min_capacity: int = 1
    decode: Decode = "exempt"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.capacity_factor is not None:
            object.__setattr__(self, "capacity_factor", _factor(self.capacity_factor))
        if self.capacity is not None:
            _integer("capacity", self.capacity, least=1)
            if self.capacity_factor is not None:
                raise PolicyError(
                    f"capacity_factor={self.capacity_factor} and capacity={self.capacity} both "
                    "set the ceiling: give one of them"
                )
        for name, options in (
            ("metric", Metric),
            ("scope", Scope),
            ("group", Group),
            ("overflow", Overflow),
            ("decode", Decode),
        ):
            _one_of(name, getattr(self, name), get_args(options))
        for name in ("protect_top_k", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.expand is not None and self.expand != "local":
            _integer("expand", self.expand, least=1, other="None or 'local'")
        if self.max_experts_per_token is not None:
            _integer("max_experts_per_token", self.max_experts_per_token, least=1, other="None")
        _integer("reroute_rounds", self.reroute_rounds, least=1)
        _integer("min_capacity", self.min_capacity, least=1)
        if self.capacity is not None and self.min_capacity > self.capacity:
            raise PolicyError(
                f"min_capacity={self.min_capacity} contradicts capacity={self.capacity}, which is "
                "the ceiling itself: leave it out"
            )
        _integer("seed", self.seed, least=0)
        if not _is_number(self.expert_drop) or not 0.0 <= self.expert_drop < 1.0:
            raise PolicyError(f"expert_drop={self.expert_drop!r}: expected a share in [0, 1)")
        object.__setattr__(self, "expert_drop", float(self.expert_drop))
        for name in _INTEGERS:  # NumPy's are taken and become Python's
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.overflow == "fallback":
            for name, given in (
                (f"expand={self.expand!r}", self.expand is not None),
                (f"expert_drop={self.expert_drop}", self.expert_drop > 0),
                ("scope='device'", self.scope == "device"),
            ):
                if given:
                    raise PolicyError(
                        f"overflow='fallback' promises the exact result, which {name} changes: "
                        "leave one of them out"
                    )
        if self.scope == "device" and self.group != "device":
            raise PolicyError(
                f"scope='device' limits what one device sends to another, so its tokens must "
                f"compete as group='device', not group={self.group!r}"
            )
        if self.scope == "device" and self.overflow == "reroute":
            raise PolicyError(
                "scope='device' has no free slots per expert, so overflow='reroute' has nowhere "
                "to go: use overflow='drop' or scope='expert'"
            )

    @property
    def limited(self) -> bool:
        """Whether there is a ceiling at all."""
        return self.capacity_factor is not None or self.capacity is not None


def expert_capacity(
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    capacity_factor: float,
    min_capacity: int = 1,
) -> int:
    """Slots per expert for a group of ``num_tokens``: max(min_capacity, ceil(γ·K·T/E)).

    The logical ceiling: it may exceed ``num_tokens`` (a buffer never does, see
    `buffer_capacity`). Float64 on the host, so 1.1 · 8 · (400 / 64) is 56 by this convention.

    Raises:
        PolicyError: a count below its range, or γ not a positive finite number.
    """
    _integer("num_tokens", num_tokens, least=0)
    _integer("num_experts", num_experts, least=1)
    _integer("top_k", top_k, least=1)
    _integer("min_capacity", min_capacity, least=1)
    gamma = _factor(capacity_factor)
    slots = gamma * top_k * (num_tokens / num_experts)
    if slots >= _INT32_MAX:  # γ·K alone may be astronomic; an int32 count must hold the result
        return _INT32_MAX
    return max(min_capacity, math.ceil(slots))


def policy_capacity(
    policy: CapacityPolicy | None, num_tokens: int, *, num_experts: int, top_k: int
) -> int:
    """The logical ceiling of ``policy`` for a group of ``num_tokens``; without one, num_tokens."""
    if policy is None or not policy.limited:
        return num_tokens
    if policy.capacity is not None:
        return policy.capacity
    assert policy.capacity_factor is not None
    return expert_capacity(
        num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        capacity_factor=policy.capacity_factor,
        min_capacity=policy.min_capacity,
    )


def buffer_capacity(
    policy: CapacityPolicy | None, num_tokens: int, *, num_experts: int, top_k: int
) -> int:
    """Physical slots per expert: min(C, T), since an expert holds a token at most once."""
    return min(
        policy_capacity(policy, num_tokens, num_experts=num_experts, top_k=top_k), num_tokens
    )


def traced_capacity(
    policy: CapacityPolicy | None,
    valid_tokens: Int[Array, "..."],
    *,
    max_tokens: int,
    num_experts: int,
    top_k: int,
) -> Int[Array, "..."]:
    """The logical ceiling for a traced number of valid tokens, 0..max_tokens.

    Looked up in a table made in float64 on the host: float32 arithmetic on the device gives a
    wrong C now and then, and two devices that disagree about C would corrupt or hang.
    """
    if policy is None or not policy.limited:
        return valid_tokens
    if policy.capacity_factor is None:
        ceiling = policy_capacity(policy, max_tokens, num_experts=num_experts, top_k=top_k)
        return jnp.full_like(valid_tokens, ceiling)
    counts = np.arange(max_tokens + 1, dtype=np.float64)
    slots = np.ceil(policy.capacity_factor * top_k * (counts / num_experts))
    table = np.clip(slots, policy.min_capacity, _INT32_MAX).astype(np.int32)
    return jnp.asarray(table)[valid_tokens]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _factor(value: object) -> float:
    try:
        usable = _is_number(value) and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
    except OverflowError:  # an integer beyond float64
        usable = False
    if not usable:
        raise PolicyError(
            f"capacity_factor={value!r}: expected a finite number above 0, or None for no ceiling"
        )
    return float(value)  # type: ignore[arg-type]


def _integer(name: str, value: object, *, least: int, other: str | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not least <= value <= _INT32_MAX:  # type: ignore[operator]
        also = f", {other}" if other else ""
        raise PolicyError(f"{name}={value!r}: expected an integer of at least {least}{also}")


def _one_of(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise PolicyError(f"{name}={value!r}: expected one of {', '.join(map(repr, options))}")
