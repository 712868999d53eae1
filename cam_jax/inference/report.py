"""What routing did with a batch, as host arrays: per MoE layer, their mean, and the worst layer.

Letters: L MoE layers, E experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from cam_jax.load_stats import LoadStats

#: Why an original assignment was not kept.
CAUSES = ("capacity", "max_experts", "expert_drop", "nonfinite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSummary:
    """One layer, or the mean of all.

    Attributes:
        straggler_factor: largest expert load over the mean load K·T/E; 1 is perfect balance.
        device_straggler_factor: the same of devices, consecutive blocks of ceil(E/devices) experts;
            None without (virtual) devices.
        demand_straggler_factor: as ``straggler_factor``, of what the router asked for.
        dropped_share: original assignments that were not kept, as a share of all.
        slot_use: kept assignments per slot.
    """

    straggler_factor: float
    device_straggler_factor: float | None
    demand_straggler_factor: float
    dropped_share: float
    slot_use: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """Routing of one call, summed over its groups. Padding is counted nowhere.

    Attributes:
        layers: the MoE layers' indices in the decoder; all arrays follow them.
        tokens: real tokens of the call.
        top_k: K.
        demand: [L, E] original top-k assignments.
        load: [L, E] kept assignments, expanded and rerouted ones included.
        capacity: [L] the logical ceiling C per expert and group (the largest group's); without a
            ceiling, the group's tokens.
        slots: [L] slots that may be filled, over all groups.
        dropped: [L] original assignments that were not kept.
        dropped_by_cause: the same by cause: "capacity", "max_experts", "expert_drop", "nonfinite";
            each [L].
        dropped_share: [L] ``dropped`` over all original assignments.
        unserved_tokens: [L] tokens that no expert kept: they ride the residual alone.
        expanded: [L] kept assignments that expansion proposed.
        rerouted: [L] kept assignments that rerouting placed.
        slot_use: [L] kept assignments per slot.
        straggler_factor: [L] largest expert load over K·tokens/E.
        demand_straggler_factor: [L] the same of ``demand``, before the ceiling.
        device_straggler_factor: [L] largest device load over K·tokens/devices; None with one
            device.
        devices: devices that the experts are divided among, real or virtual.
        notes: what the caller should know, e.g. that the batch fills fewer groups than there are
            devices.
    """

    layers: tuple[int, ...]
    tokens: int
    top_k: int
    demand: Int[np.ndarray, "L E"]
    load: Int[np.ndarray, "L E"]
    capacity: Int[np.ndarray, " L"]
    slots: Int[np.ndarray, " L"]
    dropped: Int[np.ndarray, " L"]
    dropped_by_cause: Mapping[str, Int[np.ndarray, " L"]]
    dropped_share: Float[np.ndarray, " L"]
    unserved_tokens: Int[np.ndarray, " L"]
    expanded: Int[np.ndarray, " L"]
    rerouted: Int[np.ndarray, " L"]
    slot_use: Float[np.ndarray, " L"]
    straggler_factor: Float[np.ndarray, " L"]
    demand_straggler_factor: Float[np.ndarray, " L"]
    device_straggler_factor: Float[np.ndarray, " L"] | None
    devices: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        stats: LoadStats,
        *,
        layers: tuple[int, ...],
        devices: int = 1,
        notes: tuple[str, ...] = (),
    ) -> "RoutingReport":
        """From load statistics whose leaves have the leading axis L."""
        stats = jax.tree.map(np.asarray, stats)
        figures = jax.tree.map(np.asarray, _figures(stats, devices=devices))
        return cls(
            layers=layers,
            tokens=int(stats.tokens[0]),
            top_k=stats.top_k,
            demand=stats.demand,
            load=stats.load,
            capacity=stats.capacity,
            slots=stats.slots,
            dropped_by_cause={cause: getattr(stats, f"dropped_{cause}") for cause in CAUSES},
            unserved_tokens=stats.unserved_tokens,
            expanded=stats.expanded,
            rerouted=stats.rerouted,
            devices=devices,
            notes=notes,
            **figures,
        )

    def as_data(self) -> dict[str, Any]:
        """The attributes as numbers, lists and dictionaries, for JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: plain(entry) for key, entry in value.items()}
            if isinstance(value, np.ndarray):
                return value.tolist()
            return list(value) if isinstance(value, tuple) else value

        return {name.name: plain(getattr(self, name.name)) for name in dataclasses.fields(self)}

    def layer(self, index: int) -> RoutingSummary:
        """The figures of the MoE layer at ``index`` of the arrays."""
        by_device = self.device_straggler_factor
        return RoutingSummary(
            straggler_factor=float(self.straggler_factor[index]),
            device_straggler_factor=None if by_device is None else float(by_device[index]),
            demand_straggler_factor=float(self.demand_straggler_factor[index]),
            dropped_share=float(self.dropped_share[index]),
            slot_use=float(self.slot_use[index]),
        )

    @property
    def mean(self) -> RoutingSummary:
        """The mean over the MoE layers: a model's figure."""
        by_device = self.device_straggler_factor
        return RoutingSummary(
            straggler_factor=float(self.straggler_factor.mean()),
            device_straggler_factor=None if by_device is None else float(by_device.mean()),
            demand_straggler_factor=float(self.demand_straggler_factor.mean()),
            dropped_share=float(self.dropped_share.mean()),
            slot_use=float(self.slot_use.mean()),
        )

    @property
    def worst_layer(self) -> int:
        """The decoder layer whose straggler factor is largest."""
        return self.layers[int(self.straggler_factor.argmax())]

    @property
    def worst(self) -> RoutingSummary:
        """The figures of that layer."""
        return self.layer(int(self.straggler_factor.argmax()))


@functools.partial(jax.jit, static_argnames=("devices",))
def _figures(stats: LoadStats, *, devices: int) -> dict[str, Any]:
    """What is derived from the counts, as one small program."""
    return {
        "dropped": stats.dropped,
        "dropped_share": stats.dropped_share,
        "slot_use": stats.slot_use,
        "straggler_factor": stats.straggler(),
        "demand_straggler_factor": stats.straggler(of="demand"),
        "device_straggler_factor": stats.straggler(devices=devices) if devices > 1 else None,
    }
