"""Reading compiled programs' text."""

import pytest

from cam_jax.planning.hlo import HloError, Shape, parse, shapes_of

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%body.1 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %get-tuple-element.1 = f32[4]{0:T(128)S(1)} get-tuple-element(%arg), index=1
  ROOT %tuple.1 = (s32[], f32[4]) tuple(%get-tuple-element.1, %get-tuple-element.1)
}

ENTRY %main.2 (p0: f32[4], p1: bf16[2,3]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %constant.7 = s32[] constant(-4)
  %fused = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0:T(8,128)(2,1)}) fusion(%p0, /*index=1*/%constant.7), kind=kLoop, calls=%body.1, metadata={op_name="jit(f)/while/add" stack_frame_id=3}
  %pick = f32[4]{0} conditional(%constant.7, %p0, %p0), branch_computations={%body.1, %other}
  ROOT %out = f32[4]{0} get-tuple-element(%fused), index=0
}
"""  # noqa: E501


def test_computations_and_instructions():
    program = parse(TEXT)
    assert program.entry == "main.2"
    assert list(program.computations) == ["body.1", "main.2"]
    main = program.computations["main.2"]
    assert main.root.name == "out"
    assert [main.parameters[n].name for n in main.parameters] == ["p0"]
    fused = main.instructions["fused"]
    assert (fused.opcode, fused.operands) == ("fusion", ("p0", "constant.7"))
    assert fused.shapes == (Shape(dtype="f32", dims=(4,)), Shape(dtype="bf16", dims=(2, 3)))
    assert fused.bytes == 4 * 4 + 6 * 2
    assert fused.op_name == "jit(f)/while/add"
    assert fused.named("calls") == "body.1" and fused.called == ("body.1",)
    assert main.instructions["constant.7"].argument == "-4"
    assert main.instructions["pick"].called == ("body.1", "other")
    assert [user.name for user in main.users["fused"]] == ["out"]


def test_memory_spaces_are_in_the_layout():
    arg = parse(TEXT).computations["body.1"].instructions["arg"]
    assert [shape.memory for shape in arg.shapes] == [0, 1]


@pytest.mark.parametrize(
    ("text", "size"),
    [("f32[]", 4), ("pred[3]", 3), ("s4[3]{0:E(4)}", 1.5), ("bf16[2,0]{1,0}", 0), ("s32[<=8]", 32)],
)
def test_bytes(text, size):
    (shape,) = shapes_of(text)
    assert shape.bytes == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HloModule empty\n", "no ENTRY"),
        ("ENTRY %m () -> f32[] {\n  what is this\n}\n", "not an instruction"),
        ("ENTRY %m () -> q7[] {\n  ROOT %a = q7[2] constant(0)\n}\n", "unknown element type"),
        ("ENTRY %m () -> f32[] {\n  ROOT %a = f32[2] add((%a\n}\n", "unbalanced"),
    ],
)
def test_unknown_text_is_an_error_not_a_smaller_figure(text, message):
    with pytest.raises(HloError, match=message):
        parse(text)
