"""FLOPs of products, as CPUs (dot) and TPUs (convolution) write them."""

import jax
import jax.numpy as jnp
import pytest

from cam_jax.planning.costs import program_costs
from cam_jax.planning.hlo import parse


def flops_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return program_costs(parse(text)).flops


def test_dots_of_the_cpu():
    assert flops_of(jnp.matmul, (64, 128), (128, 32)) == 2 * 64 * 128 * 32
    batched = "ebd,efd->ebf"
    found = flops_of(lambda a, b: jnp.einsum(batched, a, b), (4, 64, 128), (4, 32, 128))
    assert found == 2 * 4 * 64 * 128 * 32


def convolution(left, right, out, attributes):
    return program_costs(
        parse(
            f"ENTRY %m (a: f32[1], b: f32[1]) -> f32[1] {{\n"
            f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
            f"  ROOT %c = {out} convolution(%a, %b), {attributes}\n}}\n"
        )
    ).flops


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "expected"),
    [
        # [12, 40] x [70, 40]
        ("f32[12,40]", "f32[70,40]", "f32[12,70]", "dim_labels=bf_oi->bf", 2 * 12 * 40 * 70),
        # Two batches that share the weights: one position along dimension 0 of the window.
        (
            "f32[2,20,40]",
            "f32[70,40,1]",
            "f32[2,20,70]",
            "window={size=1}, dim_labels=0bf_oi0->0bf",
            2 * 2 * 20 * 40 * 70,
        ),
        # Attention: batches 2 x 4, each with its own keys, by stride and dilation.
        (
            "f32[2,4,10,16]",
            "f32[2,4,20,16]",
            "f32[2,4,10,20]",
            "window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=01bf_01oi->01bf",
            2 * 2 * 4 * 10 * 16 * 20,
        ),
        # Four batches in the output alone: padding lets one window entry meet each.
        (
            "f32[2,40,1]",
            "f32[4,8,40]",
            "f32[2,4,8]",
            "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            2 * 2 * 4 * 8 * 40,
        ),
        # Sorted rows, each times its own one of eight matrices: rows of others are skipped.
        (
            "f32[8,100,40]",
            "f32[8,70,40]",
            "f32[8,100,70]",
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf, "
            'metadata={op_name="jit(f)/ragged_dot_general"}',
            2 * 100 * 40 * 70,
        ),
        # Sums of integers do not use the rate that floats have.
        ("s32[12,40]", "s32[70,40]", "s32[12,70]", "dim_labels=bf_oi->bf", 0),
    ],
)
def test_convolutions_of_the_tpu(left, right, out, attributes, expected):
    assert convolution(left, right, out, attributes) == expected


def test_the_kernel_of_a_grouped_product():
    costs = program_costs(
        parse(
            "ENTRY %m (s: s32[5], x: bf16[100,40], w: bf16[8,40,70]) -> f32[100,70] {\n"
            "  %s = s32[5]{0} parameter(0)\n  %x = bf16[100,40]{1,0} parameter(1)\n"
            "  %w = bf16[8,40,70]{2,1,0} parameter(2)\n"
            "  ROOT %r = f32[100,70]{1,0} custom-call(%s, %s, %x, %w), "
            'custom_call_target="tpu_custom_call", '
            'frontend_attributes={ragged_dot_tiling="100,40,70"}\n}\n'
        )
    )
    assert costs.flops == costs.grouped_flops == 2 * 100 * 40 * 70
