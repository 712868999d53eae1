"""Configurations of DeepSeek-MoE, V2 and V3."""

import math

import pytest

from cam_jax.models.config import AttentionConfig, MLAConfig
from cam_jax.router import RouterConfig
from tests.models.tiny import tiny

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def test_v1():
    config = tiny("deepseek")
    assert config.attention == AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=4, scale=0.5)
    assert not config.rope.interleaved
    assert [kind.moe for kind in config.layers] == [False, True, True]
    assert config.moe.router == RouterConfig(num_experts=6, top_k=2)
    assert (config.moe.shared_size, config.moe.shared_gated) == (16, False)
    assert config.mlp_size == 20
    assert [k.moe for k in tiny("deepseek", moe_layer_freq=2).layers] == [False, False, True]
    assert tiny("deepseek", n_shared_experts=None).moe.shared_size == 0


@pytest.mark.parametrize(("top_k", "normalize"), [(1, False), (2, True)])
def test_v1_does_not_normalise_one_expert(top_k, normalize):
    config = tiny("deepseek", norm_topk_prob=True, num_experts_per_tok=top_k)
    assert config.moe.router.normalize is normalize


def test_v2():
    config = tiny("deepseek_v2")
    assert config.attention == MLAConfig(
        num_heads=4,
        query_rank=None,
        latent_rank=12,
        nope_dim=6,
        rope_dim=4,
        value_dim=5,
        scale=10**-0.5,
    )
    assert config.rope.interleaved and config.rope.dim == 4
    assert config.moe.router == RouterConfig(num_experts=8, top_k=2, scale=1.5)
    assert not config.moe.selection_bias
    assert tiny("deepseek_v2", q_lora_rank=7).attention.query_rank == 7
    assert tiny("deepseek_v2", attention_bias=True).attention.bias


def test_v2_uses_groups_only_where_its_method_does():
    groups = {"n_group": 4, "topk_group": 3}
    assert tiny("deepseek_v2", **groups).moe.router.num_groups == 1
    assert tiny("deepseek_v2", n_group=None, topk_group=None).moe.router.num_groups == 1
    limited = tiny("deepseek_v2", topk_method="group_limited_greedy", **groups)
    assert limited.moe.router == RouterConfig(
        num_experts=8, top_k=2, scale=1.5, num_groups=4, top_groups=3, group_score="max"
    )


def test_v3():
    config = tiny("deepseek_v3")
    assert config.moe.router == RouterConfig(
        num_experts=8,
        top_k=2,
        score="sigmoid",
        normalize=True,
        scale=1.5,
        num_groups=4,
        top_groups=2,
        group_score="top2",
    )
    assert config.moe.selection_bias
    assert config.num_layers == 3  # the layer for multi-token prediction is not one of them
    assert config.rope.interleaved
    assert not tiny("deepseek_v3", rope_interleave=False).rope.interleaved


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_mscale_squared_is_in_the_softmax_scale(family):
    plain = tiny(family).attention.scale
    growth = 0.1 * 0.7 * math.log(40) + 1
    both = tiny(family, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7})
    assert both.attention.scale == pytest.approx(plain * growth**2)
    assert both.rope.attention_factor == 1.0  # the two growths cancel in cosine and sine
    one = tiny(family, rope_scaling=YARN | {"mscale": 0.7})
    assert one.attention.scale == plain
    assert one.rope.attention_factor == pytest.approx(0.1 * math.log(40) + 1)
    linear = tiny(family, rope_scaling={"type": "linear", "factor": 40})
    assert linear.attention.scale == plain
