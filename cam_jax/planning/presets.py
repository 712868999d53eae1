"""The configurations that ship: shapes of published models, as their own config.json has them.

A preset holds what fixes the program; token ids, dropout and the like are left out.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from cam_jax.conversion.header import read_json
from cam_jax.errors import CheckpointError, ConfigError


def preset_names() -> tuple[str, ...]:
    """Every preset, in alphabetical order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def read_preset(name: str) -> Mapping[str, Any]:
    """The dictionary of a preset's config.json.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigError(
            f"preset {name!r} is unknown: expected one of {', '.join(preset_names())}"
        )
    return json.loads((_folder() / f"{name}.json").read_text("utf-8"))


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The dictionary of a config.json, or of the one in a folder.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        there = file.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ConfigError(f"--config: {error}") from error
    if not there:
        raise ConfigError(
            f"{file} does not exist: give a config.json, or a preset ({', '.join(preset_names())})"
        )
    try:
        return read_json(file)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _folder() -> Path:
    return Path(str(resources.files("cam_jax"))) / "assets" / "configs"
