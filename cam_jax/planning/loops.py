"""How often a loop of the compiled program runs, where the program says it.

XLA's CPU compiler writes the count down (`known_trip_count`); its TPU compiler does not, so there
the counter's start, step and bound are read off the loop itself.
"""

import re

from cam_jax.planning.hlo import Computation, Instruction, Program

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")


def trip_count(loop: Instruction, caller: Computation, program: Program) -> int | None:
    """Iterations of a `while`; None where they depend on data (a decode loop, a ragged product)."""
    written = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if written is not None:
        return int(written[1])
    condition = program.computations[str(loop.named("condition"))]
    body = program.computations[str(loop.named("body"))]
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = (_source(condition, name) for name in test.operands)
    place = _element(counter)
    bound = _bound(limit, loop, caller)
    if place is None or bound is None:
        return None
    start = _constant(_element_of(loop, caller, place))
    step = _step(body, place)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(bound - start) // step))


def _step(body: Computation, place: int) -> int | None:
    """What the body adds to the counter."""
    root = body.root
    if root.opcode != "tuple":
        return None
    added = _source(body, root.operands[place])
    if added.opcode != "add":
        return None
    terms = [_source(body, name) for name in added.operands]
    if place not in [_element(term) for term in terms]:
        return None
    steps = [value for value in map(_constant, terms) if value is not None]
    return steps[0] if len(steps) == 1 else None


def _bound(limit: Instruction, loop: Instruction, caller: Computation) -> int | None:
    """A constant, or an element of the loop's state that was a constant when it began."""
    place = _element(limit)
    return _constant(limit if place is None else _element_of(loop, caller, place))


def _element_of(loop: Instruction, caller: Computation, place: int) -> Instruction:
    state = _source(caller, loop.operands[0])
    return _source(caller, state.operands[place]) if state.opcode == "tuple" else state


def _source(computation: Computation, name: str) -> Instruction:
    """What stands behind copies."""
    found = computation.instructions[name]
    while found.opcode in _SAME:
        found = computation.instructions[found.operands[0]]
    return found


def _element(instruction: Instruction) -> int | None:
    """Which element of the loop's state an instruction is."""
    if instruction.opcode != "get-tuple-element":
        return None
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return None if found is None else int(found[1])


def _constant(instruction: Instruction) -> int | None:
    if instruction.opcode != "constant":
        return None
    return int(instruction.argument) if re.fullmatch(r"-?\d+", instruction.argument) else None
