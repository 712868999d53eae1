"""Loops, branches and HBM traffic of whole programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cam_jax.planning.costs import loop_costs, program_costs
from cam_jax.planning.hlo import HloError, parse


def costs_of(function, *shapes, donate=(), costs=program_costs):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return costs(parse(compiled.as_text()))


PRODUCT = 2 * 64 * 64 * 64
WEIGHT = 4 * 64 * 64


def layers(x, weights):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_a_loops_body_counts_as_often_as_it_runs():
    assert costs_of(layers, (64, 64), (5, 64, 64)).flops == 5 * PRODUCT


def test_nested_loops_multiply():
    def twice(x, weights):
        return lax.fori_loop(0, 3, lambda _, x: layers(x, weights), x)

    assert costs_of(twice, (64, 64), (5, 64, 64)).flops == 15 * PRODUCT


def test_a_loop_whose_trips_depend_on_data_counts_once_and_is_named():
    def grow(x, weights):
        return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: layers(x, weights), x)

    costs = costs_of(grow, (64, 64), (5, 64, 64))
    assert costs.flops == 5 * PRODUCT
    assert len(costs.unknown_loops) == 1 and "while" in costs.unknown_loops[0]


def test_one_step_of_the_main_loop():
    def grow(x, weights):
        x = x @ weights[0]
        return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: layers(x, weights), x)

    assert costs_of(grow, (64, 64), (5, 64, 64), costs=loop_costs).flops == 5 * PRODUCT
    with pytest.raises(HloError, match="no loop"):
        costs_of(jnp.matmul, (64, 64), (64, 64), costs=loop_costs)


def test_of_branches_the_larger_counts():
    def choose(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: jnp.tanh(x @ w))

    assert costs_of(choose, (64, 64), (64, 64)).flops == 2 * PRODUCT


def test_a_layer_reads_its_slice_of_the_stack():
    """20 layers' weights are read once each, not 20 times 20."""
    costs = costs_of(layers, (64, 64), (20, 64, 64))
    # Per layer: its weights, and activations a few times.
    assert 20 * WEIGHT <= costs.hbm_bytes <= 20 * 8 * WEIGHT


def test_an_update_in_place_writes_the_update():
    def fill(cache, x):
        def step(index, cache):
            return lax.dynamic_update_slice(cache, x * index, (64 * index, 0))

        return lax.fori_loop(0, 100, step, cache)

    costs = costs_of(fill, (6400, 64), (64, 64), donate=(0,))
    assert costs.hbm_bytes <= 100 * 4 * WEIGHT + 2 * 100 * WEIGHT


TPU_LOOP = """HloModule m

%body (b: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %b = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %copied = s32[]{:T(128)} copy(%i)
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%copied, %one)
  %x = f32[8]{0} get-tuple-element(%b), index=1
  %limit = s32[] get-tuple-element(%b), index=2
  %sum = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (s32[], f32[8], s32[]) tuple(%next, %sum, %limit)
}

%condition (c: (s32[], f32[8], s32[])) -> pred[] {
  %c = (s32[], f32[8], s32[]) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%c), index=0
  %constant.1 = s32[]{:T(128)} constant(9)
  %given = s32[] get-tuple-element(%c), index=2
  ROOT %lt = pred[] compare(%counter, %BOUND), direction=LT
}

ENTRY %main (p: f32[8], q: s32[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = s32[] parameter(1)
  %start = s32[]{:T(128)} constant(1)
  %begin = s32[]{:T(128)} copy(%start)
  %state = (s32[], f32[8], s32[]) tuple(%begin, %p, %LIMIT)
  %while.1 = (s32[], f32[8], s32[]) while(%state), condition=%condition, body=%body
  ROOT %result = f32[8]{0} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.parametrize(
    ("step", "bound", "limit", "trips"),
    [
        (1, "constant.1", "q", 8),
        (3, "constant.1", "q", 3),
        (1, "given", "start", 0),
        (1, "given", "q", None),
    ],
)
def test_trips_are_read_off_a_tpus_loop(step, bound, limit, trips):
    text = TPU_LOOP.replace("STEP", str(step)).replace("BOUND", bound).replace("LIMIT", limit)
    costs = program_costs(parse(text))
    assert sum(c.count for c in costs.collectives) == (1 if trips is None else trips)
    assert costs.unknown_loops == (("while.1",) if trips is None else ())


def test_pieces_of_one_collective_count_once():
    """A TPU fuses the steps of a collective into the work beside it."""
    piece = """%PART (x: bf16[4]) -> bf16[8] {
  %x = bf16[4]{0} parameter(0)
  ROOT %gather.PART = bf16[8]{0} all-gather(%x), channel_id=3, replica_groups=[2,2]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}
}
"""  # noqa: E501
    calls = "\n".join(
        f"  %fusion.{part} = bf16[8]{{0}} fusion(%p), kind=kCustom, calls=%{part}"
        for part in ("begin", "carry", "end")
    )
    text = "".join(piece.replace("PART", part) for part in ("begin", "carry", "end"))
    text += (
        f"ENTRY %main (p: bf16[4]) -> bf16[8] {{\n  %p = bf16[4]{{0}} parameter(0)\n{calls}\n"
        "  ROOT %r = bf16[8]{0} bitcast(%fusion.end)\n}\n"
    )
    (found,) = program_costs(parse(text)).collectives
    assert (found.kind, found.bytes, found.group) == ("all-gather", 16, (0, 1))
