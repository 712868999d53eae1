"""quantization_config: FP8 with its block size is read, everything else is refused by name."""

from typing import Any

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.quantization import read_quantization, without_quantization
from cam_jax.models.registry import read_config
from tests.models.tiny import TINY

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fmt": "float8_e4m3fn"},
        {"fmt": None, "activation_scheme": None},
        {"scale_fmt": "ue8m0"},
        {"modules_to_not_convert": None},
        {"modules_to_not_convert": ["lm_head", "gate"]},
        {"ignored_layers": ["lm_head"]},
        {"weight_block_size": (128, 128)},
    ],
)
def test_the_forms_of_published_checkpoints(changes: dict[str, Any]) -> None:
    found = read_quantization({"quantization_config": FP8 | changes})
    assert found is not None and found.block == (128, 128)


def test_absent_null_and_one_scale_per_matrix() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None
    found = read_quantization({"quantization_config": FP8 | {"weight_block_size": None}})
    assert found is not None and found.block is None
    found = read_quantization({"quantization_config": FP8 | {"weight_block_size": [64, 32]}})
    assert found is not None and found.block == (64, 32)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "mxfp4", 8, []]
)
def test_other_methods_are_refused_by_name(method: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config: quant_method=") as caught:
        read_quantization({"quantization_config": FP8 | {"quant_method": method}})
    assert repr(method) in str(caught.value)


@pytest.mark.parametrize("field", ["quant_method", "weight_block_size"])
def test_what_is_never_assumed(field: str) -> None:
    values = {key: value for key, value in FP8.items() if key != field}
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        read_quantization({"quantization_config": values})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
        ("scale_fmt", "log"),
        ("expert_dtype", "fp4"),
        ("weight_block_size", 128),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 128, 1]),
        ("weight_block_size", [0, 128]),
        ("weight_block_size", [128, -1]),
        ("weight_block_size", [128.0, 128]),
        ("weight_block_size", [True, True]),
        ("weight_block_size", "128"),
        ("modules_to_not_convert", "lm_head"),
        ("ignored_layers", [1]),
    ],
)
def test_what_is_malformed_or_not_built_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        read_quantization({"quantization_config": FP8 | {field: value}})


def test_what_is_no_dictionary() -> None:
    for value in ([], "fp8", True):
        with pytest.raises(ConfigError, match="quantization_config"):
            read_quantization({"quantization_config": value})
    with pytest.raises(ConfigError, match="compression_config"):
        read_quantization({"compression_config": {"quant_method": "compressed-tensors"}})


@pytest.mark.parametrize("family", TINY)
def test_every_family_reads_it_and_computes_the_same(family: str) -> None:
    values = TINY[family]
    assert read_config(values | {"quantization_config": FP8}) == read_config(values)
    with pytest.raises(ConfigError, match="awq"):
        read_config(values | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    nested = {"model_type": "x", "text_config": values, "quantization_config": FP8 | {"fmt": "x"}}
    with pytest.raises(ConfigError, match="fmt"):
        read_config(nested)


def test_without_quantization() -> None:
    values = {"a": 1, "quantization_config": FP8, "text_config": {"b": 2}}
    assert list(without_quantization(values).items()) == [("a", 1), ("text_config", {"b": 2})]
    nested = {"text_config": {"b": 2, "quantization_config": FP8}, "c": [3]}
    assert without_quantization(nested) == {"text_config": {"b": 2}, "c": [3]}
    assert "quantization_config" in values and "quantization_config" in nested["text_config"]
