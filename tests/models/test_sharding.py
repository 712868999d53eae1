"""Every parameter has one rule, every rule a parameter, and dead experts fill up what is uneven."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cam_jax import ExpertWeights, MoEParams, SharedExpert, expert_parallel, make_mesh
from cam_jax.errors import MeshError
from cam_jax.models.params import map_params, param_specs
from cam_jax.models.sharding import (
    AXES_OF,
    RULES,
    ShardingRules,
    abstract_params,
    dimension_sizes,
    padded_experts,
    param_shardings,
    shard_params,
)
from cam_jax.quantized import QuantizedWeight
from tests.models.tiny import TINY, olmoe, params_of, tiny

# Between them these have every parameter there is.
VARIANTS = [
    *(tiny(family) for family in sorted(TINY)),
    tiny("qwen2_moe", mlp_only_layers=[0]),
    olmoe(attention_bias=True),
    tiny("deepseek_v2", q_lora_rank=10, attention_bias=True),
    olmoe().with_int8_experts(),
]


def inner(path):
    """Without the number of the layer or segment."""
    return path.split(".", 2)[2] if path.startswith(("layers.", "segments.")) else path


def by_path(tree):
    found = {}
    map_params(lambda path, leaf: found.__setitem__(inner(path), leaf), tree)
    return found


def specs(config, mesh, *rules):
    """PartitionSpec of each stacked leaf."""
    return {path: s.spec for path, s in by_path(param_shardings(config, mesh, *rules)).items()}


@pytest.fixture(scope="module")
def mesh(devices):
    return make_mesh(data=1, expert=4, tensor=2, devices=devices)


def test_every_parameter_of_every_family_has_a_rule_and_every_rule_a_parameter():
    used = {inner(path) for config in VARIANTS for path in param_specs(config)}
    assert used == set(AXES_OF)
    for config in VARIANTS:
        for path, spec in param_specs(config).items():
            assert len(AXES_OF[inner(path)]) == len(spec.shape), path


def test_where_parameters_lie(mesh):
    spec = specs(tiny("qwen2_moe"), mesh)
    assert spec["embed"] == spec["lm_head"] == P("tensor", None)
    assert spec["attn.q"] == P(None, "tensor", None) and spec["attn.o"] == P(None, None, "tensor")
    assert spec["attn.q_bias"] == P(None, "tensor")
    assert spec["moe.experts.gate"] == P(None, "expert", "tensor", None)
    assert spec["moe.experts.down"] == P(None, "expert", None, "tensor")
    assert spec["moe.shared.down"] == P(None, None, "tensor")
    assert spec["moe.router"] == P(None, None, None)
    latent = specs(tiny("deepseek_v3"), mesh)
    assert latent["attn.q_b"] == latent["attn.kv_b"] == P(None, "tensor", None)
    assert latent["attn.kv_a"] == P(None, None, None)
    assert latent["mlp.down"] == P(None, None, "tensor")


def test_experts_lie_where_the_layer_expects_them(mesh):
    """No weight moves when the layer's shard_map starts."""
    shardings = param_shardings(tiny("qwen2_moe"), mesh)["segments"][0]["moe"]
    config = tiny("qwen2_moe")
    block = jax.eval_shape(lambda: params_of(config))["segments"][0]["moe"]
    layer = MoEParams(
        router=block["router"],
        experts=ExpertWeights(**block["experts"]),
        shared=SharedExpert(**block["shared"]),
    )
    wanted = expert_parallel.param_specs(layer)
    for kind in ("experts", "shared"):
        for name, sharding in shardings[kind].items():
            shape = block[kind][name].shape
            over = P(None, *getattr(getattr(wanted, kind), name))
            assert sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, over), len(shape)), (
                kind,
                name,
            )


def test_int8_experts_and_their_scales_lie_where_the_layer_expects_them(mesh):
    config = olmoe().with_int8_experts()
    placed = abstract_params(config, mesh)["segments"][0]["moe"]["experts"]
    for name, leaf in placed.items():
        assert leaf.dtype == (jnp.float32 if name.endswith("_scale") else jnp.int8), name
    weights = {
        name: QuantizedWeight(values=placed[name], scale=placed[f"{name}_scale"])
        for name in ("gate", "up", "down")
    }
    layer = MoEParams(router=None, experts=ExpertWeights(**weights))
    wanted = expert_parallel.param_specs(layer).experts
    for name, weight in weights.items():
        for part in ("values", "scale"):
            leaf, over = getattr(weight, part), P(None, *getattr(getattr(wanted, name), part))
            expected = jax.sharding.NamedSharding(mesh, over)
            assert leaf.sharding.is_equivalent_to(expected, len(leaf.shape)), (name, part)


