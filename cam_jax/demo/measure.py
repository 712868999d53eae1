"""One policy on all of the text: quality, balance, drops, time.

Letters: L MoE layers, E experts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cam_jax.demo.cases import Case
from cam_jax.demo.text import Windows
from cam_jax.inference.language_model import LanguageModel
from cam_jax.inference.report import RoutingReport


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a policy did with the text.

    Attributes:
        case: the policy.
        bits_per_byte: -sum log2 p / bytes.
        straggler: [L] largest expert load over the mean, of a batch; weighted mean of the batches.
        device_straggler: [L] the same of virtual devices; None with one device.
        dropped: [L] share of the original assignments that was not kept.
        slot_use: [L] kept assignments per slot.
        load: [L, E] kept assignments, of all the text.
        demand: [L, E] original assignments, of all the text.
        seconds: wall time of the pass over the text, without compilation if `warm_up` came before.
        notes: of the routing.
    """

    case: Case
    bits_per_byte: float
    straggler: Float[np.ndarray, " L"]
    device_straggler: Float[np.ndarray, " L"] | None
    dropped: Float[np.ndarray, " L"]
    slot_use: Float[np.ndarray, " L"]
    load: Int[np.ndarray, "L E"]
    demand: Int[np.ndarray, "L E"]
    seconds: float
    notes: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """As a line of the table: means over the MoE layers."""
        policy = self.case.policy
        return {
            "policy": self.case.name,
            "capacity_factor": None if policy is None else policy.capacity_factor,
            "metric": None if policy is None else policy.metric,
            "expand": None if policy is None else policy.expand,
            "bits_per_byte": self.bits_per_byte,
            "straggler": float(self.straggler.mean()),
            "dropped": float(self.dropped.mean()),
            "slot_use": float(self.slot_use.mean()),
            "seconds": self.seconds,
        }

    def layers(self) -> dict[str, Any]:
        """The same by MoE layer."""
        by_device = self.device_straggler
        return {
            "straggler": self.straggler.tolist(),
            "device_straggler": None if by_device is None else by_device.tolist(),
            "dropped": self.dropped.tolist(),
            "slot_use": self.slot_use.tolist(),
        }


def warm_up(model: LanguageModel, case: Case, windows: Windows, *, rows: int) -> None:
    """Compile what `measure` runs; the result is thrown away. May be called from any thread."""
    ids, valid = next(windows.batches(rows))
    model.with_policy(case.policy).score_with_routing(ids, valid, allow_empty_rows=True)


def measure(
    model: LanguageModel,
    case: Case,
    windows: Windows,
    *,
    rows: int,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Read the text under a policy.

    Args:
        model: whatever its own policy is.
        case: the policy to read under.
        windows: the text.
        rows: of a batch; at least as many as there are (virtual) devices fill every group.
        advance: called after each batch.
    """
    model = model.with_policy(case.policy)
    batches = list(windows.batches(rows))

    nats, reports = 0.0, []
    started = time.perf_counter()
    for ids, valid in batches:
        logprobs, report = model.score_with_routing(ids, valid, allow_empty_rows=True)
        nats -= float(logprobs.sum(dtype=np.float64))
        reports.append(report)
        advance()
    finished = time.perf_counter()

    demand = _sum(reports, lambda report: report.demand)
    asked = demand.sum(axis=1) + _sum(reports, lambda r: r.dropped_by_cause["nonfinite"])
    load = _sum(reports, lambda report: report.load)
    by_device = reports[0].device_straggler_factor
    return Measured(
        case=case,
        bits_per_byte=nats / math.log(2) / windows.num_bytes,
        straggler=_mean(reports, lambda report: report.straggler_factor),
        device_straggler=(
            None
            if by_device is None
            else _mean(reports, lambda report: report.device_straggler_factor)
        ),
        dropped=_sum(reports, lambda report: report.dropped) / np.maximum(asked, 1),
        slot_use=load.sum(axis=1) / np.maximum(_sum(reports, lambda report: report.slots), 1),
        load=load,
        demand=demand,
        seconds=finished - started,
        notes=reports[0].notes,
    )


def _sum(reports: Sequence[RoutingReport], values: Callable[[RoutingReport], Any]) -> np.ndarray:
    return np.asarray([values(report) for report in reports], np.int64).sum(axis=0)


def _mean(reports: Sequence[RoutingReport], values: Callable[[RoutingReport], Any]) -> np.ndarray:
    """Weighted by tokens, so that a last batch with few of them does not count as much."""
    weights = [report.tokens for report in reports]
    return np.average([values(report) for report in reports], axis=0, weights=weights)
