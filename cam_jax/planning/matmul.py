"""FLOPs of one matrix product in HLO: `dot`, or `convolution`, which is how a TPU writes it.

A multiply-add is two. A batched product becomes a convolution over the batch, with strides,
dilations and padding chosen so that each output sees its own batch entry and zeros otherwise; only
the pairs that meet a real entry are counted, as only they are computed.
"""

import math
import re

import numpy as np

from cam_jax.planning.hlo import Computation, HloError, Instruction, Shape

# What marks a grouped product, whose work follows the load although its shape does not: the name it
# had in JAX, or the tiling of the kernel that newer compilers make of it.
_GROUPED, _KERNEL = "ragged_dot", "ragged_dot_tiling="
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_FLOATS = ("f", "bf")


def product_flops(instruction: Instruction, computation: Computation) -> float:
    """0 for what is no product of floating-point matrices."""
    if instruction.opcode == "custom-call" and _KERNEL in instruction.attributes:
        # Its last operands are the rows [M, in] and the groups' matrices [groups, in, out].
        *_, rows, _ = computation.operands(instruction)
        return 2.0 * instruction.shapes[0].size * rows.shapes[0].dims[-1]
    if instruction.opcode not in _PRODUCTS:
        return 0.0
    left, right = (operand.shapes[0] for operand in computation.operands(instruction))
    (out,) = instruction.shapes
    if not out.dtype.startswith(_FLOATS):
        return 0.0  # sums of integers (a cumulative count) that a TPU writes as products
    if instruction.opcode == "convolution":
        return _convolution(instruction, left, right, out)
    return (
        2.0
        * out.size
        * math.prod(left.dims[d] for d in instruction.integers("lhs_contracting_dims"))
    )


def is_grouped(instruction: Instruction) -> bool:
    """Whether it is a grouped product, of sorted rows with their own group's matrix."""
    return (
        _GROUPED in instruction.op_name
        or _KERNEL in instruction.attributes
        or instruction.opcode == "ragged-dot"
    )


def _convolution(instruction: Instruction, left: Shape, right: Shape, out: Shape) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise HloError(f"convolution without dim_labels: {instruction.name}")
    left_labels, right_labels, out_labels = labels.groups()
    window = _window(instruction.attributes)
    pairs = 1.0
    # A grouped product looks like one batch entry per group over all rows; the compiler skips the
    # rows of other groups, so each row counts once.
    batches = () if is_grouped(instruction) else out_labels
    for spatial in (label for label in batches if label.isdigit()):
        number = int(spatial)
        pairs *= _pairs(
            left.dims[left_labels.index(spatial)],
            right.dims[right_labels.index(spatial)],
            out.dims[out_labels.index(spatial)],
            stride=_entry(window, "stride", number, "1"),
            pad=_entry(window, "pad", number, "0_0"),
            left_dilate=_entry(window, "lhs_dilate", number, "1"),
            right_dilate=_entry(window, "rhs_dilate", number, "1"),
        )
    features = out.dims[out_labels.index("b")] * out.dims[out_labels.index("f")]
    return 2.0 * pairs * features * right.dims[right_labels.index("i")]


def _pairs(
    size: int,
    window: int,
    out: int,
    *,
    stride: str,
    pad: str,
    left_dilate: str,
    right_dilate: str,
) -> int:
    """(output, window) positions along one dimension that meet a real input, no padding."""
    low = int(pad.split("_")[0])
    dilate = int(left_dilate)
    starts = np.arange(out, dtype=np.int64)[:, None] * int(stride) - low
    place = starts + np.arange(window, dtype=np.int64) * int(right_dilate)
    return int(((place >= 0) & (place <= (size - 1) * dilate) & (place % dilate == 0)).sum())


def _window(attributes: str) -> dict[str, list[str]]:
    """`window={size=2x4 stride=1x3}` as {"size": ["2", "4"], ...}."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    if found is None:
        return {}
    pairs = (part.split("=") for part in found[1].split())
    return {name: values.split("x") for name, values in pairs}


def _entry(window: dict[str, list[str]], name: str, number: int, default: str) -> str:
    return window[name][number] if name in window else default
