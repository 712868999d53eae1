"""One collective of a compiled program: what it is, among whom, and how much a device sends."""

import re
from dataclasses import dataclass

import numpy as np

from cam_jax.planning.hlo import Computation, HloError, Instruction

RAGGED = "ragged-all-to-all"
KINDS = (
    "all-to-all",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    RAGGED,
    "collective-broadcast",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Attributes:
    kind: one of `KINDS`.
    dtype: of what travels.
    bytes: of the whole array one device ends up with or begins with, the larger; of a ragged
        exchange, whose messages follow the load, what it is where that is balanced.
    group: devices that take part together, as partition numbers (places in the mesh): the first
        group, the others being like it.
    count: how often it runs.
    loops: trips of the loops around it, outermost first.
    op_name: where in the JAX program it comes from.
    chain: the same for all pieces of one collective that the compiler has cut up, or None.
    """

    kind: str
    dtype: str
    bytes: float
    group: tuple[int, ...]
    count: int = 1
    loops: tuple[int, ...] = ()
    op_name: str = ""
    chain: str | None = None

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one run, by the usual ring or direct algorithms."""
        size = len(self.group)
        if size < 2:
            return 0.0
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        share = (size - 1) / size
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def read_collective(instruction: Instruction, computation: Computation) -> Collective | None:
    """The collective that an instruction is or begins; None for others."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    operands = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    group = _group(instruction)
    if kind == RAGGED:
        # Rows to send, room for those received, then offsets and sizes. One of the two has room
        # for the worst case; the other is what goes back or forth where the load is balanced.
        operands = [min(operands[:2], key=lambda shape: shape.bytes)]
    given = sum((shape.bytes for shape in operands), 0.0)
    return Collective(
        kind=kind,
        dtype=operands[0].dtype,
        bytes=given * len(group) if kind == "all-gather" else given,
        group=group,
        op_name=instruction.op_name,
        chain=_chain(instruction),
    )


def _chain(instruction: Instruction) -> str | None:
    found = re.search(r'chain_id="(\w+)"', instruction.attributes)
    channel = re.search(r"channel_id=(\d+)", instruction.attributes)
    return None if found is None else f"{found[1]}/{channel[1] if channel else ''}"


def _group(instruction: Instruction) -> tuple[int, ...]:
    """The first group of devices, in any of the ways in which HLO writes groups."""
    text = instruction.attributes
    pairs = re.search(r"source_target_pairs=\{\{([\d,]+)\}", text)
    if pairs is not None:
        return _numbers(pairs[1])
    explicit = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if explicit is not None:
        return _numbers(explicit[1])
    # [groups, size]<=[a,b]T(1,0): numbers 0.. in the shape [a,b], transposed, then reshaped.
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota is not None:
        count, size = _numbers(iota[1])
        return tuple(int(n) for n in _order(iota[2], iota[3]).reshape(count, size)[0])
    # mesh['x'=4,'y'=2], device_ids=([4,2]T(1,0)) {'y'}: the axes that take part.
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r"\s*\{([^}]*)\}",
        text,
    )
    if mesh is not None:
        return _mesh_group(mesh[1], mesh[2], mesh[3], mesh[4])
    if "replica_groups={}" in text:
        return ()
    raise HloError(f"groups of {instruction.name} are written in an unknown way: {text[:200]!r}")


def _mesh_group(axes: str, shape: str | None, order: str | None, used: str) -> tuple[int, ...]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    total = int(np.prod(list(sizes.values())))
    ids = np.arange(total) if shape is None else _order(shape, order).reshape(-1)
    grid = ids.reshape(tuple(sizes.values()))
    taking = re.findall(r"'([^']+)'", used)
    first = tuple(slice(None) if name in taking else 0 for name in sizes)
    return tuple(int(n) for n in grid[first].reshape(-1))


def _order(shape: str, transpose: str | None) -> np.ndarray:
    sizes = _numbers(shape)
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    return grid if transpose is None else grid.transpose(_numbers(transpose))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))
