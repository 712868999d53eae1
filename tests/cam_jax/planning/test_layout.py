"""Which mesh is chosen, and which are refused."""

import pytest

from cam_jax.errors import MeshError
from cam_jax.models.sharding import abstract_params
from cam_jax.planning.layout import MeshSizes, build_mesh, choose_sizes, held_bytes, shard_bytes
from tests.cam_jax.planning.tiny import config, cpu_topology


def choose(devices, **options):
    model = options.pop("model", config())
    given = {"batch": None, "columns": 24, "dtype": "bfloat16", **options}
    return choose_sizes(model, cpu_topology(devices), **given)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 8, 1)),
        ({"expert": 4}, (2, 4, 1)),
        ({"expert": 4, "data": 1}, (1, 4, 2)),
        ({"tensor": 2}, (1, 4, 2)),
        ({"data": 8}, (8, 1, 1)),
        # Six experts divide over two chips, not over four: better than dead experts.
        ({"model": config(num_local_experts=6)}, (4, 2, 1)),
        # As many sequences as chips that hold tokens.
        ({"batch": 4}, (1, 4, 2)),
    ],
)
def test_sizes(devices, options, sizes):
    found = choose(devices, **options)
    assert (found.data, found.expert, found.tensor) == sizes
    for axis in ("data", "expert", "tensor"):
        assert (f"{axis}=" in found.chosen) == (axis not in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": 3}, r"expert=3 does not divide cpu:2x4 \(8 chips\)"),
        ({"tensor": 0}, "tensor=0 does not divide"),
        ({"data": 2, "expert": 2, "tensor": 1}, "makes 4, which does not use"),
        ({"data": 4, "expert": 4}, "makes 16"),
        ({"model": config(num_local_experts=4), "expert": 8}, "more than the model's 4 experts"),
        ({"batch": 2, "expert": 8}, "a batch of 2 is smaller"),
        ({"model": config(intermediate_size=15), "tensor": 2}, "fits the model: .*tensor"),
    ],
)
def test_refused(devices, options, message):
    with pytest.raises(MeshError, match=message):
        choose(devices, **options)


def test_held_bytes_are_what_a_chip_holds(devices):
    """Everything divides: an eighth of the experts, all of the rest, and an eighth of the cache."""
    topology, sizes = cpu_topology(devices), MeshSizes(data=1, expert=8, tensor=1)
    params = abstract_params(config(), build_mesh(sizes, topology), dtype="bfloat16")
    cache = 2 * 3 * 8 * 2 * 24 * 8 * 2  # keys and values, L, B, heads, columns, features, bytes
    small = 8 * 24 * 4 + 8 * 4 + 4  # positions, counts, length
    held = held_bytes(config(), sizes, topology, None, 24, "bfloat16")
    assert held == shard_bytes(params) + (cache + small) / 8
    experts = 3 * 3 * 1 * 16 * 32 * 2  # L, matrices, experts, F, D, bytes
    rest = (2 * 64 * 32 + 3 * (2 * 32 * 32 + 2 * 16 * 32 + 2 * 32 + 8 * 32) + 32) * 2
    assert shard_bytes(params) == experts + rest
