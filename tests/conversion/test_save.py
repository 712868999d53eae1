"""Leaves -> Hugging Face files: the same bytes back, and nothing half-written."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from cam_jax.conversion import CheckpointSource, load_checkpoint, load_params, save_hf
from cam_jax.conversion import save as save_module
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.params import unstack_params
from tests.conversion.checkpoints import (
    BF16,
    read_index,
    same,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)


def contents(directory: Path) -> dict[str, np.ndarray]:
    source = CheckpointSource.open(directory)
    return {name: source.read(name) for name in source.names()}


def assert_same_tensors(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert same(a[name], b[name]), name


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_round_trip_is_bit_identical(
    tmp_path: Path, fused: bool, shards: int, dtype: np.dtype
) -> None:
    tensors = tiny_tensors(fused=fused, dtype=dtype, bias=True)
    config = tiny_config(attention_bias=True, torch_dtype=np.dtype(dtype).name)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors, config, shards=shards))
    limit = 10**9 if shards == 1 else 5000
    out = save_hf(
        tmp_path / "b",
        loaded.config_json,
        loaded.leaves,
        layout=loaded.layout,
        max_shard_bytes=limit,
    )
    assert_same_tensors(contents(out), tensors)
    assert json.loads((out / "config.json").read_text()) == config
    assert (out / "model.safetensors").exists() == (shards == 1)


def test_mixed_types_keep_theirs(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.gate.weight"
        tensors[name] = tensors[name].astype(np.float32)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors))
    out = save_hf(tmp_path / "b", loaded.config_json, loaded.leaves)
    assert_same_tensors(contents(out), tensors)
    # Readers that map the file need each tensor aligned to its type.
    source = CheckpointSource.open(out)
    for name in source.names():
        assert source.spec(name).begin % tensors[name].dtype.itemsize == 0


def test_other_layout_than_it_came_in(tmp_path: Path) -> None:
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tiny_tensors()))
    out = save_hf(tmp_path / "b", loaded.config_json, loaded.leaves, layout="fused")
    assert_same_tensors(contents(out), tiny_tensors(fused=True))
    with pytest.raises(ConfigError, match="known: per_expert, fused"):
        save_hf(tmp_path / "c", loaded.config_json, loaded.leaves, layout="x")


def test_stacked_params_go_back(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors))
    leaves = unstack_params(loaded.config, load_params(loaded.opened))
    out = save_hf(tmp_path / "b", loaded.config_json, leaves)
    assert_same_tensors(contents(out), tensors)


def test_the_reference_reader_agrees(tmp_path: Path) -> None:
    tensors = tiny_tensors(dtype=np.float32)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors))
    out = save_hf(tmp_path / "b", loaded.config_json, loaded.leaves)
    read = safetensors.numpy.load_file(out / "model.safetensors")
    assert_same_tensors(read, tensors)
    assert not (out / "model.safetensors.index.json").exists()


def test_tied_head_is_not_written(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = tiny_config(tie_word_embeddings=True)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors, config))
    out = save_hf(tmp_path / "b", config, loaded.leaves)
    del tensors["lm_head.weight"]
    assert_same_tensors(contents(out), tensors)


def test_shards_stay_below_the_limit_and_the_index_names_all(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tensors))
    out = save_hf(tmp_path / "b", loaded.config_json, loaded.leaves, max_shard_bytes=500)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    sizes: dict[str, int] = {}
    for name, shard in read_index(out).items():
        sizes[shard] = sizes.get(shard, 0) + tensors[name].nbytes
    assert len(sizes) > 3 and max(sizes.values()) <= 500
    assert sorted(sizes) == [
        f"model-{n:05}-of-{len(sizes):05}.safetensors" for n in range(1, len(sizes) + 1)
    ]


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_config_follows_the_type_of_the_leaves(tmp_path: Path, field: str) -> None:
    config = {k: v for k, v in tiny_config().items() if k != "torch_dtype"}
    config[field] = "bfloat16"
    directory = write_checkpoint(tmp_path / "a", tiny_tensors(), config)
    loaded = load_checkpoint(directory, dtype="f32")
    out = save_hf(tmp_path / "b", config, loaded.leaves)
    assert json.loads((out / "config.json").read_text()) == {**config, field: "float32"}
    assert config[field] == "bfloat16"


def test_jax_leaves_companions_and_progress(tmp_path: Path) -> None:
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tiny_tensors()))
    leaves = {path: jnp.asarray(leaf) for path, leaf in loaded.leaves.items()}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    seen: list[tuple[int, int]] = []
    out = save_hf(
        tmp_path / "deep" / "b",
        loaded.config_json,
        leaves,
        companions=[tokenizer],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert_same_tensors(contents(out), tiny_tensors())
    assert (out / "tokenizer.json").read_text() == "{}"
    total = loaded.opened.plan.nbytes
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen)


def test_a_leaf_is_fetched_once_and_let_go(tmp_path: Path) -> None:
    """Saving a lazy mapping must not pile the model up on the host."""
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tiny_tensors()))
    live: set[int] = set()
    most = 0

    class Leaf:
        """Counts how many of its host copies are alive at once."""

        def __init__(self, array: np.ndarray) -> None:
            self.dtype, self.shape, self._array = array.dtype, array.shape, array
            self.fetched = 0

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            nonlocal most
            self.fetched += 1
            tracked = self._array.view(Tracked)
            live.add(id(tracked))
            most = max(most, len(live))
            return tracked

    class Tracked(np.ndarray):
        def __del__(self) -> None:
            live.discard(id(self))

    for layout in ("per_expert", "fused"):
        leaves = {path: Leaf(leaf) for path, leaf in loaded.leaves.items()}
        save_hf(tmp_path / layout, loaded.config_json, leaves, layout=layout)
        assert {leaf.fetched for leaf in leaves.values()} == {1}
    assert most <= 4


# Nothing half-written, nothing overwritten unasked.


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    loaded = load_checkpoint(write_checkpoint(tmp_path / "a", tiny_tensors()))
    return tmp_path / "a", loaded.config_json, loaded.leaves


def test_refuses_to_overwrite_unless_told(saved: Any, tmp_path: Path) -> None:
    directory, config, leaves = saved
    (directory / "LICENSE.old").touch()
    with pytest.raises(CheckpointError, match=r"exists; .*overwrite=True"):
        save_hf(directory, config, leaves)
    assert (directory / "LICENSE.old").exists()
    changed = {**leaves, "final_norm": np.ones_like(leaves["final_norm"])}
    save_hf(directory, config, changed, overwrite=True)
    assert not (directory / "LICENSE.old").exists()
    assert (contents(directory)["model.norm.weight"] == 1).all()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_overwrite_replaces_checkpoints_only(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save_hf(home, config, leaves, overwrite=True)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save_hf(home / "thesis.tex", config, leaves, overwrite=True)
    assert (home / "thesis.tex").exists()


def test_an_empty_directory_is_filled(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    (tmp_path / "empty").mkdir()
    assert contents(save_hf(tmp_path / "empty", config, leaves)).keys() == tiny_tensors().keys()


@pytest.mark.parametrize("overwrite", [False, True])
def test_disk_full_leaves_nothing_behind(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    directory, config, leaves = saved

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    target = directory if overwrite else tmp_path / "b"
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save_hf(target, config, leaves, overwrite=overwrite)
    assert str(target) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert_same_tensors(contents(directory), tiny_tensors())


def test_interrupted_before_the_end_does_not_load(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, leaves = saved
    # As after a kill: nothing is cleaned up.
    monkeypatch.setattr(save_module.shutil, "rmtree", lambda *args, **kwargs: None)

    def progress(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_hf(tmp_path / "b", config, leaves, progress=progress)
    assert not (tmp_path / "b").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "a")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint(left)
    save_hf(tmp_path / "b", config, leaves)  # and can be started again


def test_something_that_appears_meanwhile_is_not_replaced(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved

    def progress(done: int, total: int) -> None:
        if done == total:
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "theirs").touch()

    with pytest.raises(CheckpointError, match="cannot be written"):
        save_hf(tmp_path / "b", config, leaves, progress=progress)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["theirs"]


def test_leaves_that_do_not_fit(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    wrong = {path: leaf for path, leaf in leaves.items() if path != "embed"}
    wrong["other"] = leaves["embed"]
    wrong["final_norm"] = leaves["final_norm"][:3]
    wrong["lm_head"] = leaves["lm_head"].astype(np.int32)
    with pytest.raises(CheckpointError) as caught:
        save_hf(tmp_path / "b", config, wrong)
    for words in (
        "embed is missing",
        "other is left over",
        "final_norm is [3], the config gives [8]",
        "lm_head is int32",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_fused_leaves_of_two_types(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    path = "layers.0.moe.experts.up"
    mixed = {**leaves, path: leaves[path].astype(np.float32)}
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*several types"):
        save_hf(tmp_path / "b", config, mixed, layout="fused")
    out = contents(save_hf(tmp_path / "c", config, mixed))
    assert out["model.layers.0.mlp.experts.1.up_proj.weight"].dtype == np.float32


def test_shard_limit_must_be_positive(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    with pytest.raises(CheckpointError, match="max_shard_bytes=0"):
        save_hf(tmp_path / "b", config, leaves, max_shard_bytes=0)


def test_bf16_is_written_as_bf16(saved: Any, tmp_path: Path) -> None:
    _, config, leaves = saved
    out = save_hf(tmp_path / "b", config, leaves)
    spec = CheckpointSource.open(out).spec("model.norm.weight")
    assert spec.dtype == "BF16" and leaves["final_norm"].dtype == ml_dtypes.bfloat16
