"""Puts a plan together: one column without a ceiling and one for each policy."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from cam_jax.capacity import CapacityPolicy, buffer_capacity
from cam_jax.models.config import DecoderConfig
from cam_jax.planning.compile import CompiledProgram, Job, compile_decode, compile_prefill
from cam_jax.planning.costs import Costs
from cam_jax.planning.layout import MeshSizes
from cam_jax.planning.roofline import Network, Roofline, roofline
from cam_jax.planning.topology import Topology, coordinates

Programs = dict[str, CompiledProgram]
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One policy.

    Attributes:
        title: heads the column.
        policy: None for no ceiling.
        capacity: slots per expert and device in the prefill, None without a ceiling.
        programs: by phase; "decode" is absent where it was not asked for or the prefill failed.
    """

    title: str
    policy: CapacityPolicy | None
    capacity: int | None
    programs: Programs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was found.

    Attributes:
        model: name of the preset, or path.
        job: what was compiled.
        topology: for what.
        sizes: of the mesh.
        loads: for which times are estimated without a ceiling: tokens of the busiest device over
            the mean.
        columns: side by side.
    """

    model: str
    job: Job
    topology: Topology
    sizes: MeshSizes
    loads: tuple[float, ...]
    columns: tuple[Column, ...]

    def roofline(self, program: CompiledProgram, load: float) -> Roofline | None:
        """The lower bound of a program's time; None on a CPU, or if it did not compile."""
        network = network_of(self.topology, self.job.mesh)
        if network is None or program.costs is None:
            return None
        share = 1.0
        if program.costs.grouped_flops:
            mean = balanced_flops(self.job, self.sizes, tokens=program.tokens)
            share = min(1.0, load * mean / program.costs.grouped_flops)
        return roofline(program.costs, network, grouped_share=share, load=load)


def make_plan(
    model: str,
    job: Job,
    topology: Topology,
    sizes: MeshSizes,
    policies: tuple[CapacityPolicy | None, ...],
    *,
    loads: tuple[float, ...],
    with_decode: bool,
    say: Callable[[str], Any],
) -> Plan:
    """Compiles every column; decode programs that are the same are compiled once.

    Args:
        say: called with what is being compiled.
    """
    columns = []
    decoded: dict[Any, CompiledProgram] = {}
    for policy in policies:
        title = policy_title(policy)
        say(f"compiling prefill, {title}")
        found, state = compile_prefill(job, policy)
        programs = {PREFILL: found}
        if with_decode and state is not None:
            key = policy if policy is not None and policy.decode == "capped" else None
            if key not in decoded:
                say(f"compiling decode, {title}")
                decoded[key] = compile_decode(job, policy, state)
            programs[DECODE] = decoded[key]
        columns.append(
            Column(
                title=title,
                policy=policy,
                capacity=_slots(job, sizes, policy),
                programs=programs,
            )
        )
    return Plan(
        model=model,
        job=job,
        topology=topology,
        sizes=sizes,
        loads=loads,
        columns=tuple(columns),
    )


def policy_title(policy: CapacityPolicy | None) -> str:
    """What heads a column."""
    return "no ceiling" if policy is None else f"γ = {policy.capacity_factor:g}"


def network_of(topology: Topology, mesh: Mesh) -> Network | None:
    """Where the chips of a mesh stand; None for CPUs."""
    chip = topology.name.chip
    if chip is None:
        return None
    places = [coordinates(device) for device in mesh.devices.reshape(-1)]
    return Network(
        chip=chip,
        places=[place for place in places if place is not None],
        shape=topology.name.shape,
        wraps=topology.wraps,
    )