def test_heads_that_do_not_divide_are_copies(devices):
    mesh = make_mesh(expert=2, tensor=4, devices=devices)  # two key heads, four query heads
    spec = specs(tiny("mixtral"), mesh)
    assert spec["attn.k"] == spec["attn.v"] == P(None, None, None)
    assert spec["attn.q"] == P(None, "tensor", None)
    assert spec["embed"] == P(None, None)  # a vocabulary of 50


@pytest.mark.parametrize(("sizes", "experts"), [((1, 4, 2), 8), ((2, 3, 1), 6), ((1, 6, 1), 6)])
def test_dead_experts_fill_up(sizes, experts, devices):
    mesh = make_mesh(data=sizes[0], expert=sizes[1], tensor=sizes[2], devices=devices)
    config = tiny("mixtral")  # six experts
    assert padded_experts(config, mesh) == experts == dimension_sizes(config, mesh)["expert"]
    abstract = by_path(abstract_params(config, mesh, dtype=jnp.bfloat16))
    assert abstract["moe.experts.gate"].shape[1] == experts
    assert abstract["moe.router"].shape[1] == 6  # routers know the real ones only
    params = params_of(config)
    placed = shard_params(config, params, mesh)

    def check(path, leaf, one, spec):
        assert leaf.sharding == spec.sharding and leaf.shape == spec.shape
        whole = np.array(leaf)
        own = tuple(slice(0, n) for n in one.shape)
        np.testing.assert_array_equal(whole[own], one)
        whole[own] = 0
        assert not whole.any()

    map_params(check, placed, params, abstract_params(config, mesh, dtype=jnp.float32))


def test_what_lies_there_already_stays(mesh):
    config = tiny("mixtral")
    placed = shard_params(config, params_of(config), mesh)
    again = shard_params(config, placed, mesh)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True):
        assert a is b


def test_the_selection_bias_stays_float32(mesh):
    abstract = by_path(abstract_params(tiny("deepseek_v3"), mesh, dtype=jnp.bfloat16))
    assert abstract["moe.bias"].dtype == jnp.float32
    assert abstract["moe.router"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ((("head", "tensor"),), "'head' -> 'tensor' matches no parameter"),
        ((("heads", "model"),), "divided over 'expert' or 'tensor'"),
        ((("heads", "data"),), "divided over 'expert' or 'tensor'"),
        ((("heads", "tensor"), ("heads", "expert")), "2 sharding rules for 'heads'"),
        ((("expert", "tensor"), ("expert_hidden", "tensor")), "over one mesh axis"),
    ],
)
def test_rules_that_cannot_hold_are_refused(axes, words):
    with pytest.raises(MeshError, match=words):
        ShardingRules(axes=axes)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("axes", [None, 5, {"vocab": "tensor"}, (("vocab",),), ((["a"], "b"),)])
def test_rules_of_a_wrong_type_are_refused(axes):
    with pytest.raises(MeshError, match="expected pairs"):
        ShardingRules(axes=axes)


@pytest.mark.usefixtures("unchecked")
def test_rules_can_be_hashed():
    assert hash(ShardingRules(axes=[["vocab", "tensor"]])) == hash(
        ShardingRules(axes=(("vocab", "tensor"),))
    )


def test_a_parameter_without_a_rule_is_refused(mesh):
    sizes = dimension_sizes(tiny("mixtral"), mesh)
    with pytest.raises(MeshError, match=r"no sharding rule matches the parameter 'attn\.new'"):
        RULES.spec("attn.new", sizes, mesh)


def test_features_that_do_not_divide_are_refused(devices):
    config = tiny("qwen2_moe", moe_intermediate_size=6)
    with pytest.raises(MeshError, match="tensor=4 does not divide the 6 of 'expert_hidden'"):
        param_shardings(config, make_mesh(expert=2, tensor=4, devices=devices))
    with pytest.raises(MeshError, match="8 devices for 6 experts"):
        param_shardings(tiny("mixtral"), make_mesh(expert=8, devices=devices))


def test_other_rules_divide_otherwise(mesh):
    rules = ShardingRules(axes=(("expert", "expert"),))
    spec = specs(tiny("mixtral"), mesh, rules)
    assert spec["attn.q"] == P(None, None, None)
    assert spec["moe.experts.up"] == P(None, "expert", None, None)
