"""Every family's weight table against its parameters, and through files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cam_jax.conversion import load_checkpoint, load_params, open_checkpoint, save_hf
from cam_jax.conversion.tables import TABLES, table_for
from cam_jax.errors import CheckpointError
from cam_jax.models.params import param_specs
from cam_jax.models.registry import FAMILIES, read_config
from tests.conversion.checkpoints import BF16, write_checkpoint
from tests.models.tiny import TINY

# Options that add parameters.
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"tie_word_embeddings": True},
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [0], "attention_bias": True},
    "deepseek": {"attention_bias": True, "n_shared_experts": None},
    "deepseek_v2": {"attention_bias": True, "q_lora_rank": 7},
    "deepseek_v3": {"attention_bias": True, "q_lora_rank": None, "first_k_dense_replace": 0},
}
CASES = [(family, {}) for family in TINY] + list(MORE.items())


def tensors_of(config: dict[str, Any], layout: str) -> dict[str, np.ndarray]:
    """Random bfloat16 tensors under the family's names; a selection bias is float32."""
    rng = np.random.default_rng(0)
    shapes = {leaf: spec.shape for leaf, spec in param_specs(read_config(config)).items()}
    tensors = {}
    for piece in table_for(config["model_type"]).pieces(shapes, layout):
        kind = np.float32 if piece.leaf.endswith("moe.bias") else BF16
        tensors.setdefault(
            piece.tensor, rng.standard_normal(piece.tensor_shape, np.float32).astype(kind)
        )
    return tensors


def test_every_family_has_a_table() -> None:
    assert set(TABLES) == {family.name for family in FAMILIES.values()}


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_every_tensor_comes_back(
    family: str, options: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    config = TINY[family] | options
    tensors = tensors_of(config, layout)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors, config, shards=2))
    assert loaded.layout == layout
    assert set(loaded.leaves) == set(param_specs(loaded.config))
    save_hf(tmp_path / "b", config, loaded.leaves, layout=layout)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    again = load_checkpoint(tmp_path / "b")
    saved = {name: again.opened.plan.source.read(name) for name in again.opened.plan.source.names()}
    assert set(saved) == set(tensors)
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype and saved[name].tobytes() == tensor.tobytes()


def test_mixtral_names_its_projections_by_number(tmp_path: Path) -> None:
    tensors = tensors_of(TINY["mixtral"], "per_expert")
    loaded = load_checkpoint(write_checkpoint(tmp_path, tensors, TINY["mixtral"]))
    expert = "model.layers.2.block_sparse_moe.experts.4."
    for leaf, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        found = loaded.leaves[f"layers.2.moe.experts.{leaf}"][4]
        assert found.tobytes() == tensors[f"{expert}{name}.weight"].tobytes()


def with_prediction_layer(layer: int) -> dict[str, np.ndarray]:
    tensors = tensors_of(TINY["deepseek_v3"], "per_expert")
    like = {
        name.replace(".2.", f".{layer}.", 1): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.2.")
    }
    extra = {f"model.layers.{layer}.eh_proj.weight": np.zeros((16, 32), BF16)}
    return tensors | like | extra


def test_prediction_layers_are_ignored_and_said_to_be(tmp_path: Path) -> None:
    opened = open_checkpoint(
        write_checkpoint(tmp_path, with_prediction_layer(3), TINY["deepseek_v3"])
    )
    assert all(name.startswith("model.layers.3.") for name in opened.plan.ignored)
    assert "model.layers.3.eh_proj.weight" in opened.plan.ignored


def test_a_layer_that_the_config_does_not_count_is_left_over(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, with_prediction_layer(4), TINY["deepseek_v3"])
    with pytest.raises(CheckpointError, match=r"left over .*model\.layers\.4\."):
        open_checkpoint(path)


def test_the_selection_bias_is_not_rounded(tmp_path: Path) -> None:
    config = TINY["deepseek_v3"]
    path = write_checkpoint(tmp_path, tensors_of(config, "per_expert"), config)
    for dtype, expected in ((None, BF16), ("bf16", BF16), ("f32", np.dtype(np.float32))):
        leaves = load_checkpoint(path, dtype=dtype).leaves
        assert leaves["layers.1.moe.bias"].dtype == np.float32
        assert leaves["layers.1.moe.router"].dtype == expected
        params = load_params(open_checkpoint(path), dtype=dtype)
        assert params["segments"][1]["moe"]["bias"].dtype == np.float32
        assert params["segments"][1]["moe"]["router"].dtype == expected
