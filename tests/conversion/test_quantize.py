"""Checkpoints whose experts become int8 while they are read, on one device and on a mesh."""

import dataclasses
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cam_jax
from cam_jax import CapacityPolicy, make_mesh
from cam_jax.conversion import load_params, open_checkpoint, quantize
from cam_jax.conversion.quantization_report import LeafError, QuantizationReport
from cam_jax.conversion.quantize import load_quantized, quantize_rows
from cam_jax.errors import CheckpointError, ConfigError, InputError, MeshError
from cam_jax.models.decoder import init_params
from cam_jax.models.params import map_params, stacked_specs
from cam_jax.models.sharding import abstract_params
from cam_jax.quantized import quantize as on_device
from tests.conversion.checkpoints import tiny_config, tiny_tensors, write_checkpoint

NAMES = ("gate", "up", "down")


def experts_of(params):
    """Segment and name -> its stack, of the segments with experts."""
    return {
        (number, name): segment["moe"]["experts"][name]
        for number, segment in enumerate(params["segments"])
        if "moe" in segment
        for name in NAMES
    }


@pytest.mark.parametrize("width", [1, 7, 64])
def test_the_host_quantises_as_the_device_does(width, rng):
    w = (rng.normal(size=(50, width)) * 10.0 ** rng.integers(-40, 30, (50, 1))).astype(np.float32)
    w[3] = 0
    values, scale = np.empty(w.shape, np.int8), np.empty(50, np.float32)
    cut = width // 2
    parts = [(part, values[:, part]) for part in (slice(0, cut), slice(cut, width)) if width > 1]
    found = quantize_rows(w.copy(), parts or [(slice(0, 1), values)], scale)
    expected = on_device(jnp.asarray(w))
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(values, expected.values)
    kept = scale > 0  # what is too small for a scale is not counted
    assert 0 < kept.sum() < 49
    exact = w[kept].astype(np.float64)
    error = exact - values[kept].astype(np.float64) * scale[kept, None]
    assert found[2] <= 0.5001 * scale.max()
    # A row's largest number is its scale times 127 but for rounding: of one there is nothing else.
    if width > 1:
        np.testing.assert_allclose(
            np.sqrt(found[:2]), [np.linalg.norm(error), np.linalg.norm(exact)], rtol=1e-4
        )
        np.testing.assert_allclose(found[2], np.abs(error).max(), rtol=1e-4)


@pytest.mark.parametrize("name", ["olmoe_bf16_4x", "dsv3_bf16_4x_yarn"])
def test_loaded_is_what_the_loaded_weights_quantise_to(name, data_dir: Path):
    opened = open_checkpoint(data_dir / "checkpoints" / name)
    loaded, plain = load_quantized(opened), load_params(opened)
    specs = stacked_specs(loaded.config)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(specs)
    for key, weight in experts_of(plain).items():
        expected = on_device(weight)
        experts = loaded.params["segments"][key[0]]["moe"]["experts"]
        np.testing.assert_array_equal(experts[key[1]], expected.values)
        np.testing.assert_array_equal(experts[f"{key[1]}_scale"], expected.scale)
        exact = np.asarray(weight, np.float64)
        rounded = np.float64(expected.values) * np.float64(expected.scale)[..., None]
        for row, (w, q) in enumerate(zip(exact, rounded, strict=True)):
            layer = loaded.config.segments[key[0]].start + row
            (leaf,) = (e for e in loaded.report.leaves if (e.layer, e.name) == (layer, key[1]))
            np.testing.assert_allclose(
                leaf.relative, np.linalg.norm(w - q) / np.linalg.norm(w), rtol=1e-4
            )
            np.testing.assert_allclose(leaf.largest, np.abs(w - q).max(), rtol=1e-4)

    def same(path, leaf, other):
        if ".moe.experts." not in path:
            assert leaf.dtype == other.dtype, path
            np.testing.assert_array_equal(leaf, other, err_msg=path)

    map_params(lambda path, leaf: same(path, leaf, plain_leaf(plain, path)), loaded.params)


def plain_leaf(params, path):
    for step in path.split("."):
        key = int(step) if isinstance(params, list) else step
        if isinstance(params, dict) and key.endswith("_scale"):
            return None
        params = params[key]
    return params