def balanced_flops(job: Job, sizes: MeshSizes, *, tokens: int) -> float:
    """FLOP of one chip for routed experts where every chip gets the same number of tokens.

    A grouped product is compiled for more: for every token of the expert-parallel group coming to
    the same device.

    Args:
        tokens: of each sequence.
    """
    moe = job.config.moe
    if moe is None:
        return 0.0
    assignments = job.batch * tokens * moe.router.top_k / sizes.token_devices
    products = 3 * 2 * job.config.hidden_size * moe.expert_size / sizes.tensor
    return job.config.num_moe_layers * assignments * products


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind in one place of the program, together.

    Attributes:
        place: "layer" (a loop over ``layers`` of them) or "once".
        layers: how many.
        kind: of the collectives.
        number: how many run per layer, or in all.
        sent_bytes: what a chip sends in them per layer, or in all.
    """

    place: str
    layers: int
    kind: str
    number: int
    sent_bytes: float


def traffic_of(costs: Costs, config: DecoderConfig) -> tuple[Traffic, ...]:
    """Collectives by place and kind, layers first."""
    lengths = {segment.length for segment in config.segments if segment.length > 1}
    sums: dict[tuple[int, str], list[float]] = {}
    for collective in costs.collectives:
        layers = collective.loops[0] if collective.loops else 1
        if layers not in lengths:
            layers = 1
        number = collective.count // layers
        total = sums.setdefault((layers, collective.kind), [0, 0.0])
        total[0] += number
        total[1] += number * collective.sent_bytes
    return tuple(
        Traffic(
            place="layer" if layers > 1 else "once",
            layers=layers,
            kind=kind,
            number=int(number),
            sent_bytes=sent,
        )
        for (layers, kind), (number, sent) in sorted(sums.items(), key=lambda item: -item[0][0])
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it; bytes, seconds and FLOP without prefixes."""
    chip = plan.topology.name.chip
    return {
        "model": plan.model,
        "layers": plan.job.config.num_layers,
        "topology": plan.topology.name.name,
        "chips": plan.topology.name.chips,
        "chip": None if chip is None else dataclasses.asdict(chip),
        "mesh": {
            "data": plan.sizes.data,
            "expert": plan.sizes.expert,
            "tensor": plan.sizes.tensor,
        },
        "batch": plan.job.batch,
        "length": plan.job.length,
        "new_tokens": plan.job.new_tokens,
        "dtype": str(plan.job.dtype),
        "columns": [
            {
                "title": column.title,
                "policy": None if column.policy is None else dataclasses.asdict(column.policy),
                "capacity": column.capacity,
                **{name: _program(plan, found) for name, found in column.programs.items()},
            }
            for column in plan.columns
        ],
    }


def _program(plan: Plan, program: CompiledProgram) -> dict[str, Any]:
    data: dict[str, Any] = {
        "compile_seconds": program.seconds,
        "refused": program.refused,
        "unread": program.unread,
    }
    if program.memory is None:
        return data
    chip, costs = plan.topology.name.chip, program.costs
    data["memory"] = {**dataclasses.asdict(program.memory), "total": program.memory.total}
    data["fits"] = None if chip is None else program.memory.total <= chip.hbm_bytes
    if costs is None:
        return data
    data["flops"] = costs.flops
    data["grouped_matmul_flops"] = costs.grouped_flops
    data["hbm_bytes"] = costs.hbm_bytes
    data["sent_bytes"] = costs.sent_bytes
    data["collectives"] = [
        {
            "kind": c.kind,
            "dtype": c.dtype,
            "bytes": c.bytes,
            "sent_bytes": c.sent_bytes,
            "group_size": len(c.group),
            "count": c.count,
            "loops": list(c.loops),
            "op_name": c.op_name,
        }
        for c in costs.collectives
    ]
    data["traffic"] = [dataclasses.asdict(t) for t in traffic_of(costs, plan.job.config)]
    data["unknown_loops"] = list(costs.unknown_loops)
    data["roofline"] = [
        {"load": load, **dataclasses.asdict(found), "estimate": found.estimate}
        for load in plan.loads
        if (found := plan.roofline(program, load)) is not None
    ]
    return data


def _slots(job: Job, sizes: MeshSizes, policy: CapacityPolicy | None) -> int | None:
    """Slots per expert and group in the prefill."""
    if policy is None or job.config.moe is None:
        return None
    rows = {
        "device": -(-job.batch // sizes.token_devices),
        "sequence": 1,
        "batch": job.batch,
    }[policy.group]
    router = job.config.moe.router
    return buffer_capacity(
        policy, rows * job.length, num_experts=router.num_experts, top_k=router.top_k
    )
