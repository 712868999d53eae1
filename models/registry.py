"""Which family a configuration belongs to. The only place in `models` that knows model names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.config import DecoderConfig
from cam_jax.models.families import (
    deepseek,
    deepseek_v2,
    deepseek_v3,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from cam_jax.models.quantization import read_quantization


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder family.

    Attributes:
        name: key of the family's weight table.
        read_config: from config.json's dictionary to the decoder's description.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], DecoderConfig]


FAMILIES: Mapping[str, Family] = {
    "olmoe": Family(name="olmoe", read_config=olmoe.read_config),
    "mixtral": Family(name="mixtral", read_config=mixtral.read_config),
    "qwen2_moe": Family(name="qwen2_moe", read_config=qwen2_moe.read_config),
    "qwen3_moe": Family(name="qwen3_moe", read_config=qwen3_moe.read_config),
    "deepseek": Family(name="deepseek", read_config=deepseek.read_config),
    "deepseek_v2": Family(name="deepseek_v2", read_config=deepseek_v2.read_config),
    "deepseek_v3": Family(name="deepseek_v3", read_config=deepseek_v3.read_config),
}


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: `text_config` where a configuration nests one."""
    nested = values.get("text_config")
    if nested is None:
        return values
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config: text_config must be a dictionary, got {nested!r}")
    # What is said once for the whole model (tied embeddings, say) holds for the text part too.
    return {**{key: values[key] for key in values if key != "text_config"}, **nested}


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a configuration.

    Raises:
        ConfigError: model_type is missing or not one that is built.
    """
    inner = text_config(values)
    model_type = inner.get("model_type")
    if model_type is None:
        raise ConfigError("config: field model_type is missing")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config: model_type={model_type!r} is not supported (only {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type]


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that the dictionary of a config.json describes.

    Raises:
        ConfigError: names the field that is missing, malformed or unsupported.
    """
    family, inner = family_of(values), text_config(values)
    read_quantization(inner)  # how weights are stored is no part of the decoder, but must be known
    return family.read_config(inner)