@pytest.mark.parametrize("name", ["olmoe_bf16_4x", "dsv3_bf16_4x_yarn"])
def test_a_mesh_holds_what_one_device_would(name, data_dir: Path, devices):
    opened = open_checkpoint(data_dir / "checkpoints" / name)
    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    placed, one = load_quantized(opened, mesh=mesh), load_quantized(opened)

    def same(path, leaf, other, spec):
        assert leaf.dtype == other.dtype and leaf.sharding == spec.sharding, path
        own = tuple(slice(0, n) for n in other.shape)
        np.testing.assert_array_equal(np.asarray(leaf)[own], np.asarray(other), err_msg=path)

    map_params(same, placed.params, one.params, abstract_params(one.config, mesh))
    for a, b in zip(placed.report.leaves, one.report.leaves, strict=True):
        np.testing.assert_allclose(
            [a.layer, a.error, a.norm, a.largest], [b.layer, b.error, b.norm, b.largest], rtol=1e-6
        )


@pytest.mark.parametrize("fused", [False, True])
def test_experts_that_do_not_divide_get_dead_ones(fused, tmp_path: Path, devices):
    write_checkpoint(tmp_path, tiny_tensors(fused=fused))  # five experts
    opened = open_checkpoint(tmp_path)
    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    placed, one = load_quantized(opened, mesh=mesh).params, load_quantized(opened).params
    for name in (*NAMES, *(f"{name}_scale" for name in NAMES)):
        leaf = np.asarray(placed["segments"][0]["moe"]["experts"][name])
        assert leaf.shape[1] == 6 and not leaf[:, 5].any()
        np.testing.assert_array_equal(leaf[:, :5], one["segments"][0]["moe"]["experts"][name])


@pytest.mark.parametrize("scratch", [1, 1 << 20])
def test_the_size_of_jobs_changes_nothing(scratch, tmp_path: Path, monkeypatch):
    opened = open_checkpoint(write_checkpoint(tmp_path, tiny_tensors(dtype=np.float32)))
    expected = load_quantized(opened, dtype="bf16", threads=1).params
    monkeypatch.setattr(quantize, "SCRATCH_BYTES", scratch)
    monkeypatch.setattr(quantize, "BLOCK_BYTES", 70)
    actual = load_quantized(opened, dtype="bf16", threads=3).params
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert (
        actual["embed"].dtype == jnp.bfloat16
    )  # experts come from the float32 numbers all the same
    plain = load_params(opened)["segments"][0]["moe"]["experts"]["up"]
    np.testing.assert_array_equal(
        actual["segments"][0]["moe"]["experts"]["up"], on_device(plain).values
    )


@pytest.mark.parametrize("expert", [None, 4])
def test_progress_counts_everything_once(expert, data_dir: Path, devices):
    opened = open_checkpoint(data_dir / "checkpoints" / "mixtral_bf16_5x")
    mesh = None if expert is None else make_mesh(expert=expert, devices=devices)
    seen: list[tuple[int, int]] = []
    load_quantized(opened, mesh=mesh, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (opened.plan.nbytes, opened.plan.nbytes)


def test_memory_while_loading(tmp_path: Path, monkeypatch):
    """Beside the int8 result: a few jobs' matrices, never a float stack."""
    wide, count = 1024, 6
    rng = np.random.default_rng(0)
    tensors = tiny_tensors(dtype=np.float32)
    for name in list(tensors):
        if ".mlp.experts." in name:
            del tensors[name]
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = np.ones((count, 8), np.float32)
        for e in range(count):
            for name, shape in {"gate": (wide, 8), "up": (wide, 8), "down": (8, wide)}.items():
                key = f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"
                tensors[key] = rng.standard_normal(shape, np.float32)
    config = tiny_config(num_experts=count, intermediate_size=wide)
    opened = open_checkpoint(write_checkpoint(tmp_path, tensors, config))
    numbers = 3 * count * 3 * wide * 8
    monkeypatch.setattr(quantize, "SCRATCH_BYTES", 4 * wide * 8)  # one expert's matrix
    load_quantized(opened, threads=2)  # what is imported and cached on first use is not counted
    tracemalloc.start()
    loaded = load_quantized(opened, threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params["segments"][0]["moe"]))
    assert held == numbers + 4 * 3 * count * (2 * wide + 8 + 8)  # scales, and the routers
    assert peak < held + numbers, "more than a quarter of the experts in float32 was held"


