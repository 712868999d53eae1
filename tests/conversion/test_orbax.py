"""Orbax directories: saved and loaded on any mesh, bit for bit; damage is found and said."""

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cam_jax import make_mesh
from cam_jax.conversion import load_checkpoint, load_params, open_checkpoint
from cam_jax.conversion.orbax import (
    MARKER,
    is_orbax,
    load_orbax_params,
    open_orbax,
    parts,
    save,
    save_orbax,
)
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.params import unstack_params
from tests.conversion.checkpoints import EXPERTS, same, tiny_config, tiny_tensors, write_checkpoint

MESHES = [(1, 4, 2), (2, 2, 2), (1, 1, 1)]


def saved_as_orbax(directory: Path, target: Path, **options: Any) -> Path:
    loaded = load_checkpoint(directory)
    companions = tuple(loaded.opened.companions.values())
    return save_orbax(
        target,
        loaded.config_json,
        loaded.leaves,
        layout=loaded.layout,
        companions=companions,
        **options,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face checkpoint with five experts, and the same as Orbax."""
    folder = tmp_path_factory.mktemp("original")
    directory = write_checkpoint(folder / "hf", tiny_tensors())
    (directory / "generation_config.json").write_text('{"eos_token_id": 3}')
    saved_as_orbax(directory, folder / "orbax")
    return folder


@pytest.fixture
def tiny(original: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of both, to be damaged."""
    for name in ("hf", "orbax"):
        shutil.copytree(original / name, tmp_path / name)
    return tmp_path / "hf", tmp_path / "orbax"


def assert_same_params(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) and a.sharding == b.sharding
        assert same(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "name",
    [
        "dsv3_bf16_4x_yarn",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "dsv1_moe16b_style",
                "dsv2_lite_4x_bf16_yarn",
                "mixtral_bf16_5x",
                "olmoe_bf16_4x",
                "qwen2moe_bf16_4x",
                "qwen3moe_bf16_4x",
            )
        ),
    ],
)
def test_every_family_on_one_device_and_on_a_mesh(
    data_dir: Path, tmp_path: Path, name: str
) -> None:
    directory = data_dir / "checkpoints" / name
    source = open_checkpoint(directory)
    opened = open_orbax(saved_as_orbax(directory, tmp_path / "o"))
    opened.check_stored()
    assert opened.config == source.config and opened.nbytes == source.plan.nbytes
    for mesh in (None, make_mesh(data=2, expert=2, tensor=2)):
        assert_same_params(load_orbax_params(opened, mesh=mesh), load_params(source, mesh=mesh))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("dtype", [None, "f32"])
