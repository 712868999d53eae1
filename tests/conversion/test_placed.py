"""Loading onto a mesh: the same numbers, and no byte that the device does not hold."""

from pathlib import Path

import numpy as np
import pytest

from cam_jax import make_mesh
from cam_jax.conversion import load_params, open_checkpoint
from cam_jax.conversion.placed import _read
from cam_jax.conversion.shares import shares_of
from cam_jax.conversion.source import CheckpointSource
from cam_jax.errors import CheckpointError, MeshError
from cam_jax.models.params import map_params
from cam_jax.models.sharding import abstract_params
from tests.conversion.checkpoints import BF16, tiny_tensors, write_checkpoint
from tests.conversion.test_golden import NAMES


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_holds_what_one_device_would(name, sizes, data_dir, devices):
    opened = open_checkpoint(data_dir / "checkpoints" / name)
    data, expert, tensor = sizes
    mesh = make_mesh(data=data, expert=expert, tensor=tensor, devices=devices)

    def same(path, placed, one, spec):
        assert placed.dtype == one.dtype and placed.sharding == spec.sharding, path
        own = tuple(slice(0, n) for n in one.shape)
        np.testing.assert_array_equal(np.asarray(placed)[own], np.asarray(one), err_msg=path)

    map_params(
        same,
        load_params(opened, mesh=mesh),
        load_params(opened),
        abstract_params(opened.config, mesh),
    )


@pytest.mark.parametrize("fused", [False, True])
def test_experts_that_do_not_divide_get_dead_ones(fused: bool, tmp_path: Path, devices) -> None:
    write_checkpoint(tmp_path, tiny_tensors(fused=fused))  # five experts, two heads, one key head
    opened = open_checkpoint(tmp_path)
    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    placed, one = load_params(opened, mesh=mesh, dtype="f32"), load_params(opened, dtype="f32")
    for name in ("gate", "up", "down"):
        leaf = np.asarray(placed["segments"][0]["moe"]["experts"][name])
        assert leaf.shape[1] == 6 and not leaf[:, 5].any()
        np.testing.assert_array_equal(leaf[:, :5], one["segments"][0]["moe"]["experts"][name])


def test_only_the_bytes_of_a_share_are_read(data_dir: Path, devices, monkeypatch) -> None:
    """What stands behind "reads only the bytes each device needs": what the files are asked for."""
    read = 0
    original = CheckpointSource.read_slice

    def counted(self, name, ranges=(), *, out=None):
        nonlocal read
        result = original(self, name, ranges, out=out)
        read += result.nbytes
        return result

    monkeypatch.setattr(CheckpointSource, "read_slice", counted)
    opened = open_checkpoint(data_dir / "checkpoints" / "mixtral_bf16_5x")
    mesh = make_mesh(data=1, expert=4, tensor=2, devices=devices)

    def check(path, leaf):
        nonlocal read
        shares = shares_of(leaf)
        copies = mesh.size // len(shares)  # devices that hold the same are served by one read
        assert all(len(share.devices) == copies for share in shares)
        read = 0
        host = _read(opened.plan, opened.config, path, shares[-1], BF16, threads=1)
        assert read == host.nbytes == leaf.sharding.shard_shape(leaf.shape)[0] * host[0].nbytes
        assert host.shape == leaf.sharding.shard_shape(leaf.shape)

    map_params(check, abstract_params(opened.config, mesh))


def test_progress_counts_this_process(data_dir: Path, devices) -> None:
    opened = open_checkpoint(data_dir / "checkpoints" / "mixtral_bf16_5x")
    seen: list[tuple[int, int]] = []
    mesh = make_mesh(expert=4, devices=devices)
    load_params(opened, mesh=mesh, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    # Four devices hold it once, copies are read once.
    assert seen[-1] == (opened.plan.nbytes, opened.plan.nbytes)


def test_what_the_mesh_cannot_hold_is_refused_before_reading(tmp_path: Path, devices) -> None:
    write_checkpoint(tmp_path, tiny_tensors())
    opened = open_checkpoint(tmp_path)
    with pytest.raises(MeshError, match="8 devices for 5 experts"):
        load_params(opened, mesh=make_mesh(expert=8, devices=devices))
    with pytest.raises(MeshError, match="tensor=4 does not divide the 6"):
        load_params(opened, mesh=make_mesh(expert=2, tensor=4, devices=devices))


def test_nonfinite_weights_are_reported(tmp_path: Path, devices) -> None:
    tensors = tiny_tensors()
    name = next(n for n in tensors if "experts.3.down" in n)
    tensors[name] = np.full_like(tensors[name], np.nan)
    write_checkpoint(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj"):
        load_params(open_checkpoint(tmp_path), mesh=make_mesh(expert=4, devices=devices))
