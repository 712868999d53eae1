"""Bytes that one instruction moves between HBM and the chip.

Operands that are read and results that are written, where they lie in HBM (memory space 0). What
takes a slice of an operand reads the slice, not the operand: a layer's weights out of the stack of
all layers, also inside a fusion; what is updated in place writes the update alone.
"""

from cam_jax.planning.hlo import Computation, Instruction, Program

HBM = 0

# They name or regroup what is there already, or only end what another instruction began.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "iota",
        "while",
        "conditional",
        "call",
        "async-start",
        "async-update",
        "async-done",
        "copy-done",
        "slice-done",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
    }
)
_SLICES = ("dynamic-slice", "slice", "gather", "slice-start")
_THROUGH = ("bitcast", "reshape", "tuple", "get-tuple-element")


def hbm_bytes(instruction: Instruction, computation: Computation, program: Program) -> float:
    """What an instruction that stands on its own (not inside a fusion) reads and writes."""
    if instruction.opcode in _FREE:
        return 0.0
    read = 0.0
    for number, operand in enumerate(computation.operands(instruction)):
        whole = _in_hbm(operand)
        if whole:
            read += min(whole, _read(instruction, number, program, whole))
    return read + _written(instruction, computation, program)


def _in_hbm(instruction: Instruction) -> float:
    return sum((shape.bytes for shape in instruction.shapes if shape.memory == HBM), 0.0)


def _read(instruction: Instruction, number: int, program: Program, whole: float) -> float:
    """Of operand ``number``, which has ``whole`` bytes in HBM."""
    if instruction.opcode in _SLICES and number == 0:
        return _slice_bytes(instruction)
    if instruction.opcode == "dynamic-update-slice" and number == 0:
        return 0.0
    if instruction.opcode == "scatter" and number == 0:
        return 0.0
    if instruction.opcode == "fusion":
        inner = program.computations[str(instruction.named("calls"))]
        return _read_inside(inner, inner.parameters[number].name, program, whole)
    return whole


def _read_inside(computation: Computation, name: str, program: Program, whole: float) -> float:
    """Of a value of a fused computation, by all that use it there."""
    total = 0.0
    for user in computation.users[name]:
        for number, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode in _THROUGH:
                total += _read_inside(computation, user.name, program, whole)
            else:
                total += _read(user, number, program, whole)
        if total >= whole:
            return whole
    return total


def _slice_bytes(instruction: Instruction) -> float:
    # slice-start gives (operand, slice, context)
    shape = instruction.shapes[1] if instruction.opcode == "slice-start" else instruction.shapes[0]
    return shape.bytes


def _written(instruction: Instruction, computation: Computation, program: Program) -> float:
    opcode = instruction.opcode
    if opcode in ("dynamic-update-slice", "scatter"):
        update = list(computation.operands(instruction))[1 if opcode != "scatter" else -1]
        return update.bytes if _in_hbm(instruction) else 0.0
    if opcode in ("copy-start", "slice-start", "collective-permute-start", "all-gather-start"):
        # The tuple holds the operand too, and flags of a few bytes.
        shape = instruction.shapes[0 if opcode == "copy-start" else 1]
        return shape.bytes if shape.memory == HBM else 0.0
    if opcode == "fusion":
        inner = program.computations[str(instruction.named("calls"))]
        written = _written_inside(inner, inner.root, program)
        return min(written, _in_hbm(instruction))
    return _in_hbm(instruction)


def _written_inside(computation: Computation, root: Instruction, program: Program) -> float:
    """By a fusion whose result is ``root``."""
    if root.opcode in ("tuple", "bitcast", "reshape"):
        parts = computation.operands(root)
        return sum((_written_inside(computation, part, program) for part in parts), 0.0)
    if root.opcode == "dynamic-update-slice":
        return list(computation.operands(root))[1].bytes
    if root.opcode == "fusion":
        inner = program.computations[str(root.named("calls"))]
        return _written_inside(inner, inner.root, program)
    return root.bytes
