"""Descriptions from headers, and memory per device as a real mesh would have it."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from cam_jax import make_mesh
from cam_jax.conversion import CheckpointSource, open_checkpoint
from cam_jax.conversion.footprint import MeshSizes, footprint
from cam_jax.conversion.streaming import convert
from cam_jax.conversion.summary import inspect
from cam_jax.errors import CheckpointError, MeshError
from cam_jax.models.decoder import init_cache
from cam_jax.models.params import param_specs
from cam_jax.models.sharding import abstract_params
from tests.conversion.checkpoints import EXPERTS, tiny_config, tiny_tensors, write_checkpoint

NAMES = ["dsv2_lite_4x_bf16_yarn", "dsv3_bf16_4x_yarn", "mixtral_bf16_5x", "qwen2moe_bf16_4x"]


@pytest.fixture(autouse=True)
def no_data_read(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "converted" in request.node.name:
        return

    def read_slice(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(CheckpointSource, "read_slice", read_slice)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (2, 2, 2), (1, 1, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_weights_per_device_are_those_of_a_mesh(
    data_dir: Path, name: str, sizes: tuple[int, int, int]
) -> None:
    config = open_checkpoint(data_dir / "checkpoints" / name).config
    data, expert, tensor = sizes
    types = {path: np.dtype(np.float32) for path in param_specs(config)}
    found = footprint(
        config, types, MeshSizes(data=data, expert=expert, tensor=tensor), cache=types["embed"]
    )
    mesh = make_mesh(data=data, expert=expert, tensor=tensor)
    shares = [
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(abstract_params(config, mesh))
    ]
    assert found.weight_bytes == 4 * sum(shares)


@pytest.mark.parametrize("name", NAMES)
def test_cache_per_token_is_that_of_a_cache(data_dir: Path, name: str) -> None:
    config = open_checkpoint(data_dir / "checkpoints" / name).config
    types = {path: np.dtype(np.float32) for path in param_specs(config)}
    found = footprint(config, types, MeshSizes(), cache=np.dtype(np.float32))
    cache = jax.eval_shape(lambda: init_cache(config, 1, 10, dtype=np.float32))
    entries = sum(math.prod(leaf.shape) for leaf in cache.entries.values())
    assert found.cache_per_token * 10 == 4 * entries


def test_a_mixtral_by_hand(data_dir: Path) -> None:
    directory = data_dir / "checkpoints" / "mixtral_bf16_5x"
    found = inspect(directory)
    moe = found.config.moe
    assert moe is not None
    one = 3 * moe.expert_size * found.config.hidden_size
    idle = moe.router.num_experts - moe.router.top_k
    assert found.parameters - found.active == found.config.num_layers * idle * one
    assert found.weight_bytes == found.memory.weight_bytes == 2 * found.parameters
    assert found.dtypes == {"BF16": found.parameters}
    assert found.disk_bytes == sum(file.stat().st_size for file in directory.iterdir())
    assert (found.format, found.layout) == ("hf", "per_expert")
    assert inspect(directory, dtype="f32").memory.weight_bytes == 4 * found.parameters


def test_converted_is_described_the_same(data_dir: Path, tmp_path: Path) -> None:
    directory = data_dir / "checkpoints" / "dsv3_bf16_4x_yarn"
    convert(directory, tmp_path / "o")
    a, b = inspect(directory), inspect(tmp_path / "o")
    assert (a.config, a.layout, a.memory, a.active) == (b.config, b.layout, b.memory, b.active)
    assert b.format == "orbax" and a.companions == b.companions == ("generation_config.json",)


def test_what_is_ignored_dead_and_not_divided(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(2, np.float32)
    directory = write_checkpoint(tmp_path, tensors)
    found = inspect(directory, mesh=MeshSizes(expert=4, tensor=2))
    assert "config" in found.ignored[name]
    assert found.memory.dead_experts == 8 - EXPERTS
    assert set(found.memory.replicated) == {
        "tensor=2 does not divide 11 vocab",
        "tensor=2 does not divide 1 kv_heads",
    }
    assert found.attention == "multi-query, 2 heads, 1 of keys, 4 features"


def test_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a", tiny_tensors(), tiny_config())
    for sizes, words in (
        ({"expert": 6}, "expert=6 devices for 5 experts"),
        ({"tensor": 4}, "tensor=4 does not divide the 6 of 'expert_hidden'"),
        ({"data": 0}, "data=0"),
    ):
        with pytest.raises(MeshError, match=words):
            inspect(directory, mesh=MeshSizes(**sizes))
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="neither"):
        inspect(tmp_path / "b")