def test_dead_experts_and_types_on_any_mesh(
    tiny: tuple[Path, Path], sizes: tuple[int, int, int], dtype: str | None
) -> None:
    data, expert, tensor = sizes
    mesh = make_mesh(data=data, expert=expert, tensor=tensor)
    params = load_orbax_params(open_orbax(tiny[1]), mesh=mesh, dtype=dtype)
    assert_same_params(params, load_params(open_checkpoint(tiny[0]), mesh=mesh, dtype=dtype))
    gate = params["segments"][0]["moe"]["experts"]["gate"]
    assert gate.shape[1] == -(-EXPERTS // expert) * expert
    assert not np.asarray(gate[:, EXPERTS:]).any()


def test_saved_on_one_mesh_and_loaded_on_others(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    source = open_checkpoint(tiny[0])
    params = load_params(source, mesh=make_mesh(data=1, expert=4, tensor=2))
    leaves = unstack_params(source.config, params)
    opened = open_orbax(save_orbax(tmp_path / "again", source.config_json, leaves))
    for mesh in (None, make_mesh(data=2, expert=2, tensor=2), make_mesh(expert=2)):
        assert_same_params(load_orbax_params(opened, mesh=mesh), load_params(source, mesh=mesh))


def test_types_are_kept_and_cast(tmp_path: Path) -> None:
    for number, dtype in enumerate((np.float16, np.float32, np.float64)):
        tensors = tiny_tensors(dtype=dtype)
        directory = write_checkpoint(tmp_path / f"hf{number}", tensors)
        opened = open_orbax(saved_as_orbax(directory, tmp_path / f"o{number}"))
        source = load_checkpoint(directory)
        assert all(same(opened.read_leaf(path), leaf) for path, leaf in source.leaves.items())
        for wanted in (None, "bf16", "f32"):
            expected = load_params(source.opened, dtype=wanted)
            assert_same_params(load_orbax_params(opened, dtype=wanted), expected)


def test_selection_bias_stays_wide(data_dir: Path, tmp_path: Path) -> None:
    source = load_checkpoint(data_dir / "checkpoints" / "dsv3_bf16_4x_yarn")
    bias = {path for path in source.leaves if path.endswith("moe.bias")}
    leaves = {
        path: leaf.astype(np.float32) if path in bias else leaf
        for path, leaf in source.leaves.items()
    }
    opened = open_orbax(save_orbax(tmp_path / "o", source.config_json, leaves))
    assert opened.wide == bias
    moe = load_orbax_params(opened, dtype="bf16")["segments"][1]["moe"]
    assert moe["bias"].dtype == jnp.float32 and moe["router"].dtype == jnp.bfloat16


def test_orbax_itself_reads_a_part(tiny: tuple[Path, Path]) -> None:
    opened = open_orbax(tiny[1])
    (part,) = (tiny[1] / "weights").iterdir()
    mesh = make_mesh(expert=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for path, leaf in opened.leaves.items()
    }
    found = ocp.load(part, wanted)
    assert all(same(np.asarray(leaf), opened.read_leaf(path)) for path, leaf in found.items())


def test_large_leaves_are_cut_in_chunks_and_parts(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "PART_BYTES", 1000)
    monkeypatch.setattr(parts, "CHUNK_BYTES", 100)
    seen: list[tuple[int, int]] = []
    target = saved_as_orbax(
        tiny[0], tmp_path / "cut", progress=lambda done, total: seen.append((done, total))
    )
    opened = open_orbax(target)
    assert len(list((target / "weights").iterdir())) == len(seen) - 1 > 3
    assert seen[0] == (0, opened.nbytes) and seen[-1] == (opened.nbytes,) * 2
    mesh = make_mesh(expert=4, tensor=2)
    expected = load_params(open_checkpoint(tiny[0]), mesh=mesh)
    loaded: list[tuple[int, int]] = []
    found = load_orbax_params(
        opened, mesh=mesh, progress=lambda done, total: loaded.append((done, total))
    )
    assert_same_params(found, expected)
    assert loaded == sorted(loaded) and loaded[0][0] == 0 and len(set(loaded[-1])) == 1


def test_no_more_than_a_part_is_in_memory(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "PART_BYTES", 800)
    source = load_checkpoint(tiny[0])
    given: list[str] = []
    write = save.write_part

    class Leaf:
        def __init__(self, path: str) -> None:
            self.path, array = path, source.leaves[path]
            self.shape, self.dtype = array.shape, array.dtype

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            given.append(self.path)
            return source.leaves[self.path]

    def check(directory: Path, arrays: Any) -> None:
        assert list(arrays) == given
        given.clear()
        write(directory, arrays)

    monkeypatch.setattr(save, "write_part", check)
    save_orbax(tmp_path / "o", source.config_json, {path: Leaf(path) for path in source.leaves})


def test_companions_and_config_travel_along(tiny: tuple[Path, Path]) -> None:
    opened = open_orbax(tiny[1])
    assert opened.config_json == tiny_config() and opened.layout == "per_expert"
    assert opened.companions["generation_config.json"].read_text() == '{"eos_token_id": 3}'


# What is wrong.


def damaged(directory: Path, *words: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        load_orbax_params(open_orbax(directory))
    for word in (str(directory), *words):
        assert word in str(caught.value)


def largest(directory: Path) -> Path:
    files = (file for file in (directory / "weights").rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def test_files_that_are_missing_or_cut_short(tiny: tuple[Path, Path]) -> None:
    file = largest(tiny[1])
    name = file.relative_to(tiny[1]).as_posix()
    os.truncate(file, 100)
    damaged(tiny[1], f"{name} has 100 bytes, {MARKER} says")
    file.unlink()
    damaged(tiny[1], f"{name} is missing")


def test_contents_that_changed(tiny: tuple[Path, Path]) -> None:
    (manifest,) = (tiny[1] / "weights").glob("*/*/manifest.ocdbt")
    manifest.write_bytes(bytes(manifest.stat().st_size))
    damaged(tiny[1], "damaged")


def test_data_that_changed(tiny: tuple[Path, Path]) -> None:
    for file in (tiny[1] / "weights").glob("**/d/*"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    damaged(tiny[1])


def test_values_that_are_not_finite(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    source = load_checkpoint(tiny[0])
    source.leaves["final_norm"][3] = np.inf
    opened = open_orbax(save_orbax(tmp_path / "o", source.config_json, source.leaves))
    with pytest.raises(CheckpointError, match=r"'final_norm' holds NaN or infinite"):
        load_orbax_params(opened)
    params = load_orbax_params(opened, allow_nonfinite=True)
    assert not np.isfinite(np.asarray(params["final_norm"], np.float32)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["version=2"]),
        ({"format": "x"}, ["format='x'"]),
        ({"layout": "sideways"}, ["sideways", "per_expert"]),
        ({"family": "mixtral"}, ["mixtral", "olmoe"]),
        ({"leaves": {}}, ["leaves"]),
        ({"leaves": {"embed": 3}}, ["'embed'"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": "BF16", "part": "../x"}}}, ["../x"]),
        ({"leaves": {"embed": {"shape": [11, -8], "dtype": "BF16", "part": "0"}}}, ["shape"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": "I8", "part": "0"}}}, ["I8"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": "BF16", "part": "0"}}}, ["missing"]),
        ({"version": True}, ["version=True"]),
        ({"version": 1.0}, ["version=1.0"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": ["F32"], "part": "0"}}}, ["['F32']"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": {}, "part": "0"}}}, ["dtype {}"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": "BF16", "part": "²"}}}, ["part '²'"]),
        ({"leaves": {"embed": {"shape": [11, 8], "dtype": "BF16", "part": "٣"}}}, ["part '٣'"]),
        ({"files": {"../x": 3}}, ["../x"]),
        ({"files": {"weights/../config.json": 3}}, ["'weights/../config.json'", "below weights/"]),
        ({"files": {"/weights/x": 3}}, ["'/weights/x'", "below weights/"]),
        ({"files": {"weights": 3}}, ["'weights'", "below weights/"]),
        ({"files": {"config.json": 3}}, ["'config.json'", "below weights/"]),
        ({"files": {"weights/a\0": 3}}, [r"'weights/a\x00'"]),
        ({"files": {"weights/a": True}}, ["'weights/a' with True bytes"]),
        ({"files": {"weights/" + "a" * 5000: 3}}, ["is missing"]),
    ],
)
def test_edited_marker(tiny: tuple[Path, Path], change: dict[str, Any], words: list[str]) -> None:
    marker = tiny[1] / MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **change}))
    damaged(tiny[1], *words)


def test_files_that_are_left_over(tiny: tuple[Path, Path]) -> None:
    (tiny[1] / "weights" / "extra").touch()
    damaged(tiny[1], "'weights/extra' is left over")


def test_a_file_that_the_marker_no_longer_names(tiny: tuple[Path, Path]) -> None:
    marker = tiny[1] / MARKER
    values = json.loads(marker.read_text())
    name = largest(tiny[1]).relative_to(tiny[1]).as_posix()
    del values["files"][name]
    marker.write_text(json.dumps(values))
    damaged(tiny[1], f"'{name}' is left over")


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_edited_types_do_not_load(tiny: tuple[Path, Path], dtype: str) -> None:
    marker = tiny[1] / MARKER
    values = json.loads(marker.read_text())
    values["leaves"]["embed"]["dtype"] = dtype
    marker.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"'embed' is bfloat16\[11, 8\]"):
        open_orbax(tiny[1]).read_leaf("embed", dtype=np.dtype(np.float32))


