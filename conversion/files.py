"""The small files of a checkpoint directory: config.json and those that travel with the weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cam_jax.conversion.header import read_json
from cam_jax.conversion.tables import WeightTable, table_for
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.config import DecoderConfig
from cam_jax.models.registry import family_of, read_config

CONFIG = "config.json"
MARKER = "cam_jax.json"
WEIGHTS = "weights"
"""File and folder that make a directory an Orbax checkpoint of cam_jax."""

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def read_directory(directory: Path) -> tuple[dict[str, Any], DecoderConfig, WeightTable]:
    """(config.json, the decoder that it describes, its family's weight table).

    Raises CheckpointError when config.json is missing or malformed, ConfigError (naming the file)
    when it describes no known model.
    """
    path = directory / CONFIG
    if directory.is_dir() and not path.is_file():
        raise CheckpointError(f"{directory} holds no {CONFIG}.")
    values = read_json(path)
    try:
        return values, *describe(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def describe(values: Mapping[str, Any]) -> tuple[DecoderConfig, WeightTable]:
    """The decoder and the weight table for the dictionary of a config.json."""
    return read_config(values), table_for(family_of(values).name)


def companions(directory: Path) -> dict[str, Path]:
    """Name -> path of those files of COMPANIONS that the directory holds."""
    return {name: directory / name for name in COMPANIONS if (directory / name).is_file()}
