"""`quantization_config` of a config.json: which form of quantised weights is read, if any.

It says how weights are stored, not what the decoder computes: once read, they are plain numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.reading import Fields

FIELD = "quantization_config"


@dataclass(frozen=True, kw_only=True)
class Fp8Weights:
    """Weights stored as FP8 (e4m3) with scales.

    block: (rows, columns) that share one scale, None when a whole matrix does.
    """

    block: tuple[int, int] | None


def read_quantization(values: Mapping[str, Any]) -> Fp8Weights | None:
    """How a checkpoint with these config values stores its weights, None for plain numbers.

    Lists of modules that are not converted (`modules_to_not_convert`, `ignored_layers`) are read
    for their form alone: the type of each stored tensor says whether it is FP8.

    Raises:
        ConfigError: a method other than fp8, or one of its fields is missing or not built.
    """
    top = Fields(values)
    top.only("compression_config")  # an older spelling, with methods that are not read here
    if top.raw(FIELD) is None:
        return None
    given = top.mapping(FIELD)
    fields = Fields(given, place=f"config: {FIELD}")
    if fields.raw("quant_method") is None:
        raise ConfigError(f"config: {FIELD}: field quant_method is missing")
    fields.only("quant_method", "fp8")
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    # With static scales the model quantises its activations too, which is other arithmetic.
    fields.only("activation_scheme", "dynamic")
    fields.only("scale_fmt", "float", "ue8m0")
    fields.only("expert_dtype", "fp8")
    for name in ("modules_to_not_convert", "ignored_layers"):
        skipped = fields.raw(name)
        if skipped is not None and not (
            isinstance(skipped, list | tuple) and all(isinstance(item, str) for item in skipped)
        ):
            raise ConfigError(
                f"config: {FIELD}: {name} must be a list of module names, got {skipped!r}"
            )
    return Fp8Weights(block=_read_block(fields))


def _read_block(fields: Fields) -> tuple[int, int] | None:
    """Published readers take a missing size for two different things, so it must be there."""
    if not fields.given("weight_block_size"):
        raise ConfigError(
            f"config: {FIELD}: field weight_block_size is missing; give [rows, columns], or null "
            "where one scale holds for a whole matrix"
        )
    block = fields.raw("weight_block_size")
    if block is None:
        return None
    sizes = fields.integers("weight_block_size")
    if len(sizes) != 2 or 0 in sizes:
        raise ConfigError(
            f"config: {FIELD}: weight_block_size must be two positive integers, got {block!r}"
        )
    return sizes[0], sizes[1]


def without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """values for weights that are stored as plain numbers: without `quantization_config`.

    Everything else, its order included, stays as it is.
    """
    plain = {key: value for key, value in values.items() if key != FIELD}
    nested = plain.get("text_config")
    if isinstance(nested, Mapping) and FIELD in nested:
        plain["text_config"] = {key: value for key, value in nested.items() if key != FIELD}
    return plain
