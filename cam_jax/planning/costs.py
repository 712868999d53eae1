"""What a compiled program does on one device: FLOPs, HBM traffic, collectives, loops included.

`compiled.cost_analysis()` counts a loop's body once, whatever its trips; here every instruction
counts as often as the loops around it run. A loop whose trips depend on data counts once and is
named. Of a conditional's branches the one that sends most counts (then: that computes most).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cam_jax.planning.collectives import Collective, read_collective
from cam_jax.planning.hlo import Computation, HloError, Instruction, Program
from cam_jax.planning.loops import trip_count
from cam_jax.planning.matmul import is_grouped, product_flops
from cam_jax.planning.traffic import hbm_bytes


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one run of a program, on one device.

    Attributes:
        flops: of all matrix products as compiled; other arithmetic is not counted.
        grouped_flops: of grouped products among them, as if every row were real.
        hbm_bytes: read from and written to HBM.
        collectives: with how often each runs.
        unknown_loops: where loops stand whose trips depend on data; each counted once.
    """

    flops: float = 0.0
    grouped_flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """What the device sends in all collectives together."""
        return sum((c.count * c.sent_bytes for c in self.collectives), 0.0)

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            flops=self.flops + other.flops,
            grouped_flops=self.grouped_flops + other.grouped_flops,
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            collectives=self.collectives + other.collectives,
            unknown_loops=self.unknown_loops + other.unknown_loops,
        )

    def times(self, trips: int) -> "Costs":
        """As the body of a loop."""
        if trips == 0:
            return Costs()
        return Costs(
            flops=self.flops * trips,
            grouped_flops=self.grouped_flops * trips,
            hbm_bytes=self.hbm_bytes * trips,
            collectives=tuple(
                replace(c, count=c.count * trips, loops=(trips, *c.loops)) for c in self.collectives
            ),
            unknown_loops=self.unknown_loops,
        )


def program_costs(program: Program) -> Costs:
    """Adds up the whole program from its entry."""
    return _Adder(program).computation(program.entry)


def loop_costs(program: Program) -> Costs:
    """One step of the loop that is the program's work: what a decode program does per token.

    Raises:
        HloError: the entry has no loop.
    """
    entry = program.computations[program.entry]
    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    if not loops:
        raise HloError("the program has no loop at its top")
    adder = _Adder(program)
    steps = [
        adder.computation(str(loop.named("condition"))) + adder.computation(str(loop.named("body")))
        for loop in loops
    ]
    return max(steps, key=lambda c: (c.flops, c.hbm_bytes))


class _Adder:
    """Adds a program up; what several places call is added up once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[str, Costs] = {}

    def computation(self, name: str) -> Costs:
        """Of one run of a computation and all that it calls."""
        if name not in self._known:
            computation = self._program.computations[name]
            chains: set[str] = set()
            total = Costs()
            for instruction in computation.instructions.values():
                total += self._instruction(instruction, computation, chains)
            self._known[name] = total
        return self._known[name]

    def _instruction(
        self, instruction: Instruction, computation: Computation, chains: set[str]
    ) -> Costs:
        """
        Args:
            chains: collectives in pieces that were counted already; grows.
        """
        if instruction.opcode == "while":
            return self._loop(instruction, computation)
        if instruction.opcode == "conditional":
            branches = [self.computation(name) for name in instruction.called]
            return max(branches, key=lambda c: (c.sent_bytes, c.flops, c.hbm_bytes))
        if instruction.opcode in ("call", "async-start"):
            return self.computation(instruction.called[0])
        total = Costs(hbm_bytes=hbm_bytes(instruction, computation, self._program))
        for where, inner in _with_fused(instruction, computation, self._program):
            flops = product_flops(inner, where)
            found = read_collective(inner, where)
            chain = None if found is None else found.chain
            if chain is not None:
                # One collective in pieces: begun, carried on beside other work, and ended.
                found = None if chain in chains else found
                chains.add(chain)
            total += Costs(
                flops=flops,
                grouped_flops=flops if is_grouped(inner) else 0.0,
                collectives=() if found is None else (found,),
            )
        return total

    def _loop(self, loop: Instruction, computation: Computation) -> Costs:
        body = self.computation(str(loop.named("body")))
        trips = trip_count(loop, computation, self._program)
        if trips is None:
            return body + Costs(unknown_loops=(loop.op_name or loop.name,))
        return body.times(trips)


def _with_fused(
    instruction: Instruction, computation: Computation, program: Program
) -> Iterator[tuple[Computation, Instruction]]:
    """The instruction, and all that is fused into it, each with its computation."""
    yield computation, instruction
    if instruction.opcode == "fusion":
        inner = program.computations[str(instruction.named("calls"))]
        for each in inner.instructions.values():
            yield from _with_fused(each, inner, program)
