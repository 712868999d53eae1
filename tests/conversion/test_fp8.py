"""FP8 weights with scales, against plain loops and against the same checkpoint dequantised."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from cam_jax.conversion import CheckpointSource, fp8, load_checkpoint, save_hf
from cam_jax.conversion.fp8 import Fp8Source, open_source
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.params import param_specs
from cam_jax.models.registry import read_config
from tests.conversion.checkpoints import BF16, same, tiny_config, write_checkpoint, write_file
from tests.conversion.tables.test_families import tensors_of
from tests.models.tiny import TINY

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
Tensors = dict[str, np.ndarray]


def quantization(*block: int, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block) or None,
    }
    return {"quantization_config": given | changes}


def draw_fp8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Every finite value, denormal numbers included."""
    raw = rng.integers(0, 127, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    return raw.view(E4M3)


def draw_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.exp2(rng.uniform(-9, -4, shape)).astype(np.float32)


def quantize(rng: np.random.Generator, shape: tuple[int, ...], block: tuple[int, int]) -> Tensors:
    """{"": weight, "_scale_inv": scales} of random numbers."""
    *leading, rows, columns = shape
    blocks = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    return {"": draw_fp8(rng, *shape), "_scale_inv": draw_scales(rng, *blocks)}


def dequantized(weight: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32, one element at a time."""
    whole = np.empty(weight.shape, np.float32)
    for *e, i, j in np.ndindex(weight.shape):
        scale = np.float32(scales[(*e, i // block[0], j // block[1])])
        whole[(*e, i, j)] = np.float32(weight[(*e, i, j)]) * scale
    return whole


def opened(directory: Path, tensors: Tensors, **config: Any) -> CheckpointSource:
    directory.mkdir(exist_ok=True)
    write_file(directory / "model.safetensors", tensors)
    return open_source(directory, tiny_config(**config))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointSource, np.ndarray]:
    """(source, float32 reference) of one 130 x 200 weight in blocks of 128 x 128."""
    parts = quantize(np.random.default_rng(1), (130, 200), (128, 128))
    assert parts["_scale_inv"].shape == (2, 2)
    tensors = {f"a.weight{suffix}": array for suffix, array in parts.items()}
    tensors["a.bias"] = np.ones(130, BF16)
    source = opened(tmp_path_factory.mktemp("ragged"), tensors, **quantization(128, 128))
    return source, dequantized(parts[""], parts["_scale_inv"], (128, 128))


def test_ragged_edges(ragged: tuple[CheckpointSource, np.ndarray]) -> None:
    source, expected = ragged
    assert isinstance(source, Fp8Source)
    assert source.names() == ("a.weight", "a.bias")
    assert "a.weight_scale_inv" not in source
    assert (source.spec("a.weight").dtype, source.spec("a.weight").shape) == ("BF16", (130, 200))
    assert same(source.read("a.weight"), expected)
    assert same(source.read("a.bias"), np.ones(130, BF16))


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
def test_out_of_any_float_type_is_rounded_once(
    ragged: tuple[CheckpointSource, np.ndarray], dtype: Any
) -> None:
    source, expected = ragged
    out = np.empty((130, 200), dtype)
    source.read_into("a.weight", out)
    assert same(out, expected.astype(dtype))
    stack = np.zeros((3, 140, 210), dtype)  # a view with gaps
    source.read_slice("a.weight", (slice(120, 130), slice(5, 200)), out=stack[1, 2:12, 3:198])
    assert (stack[1, 2:12, 3:198] == expected[120:, 5:].astype(dtype)).all()
    assert not stack[[0, 2]].any() and not stack[1, 12:].any() and not stack[1, :, 198:].any()


def test_out_that_does_not_fit(ragged: tuple[CheckpointSource, np.ndarray]) -> None:
    source, _ = ragged
    for out in (np.empty((200, 130), BF16), np.empty((130, 200), np.int32)):
        with pytest.raises(ValueError, match="out is"):
            source.read_into("a.weight", out)
    with pytest.raises(ValueError, match="step 1"):
        source.read_slice("a.weight", (slice(0, 9, 2),))
    with pytest.raises(CheckpointError, match=r"no tensor 'a\.weight_scale_inv'"):
        source.read("a.weight_scale_inv")


@pytest.mark.parametrize("piece", [1, 7, 150, 1000])
@hypothesis.given(data=st.data())
def test_slices_are_those_of_the_whole(
    ragged: tuple[CheckpointSource, np.ndarray], piece: int, data: st.DataObject
) -> None:
    source, expected = ragged
    ranges = []
    for size in expected.shape[: data.draw(st.integers(0, 2))]:
        start = data.draw(st.integers(0, size))
        ranges.append(slice(start, data.draw(st.integers(start, min(size, start + 40)))))
    if len(ranges) < 2:
        piece *= 1000  # a whole row by single elements takes long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "PIECE", piece)
        found = source.read_slice("a.weight", tuple(ranges))
    assert same(found, np.ascontiguousarray(expected[tuple(ranges)]))


@hypothesis.given(data=st.data())
def test_any_shape_and_block(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rank = data.draw(st.integers(2, 4))
    shape = tuple(data.draw(st.integers(0 if rank == 2 else 1, 5)) for _ in range(rank))
    block = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    parts = quantize(np.random.default_rng(2), shape, block)
    tensors = {f"w{suffix}": array for suffix, array in parts.items()}
    source = opened(tmp_path_factory.mktemp("any"), tensors, **quantization(*block))
    expected = dequantized(parts[""], parts["_scale_inv"], block)
    assert same(source.read("w"), expected)
    ranges = tuple(slice(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))) for _ in shape)
    assert same(source.read_slice("w", ranges), np.ascontiguousarray(expected[ranges]))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, E8M0])
def test_types_and_names_of_scales(
    tmp_path: Path, rng: np.random.Generator, suffix: str, dtype: Any
) -> None:
    weight = draw_fp8(rng, 6, 7)
    scales = draw_scales(rng, 2, 3).astype(dtype)
    tensors = {"m.weight": weight, f"m.weight{suffix}": scales}
    source = opened(tmp_path, tensors, **quantization(4, 3))
    assert source.names() == ("m.weight",)
    assert same(source.read("m.weight"), dequantized(weight, scales, (4, 3)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_per_matrix(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    weight, scale = draw_fp8(rng, 5, 6), draw_scales(rng, *shape)
    source = opened(tmp_path, {"w": weight, "w_scale": scale}, **quantization())
    assert same(source.read("w"), dequantized(weight, scale.reshape(1, 1), (5, 6)))


def test_one_scale_per_expert(tmp_path: Path, rng: np.random.Generator) -> None:
    weight, scale = draw_fp8(rng, 3, 5, 6), draw_scales(rng, 3, 1, 1)
    source = opened(tmp_path, {"w": weight, "w_scale_inv": scale}, **quantization())
    expected = dequantized(weight, scale, (5, 6))
    assert same(source.read_slice("w", (slice(1, 3), slice(2, 4))), expected[1:3, 2:4].copy())


def test_only_the_bytes_of_the_slice_are_read(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = quantize(rng, (64, 64), (16, 16))
    source = opened(tmp_path, {f"w{s}": a for s, a in parts.items()}, **quantization(16, 16))
    read = []
    plain = CheckpointSource.read_slice

    def counted(self: Any, name: str, ranges: Any = (), *, out: Any = None) -> np.ndarray:
        found = plain(self, name, ranges, out=out)
        read.append((name, found.shape))
        return found

    monkeypatch.setattr(CheckpointSource, "read_slice", counted)
    source.read_slice("w", (slice(15, 17), slice(32, 48)))
    assert read == [("w", (2, 16)), ("w_scale_inv", (2, 1))]


def test_not_a_number_stays_one_and_overflow_is_infinite(tmp_path: Path) -> None:
    weight = np.array([[0x7F, 0xFF, 0x7E, 0x00]], np.uint8).view(E4M3)
    scales = np.array([[2.0**127]], np.float32)
    source = opened(tmp_path, {"w": weight, "w_scale_inv": scales}, **quantization(4, 4))
    for dtype in (None, BF16, np.float16):
        found = source.read_slice("w", out=None if dtype is None else np.empty((1, 4), dtype))
        assert np.isnan(found[0, :2].astype(np.float32)).all()
        assert np.isposinf(found[0, 2].astype(np.float32)) and found[0, 3] == 0


def fails(directory: Path, tensors: Tensors, *words: str, **config: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(directory, tensors, **config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (2, 2, 1), (2,), (), (4, 3)])
def test_scales_of_another_shape(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    tensors = {"m.weight": draw_fp8(rng, 6, 7), "m.weight_scale_inv": draw_scales(rng, *shape)}
    words = ["m.weight_scale_inv", str(list(shape)), "[6, 7]", "need [2, 2]", "(4, 4)"]
    fails(tmp_path, tensors, *words, **quantization(4, 4))


def test_scales_that_cannot_be_used(tmp_path: Path, rng: np.random.Generator) -> None:
    weight, scales = draw_fp8(rng, 4, 4), draw_scales(rng, 1, 1)
    both = {"w": weight, "w_scale": scales, "w_scale_inv": scales}
    fails(tmp_path, both, "two tensors of scales", **quantization(4, 4))
    whole = {"w": weight, "w_scale": np.ones((1, 1), np.int32)}
    fails(tmp_path, whole, "w_scale is I32", **quantization(4, 4))
    flat = {"w": draw_fp8(rng, 4), "w_scale": scales}
    fails(tmp_path, flat, "[4], which has no blocks", **quantization(4, 4))
    many = {f"{i}": draw_fp8(rng, 4, 4) for i in range(10)}
    many |= {f"{i}_scale": draw_scales(rng, 9, 9) for i in range(10)}
    fails(tmp_path, many, "and 2 more", **quantization(4, 4))


def test_without_quantization_config_nothing_is_wrapped(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    source = opened(tmp_path, {"w": draw_fp8(rng, 2, 2), "w_scale_inv": draw_scales(rng, 1, 1)})
    assert type(source) is CheckpointSource
    assert source.spec("w").dtype == "F8_E4M3"
    with pytest.raises(ConfigError, match="gptq"):
        open_source(tmp_path, tiny_config(quantization_config={"quant_method": "gptq"}))


# --- whole checkpoints

BLOCK = (5, 6)
KEPT = ("norm", "embed", "lm_head", "mlp.gate.", "bias")


def fp8_checkpoint(config: dict[str, Any], layout: str = "per_expert") -> tuple[Tensors, Tensors]:
    """(tensors with FP8 and scales, the same ones dequantised to bfloat16)."""
    rng = np.random.default_rng(3)
    stored: Tensors = {}
    twin: Tensors = {}
    for name, array in tensors_of(config, layout).items():
        if any(part in name for part in KEPT):
            stored[name] = twin[name] = array
            continue
        parts = quantize(rng, array.shape, BLOCK)
        stored |= {name + suffix: part for suffix, part in parts.items()}
        twin[name] = dequantized(parts[""], parts["_scale_inv"], BLOCK).astype(BF16)
    return stored, twin


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [None, "f32", "bf16"])
def test_a_checkpoint_equals_its_dequantised_twin(
    tmp_path: Path, family: str, layout: str, dtype: str | None
) -> None:
    config = TINY[family]
    stored, twin = fp8_checkpoint(config, layout)
    assert sum(a.dtype == E4M3 for a in stored.values()) > 10
    lists = {"modules_to_not_convert": ["lm_head"]}
    found = load_checkpoint(
        write_checkpoint(
            tmp_path / "fp8", stored, config | quantization(*BLOCK, **lists), shards=3
        ),
        dtype=dtype,
    )
    if dtype == "f32":  # the products themselves, not rounded to bfloat16 on the way
        for name in [name for name, array in stored.items() if array.dtype == E4M3]:
            twin[name] = dequantized(stored[name], stored[f"{name}_scale_inv"], BLOCK)
        twin = {name: array.astype(np.float32) for name, array in twin.items()}
    expected = load_checkpoint(write_checkpoint(tmp_path / "twin", twin, config), dtype=dtype)
    assert found.config == expected.config and found.layout == layout
    assert found.leaves.keys() == expected.leaves.keys()
    for path, leaf in expected.leaves.items():
        assert same(found.leaves[path], leaf), path


def test_saved_it_is_a_plain_checkpoint(tmp_path: Path) -> None:
    config = TINY["deepseek_v3"]
    stored, twin = fp8_checkpoint(config)
    loaded = load_checkpoint(
        write_checkpoint(tmp_path / "fp8", stored, config | quantization(*BLOCK))
    )
    saved = save_hf(tmp_path / "plain", loaded.config_json, loaded.leaves, layout=loaded.layout)
    assert json.loads((saved / "config.json").read_text()) == config
    source = CheckpointSource.open(saved)
    assert set(source.names()) == set(twin)
    assert all(same(source.read(name), array) for name, array in twin.items())


def refused(directory: Path, stored: Tensors, config: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(write_checkpoint(directory, stored, config))
    for word in words:
        assert word in str(caught.value)


def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path: Path) -> None:
    config = TINY["deepseek_v3"] | quantization(*BLOCK)
    stored, _ = fp8_checkpoint(config)
    weight = "model.layers.1.self_attn.o_proj.weight"
    unscaled = {name: array for name, array in stored.items() if name != f"{weight}_scale_inv"}
    refused(tmp_path / "a", unscaled, config, f"{weight} in model.safetensors is F8_E4M3")
    extra = stored | {"lm_head.weight_scale_inv": np.ones((1, 1), np.float32)}
    refused(tmp_path / "b", extra, config, "left over", "lm_head.weight_scale_inv")
    static = stored | {weight.replace("weight", "input_scale"): np.ones((), np.float32)}
    refused(tmp_path / "c", static, config, "left over", "o_proj.input_scale")
    refused(tmp_path / "d", stored, TINY["deepseek_v3"], "F8_E4M3", "quantization_config")
    other = stored | {weight: stored[weight].view(np.uint8).view(ml_dtypes.float8_e5m2)}
    refused(tmp_path / "e", other, config, f"{weight} in model.safetensors is F8_E5M2")
    part = "model.layers.1.mlp.experts.3.up_proj.weight"
    mixed = {name: array for name, array in stored.items() if name != f"{part}_scale_inv"}
    mixed[part] = stored[part].astype(np.float32)
    refused(tmp_path / "f", mixed, config, "more than one type within a parameter", part)


def test_scales_of_prediction_layers_go_with_them(tmp_path: Path) -> None:
    config = TINY["deepseek_v3"] | quantization(*BLOCK)
    stored, _ = fp8_checkpoint(config)
    layer = config["num_hidden_layers"]
    extra = quantize(np.random.default_rng(4), (7, 7), BLOCK)
    stored |= {f"model.layers.{layer}.eh_proj.weight{s}": array for s, array in extra.items()}
    loaded = load_checkpoint(write_checkpoint(tmp_path, stored, config))
    assert loaded.leaves.keys() == param_specs(read_config(config)).keys()


def test_not_a_number_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    config = TINY["deepseek_v3"] | quantization(*BLOCK)
    stored, _ = fp8_checkpoint(config)
    weight = "model.layers.1.mlp.experts.3.up_proj.weight"
    stored[weight].view(np.uint8)[2, 3] = 0x7F
    refused(tmp_path / "a", stored, config, "not finite", weight, "1 NaN, 0 infinite")
    stored, _ = fp8_checkpoint(config)
    stored[f"{weight}_scale_inv"][0, 0] = np.nan
    refused(tmp_path / "b", stored, config, "not finite", weight, "30 NaN")


@pytest.mark.slow
def test_products_are_those_of_torch(tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    parts = quantize(rng, (300, 260), (128, 128))
    source = opened(tmp_path, {f"w{s}": a for s, a in parts.items()}, **quantization(128, 128))
    weight = torch.from_numpy(parts[""].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(parts["_scale_inv"])
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :260]
    products = weight.to(torch.float32) * spread
    assert same(source.read("w"), products.numpy())
    out = np.empty((300, 260), BF16)
    source.read_into("w", out)
    rounded = products.to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(out.view(np.int16), rounded)
