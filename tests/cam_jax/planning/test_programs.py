"""What the compiled programs of a capped model may contain, read from their HLO.

A Token Drop layer holds two token-sized all-to-alls, there and back, one of ids more where the
ceiling holds per device, at most one small reduction for its statistics, and never gathers weights.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import ExpertWeights, MoEParams
from cam_jax.mesh import TOKENS
from cam_jax.models import decoder
from cam_jax.models.sharding import abstract_params
from cam_jax.moe import moe_layer
from cam_jax.planning.compile import compile_decode, compile_prefill
from cam_jax.planning.costs import program_costs
from cam_jax.planning.hlo import parse
from cam_jax.planning.layout import MeshSizes, build_mesh
from cam_jax.planning.topology import open_topology, read_topology
from cam_jax.router import RouterConfig
from tests.cam_jax.planning.tiny import LAYERS, config, cpu_topology, job

LENGTH, FEATURES, HIDDEN, EXPERTS = 64, 64, 128, 16

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs libtpu"
)
POLICIES = {
    "drop": CapacityPolicy(capacity_factor=1.5),
    "expand": CapacityPolicy(capacity_factor=1.5, expand="local"),
    "device": CapacityPolicy(capacity_factor=1.5, scope="device"),
}


@pytest.fixture
def tpu(monkeypatch):
    """Four v5e chips; other processes may compile for some at the same time."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return open_topology(read_topology("v5e:2x2"))


def layer_collectives(topology, sizes, policy):
    """Those of one MoE layer, its statistics included."""
    mesh = build_mesh(sizes, topology)

    def array(shape, *axes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    up = (EXPERTS, HIDDEN, FEATURES)
    params = MoEParams(
        router=array((EXPERTS, FEATURES)),
        experts=ExpertWeights(
            gate=array(up, "expert", "tensor"),
            up=array(up, "expert", "tensor"),
            down=array((EXPERTS, FEATURES, HIDDEN), "expert", None, "tensor"),
        ),
    )
    x = array((sizes.token_devices, LENGTH, FEATURES), TOKENS)
    router = RouterConfig(num_experts=EXPERTS, top_k=2)
    run = jax.jit(lambda x, params: moe_layer(x, params, router, policy, mesh=mesh))
    costs = program_costs(parse(run.lower(x, params).compile().as_text()))
    assert not costs.unknown_loops or policy.scope == "device"  # rows of experts: as they come
    return costs.collectives


def model_collectives(topology, sizes, policy, dtype=jnp.float32):
    """Those of one layer of a whole forward pass, its statistics included."""
    model = config(hidden_size=FEATURES, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    mesh = build_mesh(sizes, topology)
    rows = NamedSharding(mesh, PartitionSpec(TOKENS))
    batch = (sizes.token_devices, LENGTH)
    run = jax.jit(partial(decoder.forward, model, policy=policy, mesh=mesh))
    compiled = run.lower(
        abstract_params(model, mesh, dtype=dtype),
        jax.ShapeDtypeStruct(batch, np.int32, sharding=rows),
        valid=jax.ShapeDtypeStruct(batch, np.bool_, sharding=rows),
    ).compile()
    costs = program_costs(parse(compiled.as_text()))
    inside = [c for c in costs.collectives if c.loops[:1] == (LAYERS,)]
    assert all(c.count == LAYERS for c in inside)
    return inside


def check(found, sizes, policy, *, sums, itemsize=4):
    """``sums``: reductions of whole activations, where "tensor" divides products."""
    exchanges = [c for c in found if c.kind == "all-to-all"]
    sized = [c for c in exchanges if c.dtype != "s32"]
    ids = [c for c in exchanges if c.dtype == "s32"]
    slots = int(np.ceil(1.5 * 2 * (LENGTH / EXPERTS)))  # of an expert, for one device's tokens
    assert [c.bytes for c in sized] == [EXPERTS * slots * FEATURES * itemsize] * 2
    assert [c.bytes for c in ids] == ([EXPERTS * slots * 4] if policy.scope == "device" else [])
    assert all(len(c.group) == sizes.expert for c in exchanges)

    rest = [c for c in found if c.kind != "all-to-all"]
    tokens = LENGTH * FEATURES * itemsize
    assert [(c.kind, len(c.group)) for c in rest if c.bytes == tokens] == [
        ("all-reduce", sizes.tensor)
    ] * sums
    # What is left: the statistics, in one small reduction.
    small = [c for c in rest if c.bytes != tokens]
    assert [c.kind for c in small] in ([], ["all-reduce"])
    assert all(c.bytes <= 4 * (2 * EXPERTS + 16 + sizes.token_devices) for c in small)


@pytest.mark.parametrize("name", ["drop", "device"])
def test_a_layers_collectives(devices, name):
    sizes, policy = MeshSizes(data=1, expert=8, tensor=1), POLICIES[name]
    check(layer_collectives(cpu_topology(devices), sizes, policy), sizes, policy, sums=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_models_collectives_on_three_axes(devices, name):
    sizes, policy = MeshSizes(data=2, expert=2, tensor=2), POLICIES[name]
    found = model_collectives(cpu_topology(devices), sizes, policy)
    check(found, sizes, policy, sums=2)  # of attention and of the experts


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop", "device"])
def test_a_models_collectives_on_tpu(tpu, name):
    sizes, policy = MeshSizes(data=1, expert=4, tensor=1), POLICIES[name]
    # In float32 a TPU would send what only products take as bfloat16 already.
    found = model_collectives(tpu, sizes, policy, jnp.bfloat16)
    check(found, sizes, policy, sums=0, itemsize=2)


@needs_libtpu
@pytest.mark.slow
def test_prefill_and_decode_compile_for_a_tpu(tpu):
    work = job(tpu, MeshSizes(data=1, expert=2, tensor=2))
    prefill, state = compile_prefill(work, POLICIES["drop"])
    assert prefill.refused is None and state is not None
    assert prefill.memory.total < 1e9
    exchanges = [c for c in prefill.costs.collectives if len(c.loops) and c.kind == "all-to-all"]
    assert [c.count for c in exchanges] == [LAYERS, LAYERS]
    decode = compile_decode(work, POLICIES["drop"], state)
    assert not decode.costs.unknown_loops
    # Exempt from the ceiling: a decode step gathers its tokens, never weights.
    assert all(c.bytes < 16 * 32 * 2 * 8 for c in decode.costs.collectives if c.loops)
