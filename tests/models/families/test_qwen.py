"""Configurations of Qwen2-MoE and Qwen3-MoE."""

import pytest

from cam_jax.router import RouterConfig
from tests.models.tiny import tiny


def windows(config):
    return [kind.window for kind in config.layers]


def dense(config):
    return [layer for layer, kind in enumerate(config.layers) if not kind.moe]


def test_qwen2():
    config = tiny("qwen2_moe")
    assert config.moe.router == RouterConfig(num_experts=6, top_k=2)
    assert (config.moe.shared_size, config.moe.shared_gated) == (12, True)
    assert (config.attention.qkv_bias, config.attention.out_bias) == (True, False)
    assert config.attention.qk_norm is None
    assert windows(config) == [None] * 3  # a window is given, but not switched on
    assert not tiny("qwen2_moe", qkv_bias=False).attention.qkv_bias


def test_qwen3():
    config = tiny("qwen3_moe")
    assert config.moe.router == RouterConfig(num_experts=6, top_k=2, normalize=True)
    assert config.moe.shared_size == 0
    assert (config.attention.head_dim, config.attention.qk_norm) == (6, "head")
    biased = tiny("qwen3_moe", attention_bias=True).attention
    assert biased.qkv_bias and biased.out_bias
    assert tiny("qwen3_moe", head_dim=None).attention.head_dim == 16 // 4


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"mlp_only_layers": None}, []),
        ({"mlp_only_layers": [1]}, [1]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 1, 2]),
    ],
)
def test_dense_layers(family, options, expected):
    config = tiny(family, **options)
    assert dense(config) == expected
    assert config.mlp_size == (20 if expected else 0)


def test_windows_of_qwen2():
    on = {"use_sliding_window": True, "sliding_window": 7}
    assert windows(tiny("qwen2_moe", **on)) == [7, None, 7]
    assert windows(tiny("qwen2_moe", **on, max_window_layers=2)) == [7, None, None]
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    assert windows(tiny("qwen2_moe", **on, layer_types=types)) == [None, 7, 7]
    full = ["full_attention"] * 3
    assert windows(tiny("qwen2_moe", layer_types=full, sliding_window=0)) == [None] * 3


def test_windows_of_qwen3():
    on = {"use_sliding_window": True, "sliding_window": 7}
    assert windows(tiny("qwen3_moe", **on)) == [7] * 3
    assert windows(tiny("qwen3_moe", sliding_window=7)) == [None] * 3
