"""Parameters by path: specifications, stacking and the way back."""

import dataclasses

import jax
import numpy as np
import pytest

from cam_jax.errors import CheckpointError
from cam_jax.models.config import LayerKind
from cam_jax.models.decoder import init_params
from cam_jax.models.params import param_specs, stack_params, unstack_params
from tests.models.tiny import leaves_of, olmoe

CONFIG = olmoe()
MIXED = dataclasses.replace(
    olmoe(tie_word_embeddings=True),
    layers=(LayerKind(moe=False), LayerKind(), LayerKind()),
    mlp_size=12,
)


def test_specifications_name_every_leaf_of_every_layer():
    specs = {path: spec.shape for path, spec in param_specs(CONFIG).items()}
    layer = {
        "attn_norm": (16,),
        "attn.q": (16, 16),
        "attn.k": (8, 16),
        "attn.v": (8, 16),
        "attn.o": (16, 16),
        "attn.q_norm": (16,),
        "attn.k_norm": (8,),
        "ffn_norm": (16,),
        "moe.router": (6, 16),
        "moe.experts.gate": (6, 8, 16),
        "moe.experts.up": (6, 8, 16),
        "moe.experts.down": (6, 16, 8),
    }
    expected = {f"layers.{i}.{path}": shape for i in range(3) for path, shape in layer.items()}
    expected |= {"embed": (50, 16), "final_norm": (16,), "lm_head": (50, 16)}
    assert specs == expected


def test_dense_layers_and_tied_embeddings_have_their_own_leaves():
    specs = {path: spec.shape for path, spec in param_specs(MIXED).items()}
    assert "lm_head" not in specs
    assert specs["layers.0.mlp.gate"] == (12, 16)
    assert specs["layers.0.mlp.down"] == (16, 12)
    assert "layers.0.moe.router" not in specs
    assert "layers.1.mlp.gate" not in specs


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["moe", "mixed"])
def test_stacking_has_the_structure_that_init_draws(config):
    stacked = stack_params(config, leaves_of(config))
    drawn = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert jax.tree.structure(stacked) == jax.tree.structure(drawn)
    assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, drawn)


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["moe", "mixed"])
def test_unstacking_gives_back_every_leaf(config):
    leaves = leaves_of(config)
    back = unstack_params(config, stack_params(config, leaves))
    assert list(back) == list(leaves)
    assert len(back) == len(leaves)
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(back[path], leaf)


def test_the_dtype_of_the_leaves_is_kept():
    leaves = {path: leaf.astype(jax.numpy.bfloat16) for path, leaf in leaves_of(CONFIG).items()}
    assert all(x.dtype == jax.numpy.bfloat16 for x in jax.tree.leaves(stack_params(CONFIG, leaves)))


def test_missing_unknown_and_misshapen_leaves_are_named():
    leaves = leaves_of(CONFIG)
    missing = {path: leaf for path, leaf in leaves.items() if path != "layers.2.attn.q"}
    with pytest.raises(CheckpointError, match=r"missing layers\.2\.attn\.q"):
        stack_params(CONFIG, missing)
    with pytest.raises(CheckpointError, match=r"layers\.3\.attn\.q"):
        stack_params(CONFIG, leaves | {"layers.3.attn.q": leaves["layers.2.attn.q"]})
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.k has shape \(16, 8\)"):
        stack_params(CONFIG, leaves | {"layers.1.attn.k": leaves["layers.1.attn.k"].T})
    with pytest.raises(CheckpointError, match="more"):
        stack_params(CONFIG, {})
