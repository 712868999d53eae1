"""One file, shards and indices that lie, and reads of parts straight into arrays."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from cam_jax.conversion.source import CheckpointSource
from cam_jax.errors import CheckpointError
from tests.conversion.checkpoints import (
    BF16,
    read_index,
    same,
    tiny_tensors,
    write_checkpoint,
    write_file,
    write_index,
)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", tiny_tensors(), shards=3)


def refused(directory: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointSource.open(directory)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
def test_reads_every_tensor_bit_for_bit(tmp_path: Path, shards: int, dtype: np.dtype) -> None:
    tensors = tiny_tensors(dtype=dtype)
    source = CheckpointSource.open(write_checkpoint(tmp_path / "m", tensors, shards=shards))
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert same(source.read(name), tensor)
        assert source.spec(name).shape == tensor.shape
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        source.spec("absent")


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 3, 2), (0, 3)])
def test_scalars_empty_and_other_ranks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    write_file(tmp_path / "model.safetensors", {"t": tensor})
    assert same(CheckpointSource.open(tmp_path).read("t"), tensor)


def test_every_slice_of_a_tensor(tmp_path: Path) -> None:
    tensor = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5).astype(BF16)
    write_file(tmp_path / "model.safetensors", {"before": np.ones(3, np.float32), "t": tensor})
    source = CheckpointSource.open(tmp_path)
    cuts = [
        [slice(None), slice(1, 3), slice(2, 2)],
        [slice(None), slice(1, 2), slice(-2, None)],
        [slice(None), slice(0, 4), slice(3, 99)],
    ]
    for ranges in itertools.product(*cuts):
        for given in (ranges, ranges[:2], ranges[:1]):
            assert same(source.read_slice("t", given), np.ascontiguousarray(tensor[given]))
    with pytest.raises(ValueError, match="step 1"):
        source.read_slice("t", (slice(0, 4, 2),))
    with pytest.raises(ValueError, match="4 ranges"):
        source.read_slice("t", (slice(None),) * 4)


def test_reads_into_views_in_place(tmp_path: Path) -> None:
    experts = [np.full((2, 3), e, np.float32).astype(BF16) for e in range(4)]
    names = [f"e{e}" for e in range(4)]
    write_file(tmp_path / "model.safetensors", dict(zip(names, experts, strict=True)))
    source = CheckpointSource.open(tmp_path)
    stack = np.full((5, 4, 2, 3), -1, BF16)
    for row, name in enumerate(names):
        source.read_into(name, stack[1, row])  # one layer of a stacked leaf
    assert same(stack[1], np.stack(experts))
    assert (stack[[0, 2, 3, 4]] == -1).all()
    wide = np.zeros((2, 6), BF16)
    source.read_into("e3", wide[:, 1:4])  # a view with gaps
    assert (wide[:, 1:4] == 3).all() and wide.astype(np.float32).sum() == 18
    with pytest.raises(ValueError, match="out is"):
        source.read_into("e0", np.zeros((3, 2), BF16))
    with pytest.raises(ValueError, match="out is"):
        source.read_into("e0", np.zeros((2, 3), np.float32))


def test_file_that_shrinks_or_goes_after_opening(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {"t": np.ones((4, 4), np.float32)})
    source = CheckpointSource.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="truncated: 5 bytes of tensor 't'"):
        source.read("t")
    path.unlink()
    with pytest.raises(CheckpointError, match="tensor 't' cannot be read"):
        source.read("t")


def test_directory_without_weights(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "is not a directory")
    refused(tmp_path, "holds no weights")
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    refused(tmp_path, "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    refused(tmp_path, "model-00001-of-00002.safetensors", "index")


def test_single_file_and_an_index_that_does_not_name_it(sharded: Path) -> None:
    write_file(sharded / "model.safetensors", {"t": np.ones(2, np.float32)})
    refused(sharded, "holds both")


def test_index_may_name_the_single_file(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"t": np.ones(2, np.float32)})
    write_index(tmp_path, {"t": "model.safetensors"})
    assert CheckpointSource.open(tmp_path).names() == ("t",)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = refused(sharded, "model-00002-of-00003.safetensors", "does not exist", "index.json")
    assert "tensor '" in message


def test_truncated_shard(sharded: Path) -> None:
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    refused(sharded, str(path), "truncated", "tensor '")


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "sub/../../outside.safetensors", "/ABSOLUTE", "a\\..\\b"]
)
def test_paths_outside_the_directory(sharded: Path, shard: str) -> None:
    outside = write_file(sharded.parent / "outside.safetensors", {"x": np.ones(1, np.float32)})
    shard = shard.replace("/ABSOLUTE", str(outside))
    write_index(sharded, {**read_index(sharded), "x": shard})
    refused(sharded, "'x'", "outside")


def test_link_that_leaves_the_directory(sharded: Path) -> None:
    outside = write_file(sharded.parent / "outside.safetensors", {"x": np.ones(1, np.float32)})
    (sharded / "inside.safetensors").symlink_to(outside)
    write_index(sharded, {**read_index(sharded), "x": "inside.safetensors"})
    refused(sharded, "'x'", "link that leaves")


def test_link_to_itself(sharded: Path) -> None:
    (sharded / "loop.safetensors").symlink_to(sharded / "loop.safetensors")
    write_index(sharded, {**read_index(sharded), "x": "loop.safetensors"})
    refused(sharded, "'x'", "does not exist")


def test_links_into_the_blobs_of_a_hub_cache_are_inside(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    write_checkpoint(snapshot, tiny_tensors(), shards=2)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(Path("../../blobs") / f"blob-{path.name}")
    assert len(CheckpointSource.open(snapshot).names()) == len(tiny_tensors())


@pytest.mark.parametrize("shard", ["", 5, None, "a\0b", ["x"]])
def test_impossible_file_names(sharded: Path, shard: object) -> None:
    write_index(sharded, {**read_index(sharded), "x": shard})
    refused(sharded, "'x'", "impossible file")


def test_shard_that_is_a_directory(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "x": "."})
    refused(sharded, "'x'", "not a file")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_malformed_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json")


def test_stale_index_tensor_not_named(sharded: Path) -> None:
    weight_map = read_index(sharded)
    shard = weight_map.pop("model.layers.1.mlp.gate.weight")
    write_index(sharded, weight_map)
    refused(sharded, "'model.layers.1.mlp.gate.weight'", shard, "stale")


def test_stale_index_shard_not_named(sharded: Path) -> None:
    write_file(sharded / "model-00004-of-00004.safetensors", {"x": np.ones(1, np.float32)})
    refused(sharded, "model-00004-of-00004.safetensors", "stale")


def test_other_safetensors_files_are_left_alone(sharded: Path) -> None:
    write_file(sharded / "adapter.safetensors", {"x": np.ones(1, np.float32)})
    assert "x" not in CheckpointSource.open(sharded)


def test_index_names_a_tensor_that_the_shard_lacks(sharded: Path) -> None:
    weight_map = read_index(sharded)
    write_index(sharded, {**weight_map, "ghost": weight_map["lm_head.weight"]})
    refused(sharded, "'ghost'", weight_map["lm_head.weight"])


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    weight_map = read_index(sharded)
    other = next(s for s in weight_map.values() if s != weight_map["lm_head.weight"])
    write_index(sharded, {**weight_map, "lm_head.weight": other})
    refused(sharded, "'lm_head.weight'", other)


def test_tensor_in_two_shards(sharded: Path) -> None:
    first = sharded / "model-00001-of-00003.safetensors"
    tensors = tiny_tensors()
    mine = {name: tensors[name] for name, s in read_index(sharded).items() if s == first.name}
    write_file(first, {**mine, "model.norm.weight": tensors["model.norm.weight"]})
    refused(sharded, "'model.norm.weight'", "two shards", first.name)
