"""Reads the text of a compiled program (optimised HLO) into computations and instructions.

Only what `costs` needs, and without a grammar: one instruction is one line, its operands are names
that stand earlier in the same computation. The text is what `compiled.as_text()` gives, on CPU as
on TPU; a line that is none of the known forms is an error, not a smaller figure.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

# Bytes per element; sub-byte types are packed.
_WIDTH = {
    "pred": 1.0, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5,
    "s8": 1.0, "u8": 1.0, "f8e4m3": 1.0, "f8e4m3fn": 1.0, "f8e5m2": 1.0, "f8e4m3b11fnuz": 1.0,
    "f8e4m3fnuz": 1.0, "f8e5m2fnuz": 1.0, "f8e3m4": 1.0, "f8e8m0fnu": 1.0,
    "s16": 2.0, "u16": 2.0, "f16": 2.0, "bf16": 2.0, "s32": 4.0, "u32": 4.0, "f32": 4.0,
    "s64": 8.0, "u64": 8.0, "f64": 8.0, "c64": 8.0, "c128": 16.0, "token": 0.0, "opaque": 0.0,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_MEMORY = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class HloError(ValueError):
    """The text is not what `compiled.as_text()` gives in the JAX this was written for."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One array.

    Attributes:
        dtype: HLO's name ("bf16").
        dims: sizes.
        memory: the memory space; 0 is HBM (a CPU's memory), 1 a TPU's VMEM.
    """

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Without padding by tiles."""
        return self.size * _WIDTH[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line.

    Attributes:
        name: without the percent sign.
        opcode: "fusion", "all-to-all", ...
        shapes: of the result, a tuple's elements in order.
        operands: names.
        argument: what stands in the parentheses, as text (a constant's value).
        attributes: what stands behind them.
        root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    argument: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> float:
        """Of the whole result."""
        return sum((shape.bytes for shape in self.shapes), 0.0)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations it names, a conditional's branches in order."""
        branches = _BRANCHES.search(self.attributes)
        if branches is not None:
            return tuple(_NAME.findall(branches[1]))
        return tuple(_CALLED.findall(self.attributes))

    def named(self, attribute: str) -> str | None:
        """The computation that `attribute=%name` names."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return None if found is None else found[1]

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of `attribute={1,2}`, none if it is not there."""
        found = re.search(rf"\b{attribute}=\{{([0-9,]*)\}}", self.attributes)
        return () if found is None else tuple(int(n) for n in found[1].split(",") if n)

    @property
    def op_name(self) -> str:
        """Where in the JAX program it comes from, "" if it does not say."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return "" if found is None else found[1]


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A function of the program: its instructions by name, in order."""

    name: str
    instructions: Mapping[str, Instruction] = field(repr=False)

    @cached_property
    def root(self) -> Instruction:
        """The result."""
        return next(i for i in self.instructions.values() if i.root)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """By number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.argument): i for i in found}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Which instructions take an instruction as an operand."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that an instruction takes."""
        return (self.instructions[name] for name in instruction.operands)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program: its computations, and which of them is run."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """Reads a whole program.

    Raises:
        HloError: a line of a form that is not known, or no entry.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = None, {}  # type: str | None, dict[str, Instruction]
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            name, lines = header[2], {}
            entry = name if header[1] else entry
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name=name, instructions=lines)
            name = None
        elif name is not None and line.strip():
            instruction = _instruction(line)
            lines[instruction.name] = instruction
    if entry is None:
        raise HloError("no ENTRY computation in the program's text")
    return Program(computations=computations, entry=entry)


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Every array of a type's text; several for a tuple."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in _WIDTH:
            raise HloError(f"unknown element type {dtype!r} in {text[:80]!r}")
        memory = _MEMORY.search(layout)
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        found.append(Shape(dtype=dtype, dims=sizes, memory=int(memory[1]) if memory else 0))
    return tuple(found)


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    if found is None:
        raise HloError(f"not an instruction: {line[:120]!r}")
    root, name, rest = found.groups()
    # A type is a tuple in parentheses, or one array without a blank in it.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    argument = rest[opening + 1 : closing]
    opcode = rest[:opening]
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=shapes_of(kind),
        operands=() if opcode in ("constant", "parameter") else tuple(_NAME.findall(argument)),
        argument=argument,
        attributes=rest[closing + 1 :],
        root=root is not None,
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens at a place is closed."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opening + found.start()
    raise HloError(f"unbalanced parentheses: {text[:120]!r}")
