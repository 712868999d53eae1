"""Mixtral's configuration."""

import pytest

from cam_jax.models.config import AttentionConfig, LayerKind
from cam_jax.router import RouterConfig
from tests.models.tiny import tiny


def test_the_published_model():
    config = tiny(
        "mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
        num_local_experts=8,
        rope_theta=1e6,
    )
    assert config.attention == AttentionConfig(
        num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5
    )
    assert config.layers == (LayerKind(moe=True),) * 32
    assert config.moe is not None and config.moe.expert_size == 14336
    assert config.moe.router == RouterConfig(num_experts=8, top_k=2, normalize=True)
    assert config.moe.shared_size == 0 and config.mlp_size == 0


@pytest.mark.parametrize("window", [None, 4096])
def test_the_window_is_in_every_layer(window):
    assert {kind.window for kind in tiny("mixtral", sliding_window=window).layers} == {window}


def test_a_head_may_be_of_its_own_width():
    config = tiny("mixtral", head_dim=6)
    assert (config.attention.head_dim, config.rope.dim) == (6, 6)
    assert tiny("mixtral", head_dim=None).attention.head_dim == 4
