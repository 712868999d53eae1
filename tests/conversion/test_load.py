"""Directory -> leaves: loaded is what is stored; all that is wrong is said before reading."""

import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cam_jax.conversion import (
    CheckpointSource,
    NonfiniteWarning,
    load_checkpoint,
    load_params,
    open_checkpoint,
    read,
)
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.params import param_specs, stack_params
from tests.conversion.checkpoints import (
    BF16,
    EXPERTS,
    LAYERS,
    D,
    F,
    same,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_config,
)

Tensors = dict[str, np.ndarray]


@pytest.fixture
def no_data_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor fails the test: what is refused must be refused from the headers."""

    def read_slice(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(CheckpointSource, "read_slice", read_slice)


def refused(directory: Path, *words: str, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load_checkpoint(directory)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def expected_leaves(tensors: Tensors) -> Tensors:
    """By hand, from one-by-one tensors."""
    leaves = {
        "embed": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "lm_head": tensors["lm_head.weight"],
    }
    for layer in range(LAYERS):
        hf, jx = f"model.layers.{layer}.", f"layers.{layer}."
        leaves[f"{jx}attn_norm"] = tensors[f"{hf}input_layernorm.weight"]
        leaves[f"{jx}ffn_norm"] = tensors[f"{hf}post_attention_layernorm.weight"]
        for name in "qkvo":
            leaves[f"{jx}attn.{name}"] = tensors[f"{hf}self_attn.{name}_proj.weight"]
            bias = f"{hf}self_attn.{name}_proj.bias"
            if bias in tensors:
                leaves[f"{jx}attn.{name}_bias"] = tensors[bias]
        for name in ("q_norm", "k_norm"):
            leaves[f"{jx}attn.{name}"] = tensors[f"{hf}self_attn.{name}.weight"]
        leaves[f"{jx}moe.router"] = tensors[f"{hf}mlp.gate.weight"]
        for name in ("gate", "up", "down"):
            leaves[f"{jx}moe.experts.{name}"] = np.stack(
                [tensors[f"{hf}mlp.experts.{e}.{name}_proj.weight"] for e in range(EXPERTS)]
            )
    return leaves


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_leaves_are_the_tensors(tmp_path: Path, fused: bool, shards: int, dtype: np.dtype) -> None:
    stored = tiny_tensors(fused=fused, dtype=dtype)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "m", stored, shards=shards))
    expected = expected_leaves(tiny_tensors(dtype=dtype))
    assert loaded.layout == ("fused" if fused else "per_expert")
    assert list(loaded.leaves) == list(param_specs(loaded.config))
    assert loaded.leaves.keys() == expected.keys()
    for path, leaf in loaded.leaves.items():
        assert same(leaf, expected[path]), path


def test_gate_comes_first_in_the_fused_tensor(tmp_path: Path) -> None:
    tensors = tiny_tensors(fused=True)
    leaves = load_checkpoint(write_checkpoint(tmp_path, tensors)).leaves
    gate_up = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert same(leaves["layers.1.moe.experts.gate"], np.ascontiguousarray(gate_up[:, :F]))
    assert same(leaves["layers.1.moe.experts.up"], np.ascontiguousarray(gate_up[:, F:]))


def test_attention_biases(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors(bias=True)
    config = tiny_config(attention_bias=True)
    opened = open_checkpoint(write_checkpoint(tmp_path / "a", tensors, config))
    assert opened.plan.shapes.keys() == expected_leaves(tensors).keys()
    message = refused(write_checkpoint(tmp_path / "b", tensors), "left over", "q_proj.bias")
    assert "and 4 more" in message  # 12 biases, 8 of them named
    refused(write_checkpoint(tmp_path / "c", tiny_tensors(), config), "missing", "q_proj.bias")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_large_tensors_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool, threads: int
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 40)  # below two rows of most tensors
    directory = write_checkpoint(tmp_path, tiny_tensors(fused=fused))
    seen: list[tuple[int, int]] = []
    loaded = load_checkpoint(
        directory, threads=threads, progress=lambda done, total: seen.append((done, total))
    )
    for path, leaf in expected_leaves(tiny_tensors()).items():
        assert same(loaded.leaves[path], leaf), path
    total = sum(leaf.nbytes for leaf in loaded.leaves.values())
    assert total == loaded.opened.plan.nbytes
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen) and len(seen) > 100


def test_progress_is_never_called_by_two_threads_at_once(tmp_path: Path) -> None:
    busy = threading.Lock()

    def progress(done: int, total: int) -> None:
        assert busy.acquire(blocking=False)
        busy.release()

    load_checkpoint(write_checkpoint(tmp_path, tiny_tensors()), threads=4, progress=progress)


def test_errors_in_threads_reach_the_caller(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        load_checkpoint(write_checkpoint(tmp_path, tiny_tensors()), threads=2, progress=progress)


def test_dtype_on_load(tmp_path: Path) -> None:
    tensors = tiny_tensors(dtype=np.float32)
    directory = write_checkpoint(tmp_path, tensors)
    for dtype in ("bf16", "f32", None):
        loaded = load_checkpoint(directory, dtype=dtype)
        for path, leaf in expected_leaves(tensors).items():
            wanted = leaf.astype(ml_dtypes.bfloat16) if dtype == "bf16" else leaf
            assert same(loaded.leaves[path], wanted), path
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_checkpoint(tmp_path / "absent", dtype="int4")


def test_values_beyond_the_type_asked_for(tmp_path: Path) -> None:
    tensors = tiny_tensors(dtype=np.float64)
    tensors["model.norm.weight"][3] = 1e300
    directory = write_checkpoint(tmp_path, tensors)
    load_checkpoint(directory)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* 0 NaN, 1 infinite"):
        load_checkpoint(directory, dtype="f32")


@pytest.mark.parametrize("fused", [False, True])
def test_params_equal_stacked_leaves(tmp_path: Path, fused: bool) -> None:
    opened = open_checkpoint(write_checkpoint(tmp_path, tiny_tensors(fused=fused)))
    for dtype in (None, "f32"):
        leaves = load_checkpoint(tmp_path, dtype=dtype).leaves
        expected = stack_params(opened.config, leaves)
        params = load_params(opened, dtype=dtype)
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            assert isinstance(a, jax.Array) and same(np.asarray(a), np.asarray(b))
    assert params["segments"][0]["moe"]["experts"]["down"].shape == (LAYERS, EXPERTS, D, F)


def test_params_survive_donation(tmp_path: Path) -> None:
    params = load_params(open_checkpoint(write_checkpoint(tmp_path, tiny_tensors())), dtype="f32")
    before = np.array(params["embed"])
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(params["embed"])
    assert np.array_equal(doubled, before * 2)


def test_float64_params_become_float32(tmp_path: Path) -> None:
    opened = open_checkpoint(write_checkpoint(tmp_path, tiny_tensors(dtype=np.float64)))
    assert {leaf.dtype for leaf in jax.tree.leaves(load_params(opened))} == {jnp.dtype(jnp.float32)}


def test_a_stack_of_two_types_takes_the_wider(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = tensors[name].astype(np.float32)
    params = load_params(open_checkpoint(write_checkpoint(tmp_path, tensors)))
    assert params["segments"][0]["attn_norm"].dtype == jnp.float32
    assert params["segments"][0]["ffn_norm"].dtype == jnp.bfloat16


# What is wrong is said from the headers.


def test_missing_and_left_over_are_listed_together(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors()
    del tensors["model.layers.2.mlp.experts.4.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.5.up_proj.weight"] = np.zeros((F, D), BF16)
    tensors["model.extra"] = np.zeros(1, BF16)
    message = refused(
        write_checkpoint(tmp_path, tensors),
        str(tmp_path),
        "missing (2): ",
        "model.layers.2.mlp.experts.4.up_proj.weight",
        "model.norm.weight",
        "left over (no parameter of the model takes them) (2): ",
        "model.layers.0.mlp.experts.5.up_proj.weight (model.safetensors)",
        "model.extra",
    )
    assert "more" not in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": LAYERS - 1}, ["left over", "model.layers.2."]),
        ({"num_hidden_layers": LAYERS + 1}, ["missing", "model.layers.3."]),
        ({"num_experts": EXPERTS + 1}, ["missing", "experts.5.", "num_experts=6", "[5, 8]"]),
        ({"num_experts": EXPERTS - 1}, ["left over", "experts.4.", "num_experts=4"]),
        ({"intermediate_size": F + 1}, ["[6, 8]", "[7, 8]", "intermediate_size=7"]),
        ({"vocab_size": 12}, ["[11, 8]", "[12, 8]", "vocab_size=12", "model.safetensors"]),
        ({"num_key_value_heads": 2}, ["k_norm", "[4]", "[8]", "num_key_value_heads=2"]),
    ],
)
def test_config_and_tensors_disagree(
    tmp_path: Path, no_data_read: None, change: dict[str, int], words: list[str]
) -> None:
    refused(write_checkpoint(tmp_path, tiny_tensors(), tiny_config(**change)), *words)


def test_fused_shape_is_checked_whole(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors(fused=True)
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((EXPERTS, F, D), BF16)
    refused(write_checkpoint(tmp_path, tensors), "do not fit (1)", "[5, 6, 8]", "[5, 12, 8]")


def test_layer_and_expert_axes_are_not_confused(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors(fused=True)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = np.zeros((LAYERS, D, F), BF16)
    refused(write_checkpoint(tmp_path, tensors), f"{name} in model.safetensors has shape [3, 8, 6]")


def test_both_layouts_at_once(tmp_path: Path, no_data_read: None) -> None:
    tensors = {**tiny_tensors(), **tiny_tensors(fused=True)}
    refused(write_checkpoint(tmp_path, tensors), "left over", "gate_up_proj")


def test_types_that_are_no_weights(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"] = np.ones(D, np.int32)
    refused(write_checkpoint(tmp_path, tensors), "model.norm.weight", "is I32", "scales")


def test_one_leaf_of_two_types(tmp_path: Path, no_data_read: None) -> None:
    tensors = tiny_tensors()
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    words = ("layers.2.moe.experts.down", "more than one type", f"{name} is F32")
    refused(write_checkpoint(tmp_path, tensors), *words)


def test_declared_tensors_are_ignored_with_a_reason(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.full(2, np.nan, np.float32)
    opened = load_checkpoint(write_checkpoint(tmp_path, tensors)).opened
    assert list(opened.plan.ignored) == [name] and "config" in opened.plan.ignored[name]


def test_unknown_model_type_comes_first(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config(model_type="gpt2"))
    words = (str(tmp_path / "config.json"), "'gpt2'", "olmoe")
    refused(tmp_path, *words, kind=ConfigError)  # before anybody misses the weights


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json", "JSON")


def test_config_missing_or_without_a_needed_field(tmp_path: Path) -> None:
    refused(tmp_path, "holds no config.json")
    config = tiny_config()
    for field in ("hidden_size", "num_experts", "model_type"):
        write_config(tmp_path, {k: v for k, v in config.items() if k != field})
        refused(tmp_path, "config.json", field, kind=ConfigError)


# Tied embeddings: flag and tensor in all combinations.


def test_tied_and_absent(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    loaded = load_checkpoint(write_checkpoint(tmp_path, tiny_tensors(head=False), config))
    assert "lm_head" not in loaded.leaves and loaded.opened.plan.tied == ()


@pytest.mark.parametrize("wide", [False, True])
def test_tied_and_present_and_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    monkeypatch.setattr(read, "CHUNK_BYTES", 40)
    tensors = tiny_tensors()
    twin = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = twin.astype(np.float32) if wide else twin
    config = tiny_config(tie_word_embeddings=True)
    loaded = load_checkpoint(write_checkpoint(tmp_path, tensors, config))
    assert "lm_head" not in loaded.leaves
    assert same(loaded.leaves["embed"], twin)


@pytest.mark.parametrize("entry", [load_checkpoint, lambda d: load_params(open_checkpoint(d))])
def test_tied_and_present_and_different(tmp_path: Path, entry: Any) -> None:
    tensors = tiny_tensors()
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    config = tiny_config(tie_word_embeddings=True)
    directory = write_checkpoint(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head.*differs"):
        entry(directory)


def test_tied_and_present_with_another_shape(tmp_path: Path) -> None:
    tensors = {**tiny_tensors(), "lm_head.weight": np.zeros((3, D), BF16)}
    config = tiny_config(tie_word_embeddings=True)
    refused(write_checkpoint(tmp_path, tensors, config), "lm_head.weight", "[3, 8]", "[11, 8]")


def test_untied_and_absent(tmp_path: Path, no_data_read: None) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors(head=False))
    refused(directory, "missing (1): lm_head.weight", "tie_word_embeddings=False")


# Values that are not finite.


@pytest.mark.parametrize("fused", [False, True])
def test_nonfinite_is_reported_and_loaded_on_request(tmp_path: Path, fused: bool) -> None:
    tensors = tiny_tensors(fused=fused)
    name = "gate_up_proj" if fused else "2.up_proj.weight"
    name = f"model.layers.1.mlp.experts.{name}"
    tensors[name].reshape(-1)[-1] = np.nan
    tensors["model.norm.weight"][:2] = (-np.inf, np.inf)
    directory = write_checkpoint(tmp_path, tensors)
    words = (f"{name} in {directory}", "1 NaN, 0 infinite", "0 NaN, 2 infinite", "allow_nonfinite")
    refused(directory, *words)
    with pytest.warns(NonfiniteWarning, match="1 NaN"):
        loaded = load_checkpoint(directory, allow_nonfinite=True)
    assert np.isinf(loaded.leaves["final_norm"][:2].astype(np.float32)).all()
    with pytest.warns(NonfiniteWarning, match="1 NaN"):
        load_params(open_checkpoint(directory), allow_nonfinite=True)


def test_companions_travel(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_tensors())
    assert open_checkpoint(directory).companions == {}
    for name in ("generation_config.json", "tokenizer.json"):
        (directory / name).write_text(json.dumps({}))
    (directory / "pytorch_model.bin").touch()
    found = open_checkpoint(directory).companions
    assert found == {n: directory / n for n in ("generation_config.json", "tokenizer.json")}
