"""The straggler of a skewed router on two devices: made to measure, and what a ceiling should save.

A dropless layer waits for the device with the most assignments. Under a ceiling every device
computes its slots, filled or not, so its time is known beforehand. Here both are constructed: which
experts a token selects is designed, and the router is made to say so.

T tokens of one device, E experts, K per token, D model and F hidden features, C slots per expert
and device of origin.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from cam_jax.capacity import CapacityPolicy, expert_capacity
from cam_jax.errors import InputError
from cam_jax.router import RouterConfig

DEVICES = 2
"""With two the straggler factor of devices is at most 2."""


@dataclass(frozen=True, kw_only=True)
class SkewedLayer:
    """One MoE layer and the skew of its routing, the same for the tokens of both devices."""

    tokens: int = 1024
    """T, tokens of each of the two devices."""
    num_experts: int = 8
    """E, half of them on each device."""
    top_k: int = 2
    """K, experts per token."""
    features: int = 512
    """D, model features; at least E."""
    hidden: int = 1024
    """F, hidden features of an expert."""
    skew: Literal["device", "expert"] = "device"
    """What is hot: all experts of device 0 alike, or expert 0 alone, all others being alike."""
    share: float = 0.9
    """Of all assignments, those to device 0 (device), or of all tokens, those that select expert 0
    (expert)."""

    @property
    def local(self) -> int:
        """Experts of one device."""
        return self.num_experts // DEVICES

    @property
    def router(self) -> RouterConfig:
        return RouterConfig(num_experts=self.num_experts, top_k=self.top_k, normalize=True)

    def check(self) -> None:
        """Refuses what cannot be constructed.

        Raises:
            InputError: a size that does not fit the others, or a share that is out of range.
        """
        for name in ("tokens", "num_experts", "top_k", "features", "hidden"):
            if getattr(self, name) < 1:
                raise InputError(f"{_flag(name)} {getattr(self, name)}: expected at least 1")
        if self.num_experts % DEVICES:
            raise InputError(
                f"--num-experts {self.num_experts}: expected a multiple of {DEVICES}, as many on "
                "each device"
            )
        if self.top_k >= self.num_experts:
            raise InputError(
                f"--top-k {self.top_k} of {self.num_experts} experts leaves no choice to skew"
            )
        if self.features < self.num_experts:
            raise InputError(
                f"--features {self.features}: expected at least --num-experts {self.num_experts}, "
                "a feature for each router logit"
            )
        least = 1 / DEVICES if self.skew == "device" else self.top_k / self.num_experts
        # A token selects an expert at most once, so few experts cannot take all of them.
        most = min(1.0, self.local / self.top_k) if self.skew == "device" else 1.0
        if not least <= self.share <= most:
            raise InputError(
                f"--share {self.share:g}: for --skew {self.skew}, {self.num_experts} experts and "
                f"top_k={self.top_k} expected {least:g} (balanced) to {most:g}"
            )


def choose_experts(
    layer: SkewedLayer, *, balanced: bool = False, seed: int = 0
) -> Int[np.ndarray, "T K"]:
    """Which experts the tokens of one device select; the counts do not depend on ``seed``.

    Args:
        balanced: without the skew.
        seed: of the tokens' order.
    """
    assignments = layer.tokens * layer.top_k
    if layer.skew == "device" or balanced:
        hot = layer.local
        number = round((1 / DEVICES if balanced else layer.share) * assignments)
    else:
        hot, number = 1, round(layer.share * layer.tokens)
    # As many hot experts for each token as for any other, give or take one.
    up_to = np.arange(layer.tokens + 1) * number // layer.tokens
    rest_up_to = np.arange(layer.tokens + 1) * layer.top_k - up_to
    chosen = np.empty((layer.tokens, layer.top_k), np.int32)
    for t in range(layer.tokens):
        # In turn: neighbours in a turn differ, and every expert of a kind has its turn as often.
        from_hot = np.arange(up_to[t], up_to[t + 1]) % hot
        from_rest = hot + np.arange(rest_up_to[t], rest_up_to[t + 1]) % (layer.num_experts - hot)
        chosen[t] = np.concatenate([from_hot, from_rest])
    return np.random.default_rng(seed).permutation(chosen)


def hidden_states(
    chosen: Int[np.ndarray, "T K"], layer: SkewedLayer, *, seed: int = 0
) -> Float[np.ndarray, "T D"]:
    """Tokens that `router_weight` reads so: the first E features are the logits."""
    rng = np.random.default_rng((1, seed))
    x = rng.standard_normal((layer.tokens, layer.features), np.float32)
    logits = rng.random((layer.tokens, layer.num_experts), np.float32)
    # Every selected expert is ahead of all others, and gate scores differ for Token Drop to rank.
    np.put_along_axis(logits, chosen, 1.5 + np.take_along_axis(logits, chosen, 1), 1)
    x[:, : layer.num_experts] = logits
    return x


def router_weight(layer: SkewedLayer) -> Float[np.ndarray, "E D"]:
    """Reads the logits off the first E features, exactly."""
    return np.eye(layer.num_experts, layer.features, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        name: for the table.
        policy: None is dropless.
        balanced: on balanced routing instead of the skewed one.
    """

    name: str
    policy: CapacityPolicy | None
    balanced: bool = False


DROPLESS = Case(name="dropless", policy=None)
BALANCED = Case(name="dropless, balanced", policy=None, balanced=True)


def cases(capacity_factors: tuple[float, ...]) -> tuple[Case, ...]:
    """Dropless, balanced and skewed, and Token Drop and Expanded Drop for each γ."""
    found = [BALANCED, DROPLESS]
    for factor in capacity_factors:
        policy = CapacityPolicy(capacity_factor=factor)
        found.append(Case(name=f"Token Drop γ={factor:g}", policy=policy))
    for factor in capacity_factors:
        policy = CapacityPolicy(capacity_factor=factor, expand="local")
        found.append(Case(name=f"Expanded Drop γ={factor:g}", policy=policy))
    return tuple(found)


def device_loads(layer: SkewedLayer, *, balanced: bool) -> Int[np.ndarray, "devices E_local"]:
    """Assignments to each expert, from the tokens of both devices."""
    chosen = choose_experts(layer, balanced=balanced)
    counts = DEVICES * np.bincount(chosen.reshape(-1), minlength=layer.num_experts)
    return counts.reshape(DEVICES, layer.local).astype(np.int32)


def slots_per_expert(layer: SkewedLayer, policy: CapacityPolicy) -> int:
    """Rows of an expert's buffer: the slots of the tokens of both devices."""
    assert policy.capacity_factor is not None  # see cases()
    capacity = expert_capacity(
        layer.tokens,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        capacity_factor=policy.capacity_factor,
    )
    return DEVICES * min(capacity, layer.tokens)


def busiest_rows(layer: SkewedLayer, case: Case) -> int:
    """Rows that the busiest device computes: its load when dropless, its slots under a ceiling."""
    if case.policy is None:
        return int(device_loads(layer, balanced=case.balanced).sum(1).max())
    return layer.local * slots_per_expert(layer, case.policy)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