def test_edited_shapes_do_not_load(tiny: tuple[Path, Path]) -> None:
    marker = tiny[1] / MARKER
    values = json.loads(marker.read_text())
    for leaf in values["leaves"].values():
        if leaf["shape"] == [11, 8]:
            leaf["shape"] = [10, 8]
    marker.write_text(json.dumps(values))
    (tiny[1] / "config.json").write_text(json.dumps(tiny_config(vocab_size=10)))
    with pytest.raises(CheckpointError, match=r"'embed' is bfloat16\[11, 8\].*\[10, 8\]"):
        open_orbax(tiny[1]).read_leaf("embed")


def test_edited_types_are_found_without_reading_weights(tiny: tuple[Path, Path]) -> None:
    marker = tiny[1] / MARKER
    values = json.loads(marker.read_text())
    values["leaves"]["embed"]["dtype"] = "F32"
    marker.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"'embed' is bfloat16\[11, 8\].*float32"):
        open_orbax(tiny[1]).check_stored()


def test_edited_config(tiny: tuple[Path, Path]) -> None:
    (tiny[1] / "config.json").write_text(json.dumps(tiny_config(vocab_size=12)))
    damaged(tiny[1], "embed is [11, 8], the config gives [12, 8]")
    (tiny[1] / "config.json").write_text("{}")
    damaged(tiny[1], "model_type", kind=ConfigError)


def test_no_orbax_directory(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    assert is_orbax(tiny[1]) and not is_orbax(tiny[0])
    damaged(tiny[0], "no Orbax checkpoint")
    damaged(tmp_path / "absent", "not a directory")
    (part,) = (tiny[1] / "weights").iterdir()
    damaged(part, "not one of cam_jax", "cam-jax convert")


def test_unknown_layout_and_target_in_use(tiny: tuple[Path, Path]) -> None:
    source = load_checkpoint(tiny[0])
    arguments = (source.config_json, source.leaves)
    with pytest.raises(CheckpointError, match="layout='x'"):
        save_orbax(tiny[1].parent / "new", *arguments, layout="x")
    with pytest.raises(CheckpointError, match="exists"):
        save_orbax(tiny[1], *arguments)
    assert open_orbax(save_orbax(tiny[1], *arguments, overwrite=True)).nbytes


def test_disk_full(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written.*File too large"):
            parts.write_part(tmp_path / "part", {"a": np.random.default_rng(0).random((500, 500))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Traceback" not in "".join(capfd.readouterr())
