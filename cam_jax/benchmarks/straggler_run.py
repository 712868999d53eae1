"""Measures a skewed layer on two devices, one in each process; `straggler` says what to expect."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cam_jax.benchmarks.straggler import (
    DEVICES,
    DROPLESS,
    Case,
    SkewedLayer,
    busiest_rows,
    choose_experts,
    device_loads,
    hidden_states,
    router_weight,
    slots_per_expert,
)
from cam_jax.benchmarks.waiting_threads import yield_to_others
from cam_jax.distributed import agree, fetch
from cam_jax.expert_parallel import param_specs
from cam_jax.experts import ExpertWeights, MoEParams, expert_buffers, expert_rows
from cam_jax.load_stats import LoadStats
from cam_jax.mesh import EXPERT, TOKENS, make_mesh
from cam_jax.moe import moe_layer

P = PartitionSpec


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was predicted and measured for a case. A round's time is that of the slower process.

    Attributes:
        name: of the case.
        rows: assignments (dropless) or slots (ceiling) that the busiest device computes.
        seconds: the layer, median over the rounds.
        least_seconds: the layer, least of the rounds: what noise from outside disturbs least.
        cpu_seconds: of the process that computed longer, all its threads, median: without what
            other programs take from a core.
        expert_seconds: the experts alone on these rows, without router, dispatch and exchange;
            median.
        expert_cpu_seconds: the same without what other programs take.
        predicted: speed-up over dropless on the same routing, from the rows.
        predicted_experts: the same from ``expert_seconds``, that is, corrected for what a row costs
            in a batched matmul and in a grouped one.
        measured: speed-up of the layer, from the medians.
        measured_least: the same from the least times.
        dropped_share: of the original assignments.
        straggler_before, straggler_after: load of the busiest device over the mean demand, as the
            router asks and as it was kept.
        expert_straggler_before, expert_straggler_after: the same of experts.
        capacity: C, slots per expert and device of origin; None: no ceiling.
    """

    name: str
    rows: int
    seconds: float
    least_seconds: float
    cpu_seconds: float
    expert_seconds: float
    expert_cpu_seconds: float
    predicted: float
    predicted_experts: float
    measured: float
    measured_least: float
    dropped_share: float
    straggler_before: float
    straggler_after: float
    expert_straggler_before: float
    expert_straggler_after: float
    capacity: int | None

    @property
    def achieved(self) -> float:
        """Measured speed-up as a share of that predicted from rows."""
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a benchmark found.

    Attributes:
        rows: a case each.
        lowered_threads: threads that wait for messages and were kept from the busy one's core, in
            the process with fewer of them; 0: gloo may have taken a part of the straggler's core,
            and dropless look slower than it is.
    """

    rows: list[Figures]
    lowered_threads: int


def measure(
    layer: SkewedLayer,
    chosen: tuple[Case, ...],
    *,
    rounds: int,
    progress: Callable[[], Any],
    keep_priorities: bool = False,
) -> Found:
    """Runs all cases once in every round, so that what disturbs a while disturbs all alike.

    Call it in both processes, after `cam_jax.distributed.start`.

    Args:
        layer: checked already.
        chosen: `DROPLESS` must be among them; speed-ups are over it.
        rounds: how often.
        progress: called after each round.
        keep_priorities: let gloo's thread take its part of the core (see `waiting_threads`).
    """
    agree((layer, chosen, rounds, keep_priorities), "the benchmark")
    mesh = make_mesh(data=1, expert=DEVICES, tensor=1)
    params = _parameters(layer, mesh)
    states = {balanced: _states(layer, mesh, balanced=balanced) for balanced in (False, True)}
    wait = _barrier(mesh)
    runs: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
    loads: list[LoadStats] = []
    for case in chosen:
        x = states[case.balanced]
        run = _compiled_layer(layer, case, mesh, x, params)
        loads.append(fetch(run()[1]))
        runs.append((run, _experts_alone(layer, case, params)))

    wait()
    lowered = 0 if keep_priorities else yield_to_others()
    here = np.empty((rounds, len(chosen), 2, 2))
    for i in range(rounds):
        for j, pair in enumerate(runs):
            for k, run in enumerate(pair):
                wait()
                began = time.perf_counter(), time.process_time()
                jax.block_until_ready(run())
                ended = time.perf_counter(), time.process_time()
                here[i, j, k] = np.subtract(ended, began)
        progress()
    times = np.asarray(multihost_utils.process_allgather(here)).max(0)
    everywhere = int(np.min(multihost_utils.process_allgather(np.int32(lowered))))
    return Found(rows=_figures(layer, chosen, loads, times), lowered_threads=everywhere)


def _figures(
    layer: SkewedLayer, chosen: tuple[Case, ...], loads: list[LoadStats], times: np.ndarray
) -> list[Figures]:
    """times: [rounds, cases, layer or its experts alone, seconds or CPU seconds]."""
    median, least = np.median(times, 0), times.min(0)
    reference = chosen.index(DROPLESS)
    rows = [busiest_rows(layer, case) for case in chosen]
    return [
        Figures(
            name=case.name,
            rows=rows[j],
            seconds=float(median[j, 0, 0]),
            least_seconds=float(least[j, 0, 0]),
            cpu_seconds=float(median[j, 0, 1]),
            expert_seconds=float(median[j, 1, 0]),
            expert_cpu_seconds=float(median[j, 1, 1]),
            predicted=rows[reference] / rows[j],
            predicted_experts=float(median[reference, 1, 0] / median[j, 1, 0]),
            measured=float(median[reference, 0, 0] / median[j, 0, 0]),
            measured_least=float(least[reference, 0, 0] / least[j, 0, 0]),
            dropped_share=float(load.dropped_share),
            straggler_before=float(load.straggler(devices=DEVICES, of="demand")),
            straggler_after=float(load.straggler(devices=DEVICES)),
            expert_straggler_before=float(load.straggler(of="demand")),
            expert_straggler_after=float(load.straggler()),
            capacity=None if case.policy is None else int(load.capacity),
        )
        for j, (case, load) in enumerate(zip(chosen, loads, strict=True))
    ]


def _compiled_layer(
    layer: SkewedLayer, case: Case, mesh: Mesh, x: jax.Array, params: MoEParams
) -> Callable[[], tuple[jax.Array, LoadStats]]:
    def run(x: jax.Array, params: MoEParams) -> tuple[jax.Array, LoadStats]:
        return moe_layer(x, params, layer.router, case.policy, mesh=mesh)

    compiled = jax.jit(run).lower(x, params).compile()
    return partial(compiled, x, params)


def _experts_alone(layer: SkewedLayer, case: Case, params: MoEParams) -> Callable[[], jax.Array]:
    """This device's share of the experts' work, as the transport calls for it."""
    experts = jax.tree.map(lambda leaf: leaf.addressable_data(0), params.experts)
    rng = np.random.default_rng(jax.process_index())
    if case.policy is None:
        sizes = device_loads(layer, balanced=case.balanced)[jax.process_index()]
        # The transport sorts into as many rows as could come.
        most = DEVICES * layer.tokens * min(layer.top_k, layer.local)
        rows = jnp.asarray(rng.standard_normal((most, layer.features), np.float32))
        call = partial(jax.jit(expert_rows), rows, experts, jnp.asarray(sizes))
    else:
        shape = (layer.local, slots_per_expert(layer, case.policy), layer.features)
        rows = jnp.asarray(rng.standard_normal(shape, np.float32))
        call = partial(jax.jit(expert_buffers), rows, experts)
    jax.block_until_ready(call())  # compiles
    return call


def _parameters(layer: SkewedLayer, mesh: Mesh) -> MoEParams:
    """Float32 weights, scaled to keep activations near 1; each process makes its own experts'."""
    e, d, f = layer.num_experts, layer.features, layer.hidden

    def leaf(seed: int, *shape: int) -> np.ndarray:
        values = np.random.default_rng((2, seed)).standard_normal(shape, np.float32)
        return values / np.float32(shape[-1] ** 0.5)

    host = MoEParams(
        router=router_weight(layer),
        experts=ExpertWeights(gate=leaf(0, e, f, d), up=leaf(1, e, f, d), down=leaf(2, e, d, f)),
    )
    specs = param_specs(host, tensor=False)
    return jax.tree.map(lambda leaf, spec: _on_mesh(leaf, mesh, spec), host, specs)


def _states(layer: SkewedLayer, mesh: Mesh, *, balanced: bool) -> jax.Array:
    """One sequence of T tokens on each device."""
    rows = [
        hidden_states(choose_experts(layer, balanced=balanced, seed=d), layer, seed=d)
        for d in range(DEVICES)
    ]
    return _on_mesh(np.stack(rows), mesh, P(TOKENS))


def _on_mesh(host: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.make_array_from_callback(
        host.shape, NamedSharding(mesh, spec), lambda index: host[index]
    )


def _barrier(mesh: Mesh) -> Callable[[], None]:
    """Both leave it at the same moment, give or take a message."""
    ones = _on_mesh(np.ones(DEVICES, np.float32), mesh, P(EXPERT))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P())).lower(ones).compile()
    return lambda: jax.block_until_ready(total(ones)) and None
