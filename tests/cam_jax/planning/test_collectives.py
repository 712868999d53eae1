"""Collectives of real programs on eight devices, and every way in which groups are written."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from cam_jax.mesh import make_mesh
from cam_jax.planning.collectives import read_collective
from cam_jax.planning.costs import program_costs
from cam_jax.planning.hlo import HloError, parse

ROWS, BYTES = 32, 32 * 16 * 4
GATHERED = PartitionSpec(("expert", "tensor"))


@pytest.mark.parametrize(
    ("body", "kind", "size", "sent"),
    [
        (partial(lax.psum, axis_name="expert"), "all-reduce", BYTES, 2 * BYTES * 3 / 4),
        (
            partial(lax.all_gather, axis_name="expert", tiled=True),
            "all-gather",
            4 * BYTES,
            4 * BYTES * 3 / 4,
        ),
        (
            partial(lax.psum_scatter, axis_name="expert", tiled=True),
            "reduce-scatter",
            BYTES,
            BYTES * 3 / 4,
        ),
        (
            partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True),
            "all-to-all",
            BYTES,
            BYTES * 3 / 4,
        ),
        (
            lambda x: lax.ppermute(x, "expert", [(i, (i + 1) % 4) for i in range(4)]),
            "collective-permute",
            BYTES,
            BYTES,
        ),
    ],
    ids=["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_each_kind_in_a_loop(devices, body, kind, size, sent):
    mesh = make_mesh(expert=4, tensor=2, devices=devices)

    def several(x):
        def step(total, index):
            return total + jnp.sum(body(x * index)), None

        zero = lax.pcast(jnp.float32(0), ("expert", "tensor"), to="varying")
        return lax.scan(step, zero, jnp.arange(5, dtype=jnp.float32))[0][None]

    run = jax.shard_map(several, mesh=mesh, in_specs=GATHERED, out_specs=GATHERED)
    x = jax.ShapeDtypeStruct((8 * ROWS, 16), jnp.float32, sharding=NamedSharding(mesh, GATHERED))
    costs = program_costs(parse(jax.jit(run).lower(x).compile().as_text()))
    found = [c for c in costs.collectives if c.kind == kind]
    assert [(c.bytes, c.sent_bytes, c.count, c.loops) for c in found] == [(size, sent, 5, (5,))]
    expected = (0, 1) if kind == "collective-permute" else (0, 2, 4, 6)
    if kind != "collective-permute":
        assert found[0].group == expected
    assert costs.sent_bytes == 5 * sent


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
        ("source_target_pairs={{3,1},{1,3}}", (3, 1)),
        ("replica_groups={}", ()),
    ],
)
def test_groups(groups, expected):
    assert _read(groups).group == expected


def test_a_ragged_exchange_counts_what_is_sent_not_the_room_for_the_worst_case():
    text = """ENTRY %m (p: f32[8], q: f32[64], s: s32[4]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  %q = f32[64]{0} parameter(1)
  %s = s32[4]{0} parameter(2)
  ROOT %r = f32[64]{0} ragged-all-to-all(%p, %q, %s, %s, %s, %s), replica_groups={{0,1,2,3}}
}
"""
    (found,) = program_costs(parse(text)).collectives
    assert (found.kind, found.bytes, found.sent_bytes) == ("ragged-all-to-all", 32, 24)


def test_unknown_groups_are_refused():
    with pytest.raises(HloError, match="unknown way"):
        _read("replica_groups=everyone")


def test_a_group_of_one_sends_nothing():
    assert _read("replica_groups={{0},{1}}").sent_bytes == 0


def _read(groups):
    program = parse(
        "ENTRY %m (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %c = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, dimensions={{0}}\n}}\n"
    )
    main = program.computations["m"]
    return read_collective(main.root, main)