def test_experts_that_are_not_finite_are_refused(tmp_path: Path):
    tensors = tiny_tensors()
    name = next(n for n in tensors if "experts.3.down" in n)
    tensors[name] = np.full_like(tensors[name], np.inf)
    opened = open_checkpoint(write_checkpoint(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj"):
        load_quantized(opened)


def test_what_the_mesh_cannot_hold_is_refused_before_reading(tmp_path: Path, devices):
    opened = open_checkpoint(write_checkpoint(tmp_path, tiny_tensors()))
    with pytest.raises(MeshError, match="tensor=4 does not divide the 6"):
        load_quantized(opened, mesh=make_mesh(expert=2, tensor=4, devices=devices))


def test_report():
    def leaf(layer, name, error, largest):
        return LeafError(layer=layer, name=name, error=error, norm=5.0, largest=largest)

    report = QuantizationReport(
        leaves=(
            leaf(0, "gate", 0.03, 0.002),
            leaf(0, "up", 0.0, 0.0),
            leaf(0, "down", 0.0, 0.0),
            leaf(1, "gate", 0.04, 0.001),
        )
    )
    assert report.relative("gate") == pytest.approx(0.05 / 50**0.5)
    assert report.relative() == pytest.approx(0.05 / 10)
    assert report.worst.layer == 1 and report.largest == 0.002
    assert str(report) == (
        "int8 experts: relative RMS error of the weights 0.50% (gate 0.71%, up 0.00%, down 0.00%), "
        "largest error of one 0.002; worst: gate of layer 1, 0.80%"
    )
    with pytest.raises(InputError, match="name='bias'"):
        report.relative("bias")


# --- whole models ---


@pytest.fixture(scope="module")
def directory(data_dir: Path) -> Path:
    return data_dir / "checkpoints" / "olmoe_bf16_4x"


@pytest.fixture(scope="module")
def int8(directory: Path):
    return cam_jax.load(directory, dtype="float32", quantize="int8")


@pytest.fixture(scope="module")
def ids(int8):
    return np.random.default_rng(0).integers(0, int8.config.vocab_size, (4, 12))


def test_logits_move_by_about_the_weights_error(directory: Path, int8, ids):
    """Weights of this model move by 0.6 %, and so do the logits: 0.1 % to 2 % of their spread."""
    assert 0.003 < int8.quantization.relative() < 0.01
    assert "relative RMS error" in str(int8.quantization)
    plain = cam_jax.load(directory, dtype="float32")
    assert plain.quantization is None
    a, b = int8.logits(ids), plain.logits(ids)
    relative = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b - b.mean(-1, keepdims=True)))
    assert 0.001 < relative < 0.02


def test_token_drop_on_a_mesh_is_that_on_one_device(directory: Path, int8, ids, devices):
    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    policy = CapacityPolicy(capacity_factor=1.0)
    placed = cam_jax.load(directory, dtype="float32", quantize="int8", mesh=mesh, policy=policy)
    one = dataclasses.replace(int8, virtual_devices=(2, 2), policy=policy)
    logits = one.logits(ids)
    np.testing.assert_allclose(placed.logits(ids), logits, atol=2e-4)
    assert np.abs(logits - int8.logits(ids)).max() > 0.01, "nothing was dropped"


def test_fresh_parameters_have_the_same_tree(int8):
    drawn = jax.eval_shape(lambda key: init_params(int8.config, key), jax.random.key(0))
    assert jax.tree.structure(drawn) == jax.tree.structure(int8.params)
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(int8.params), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_what_cannot_be_done_is_refused(int8, directory: Path, tmp_path: Path):
    with pytest.raises(InputError, match="int8"):
        int8.save(tmp_path / "out")
    with pytest.raises(ConfigError, match="quantize='int4'"):
        cam_jax.load(directory, quantize="int4")
