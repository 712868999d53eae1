"""The models that ship as configurations: they read, and have as many weights as published."""

import json
import math

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.params import param_specs
from cam_jax.models.registry import read_config
from cam_jax.planning.presets import preset_names, read_config_file, read_preset

# In billions, as the models' cards have them.
PARAMETERS = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen3-30b-a3b": 30.5,
}


def test_each_preset_is_checked_here():
    assert preset_names() == tuple(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name):
    config = read_config(read_preset(name))
    total = sum(math.prod(spec.shape) for spec in param_specs(config).values())
    assert total / 1e9 == pytest.approx(PARAMETERS[name], abs=0.06)


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ConfigError, match=r"'mixtral' is unknown: expected one of .*mixtral-8x7b"):
        read_preset("mixtral")


def test_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_config_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        read_config_file(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_config_file(file)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config_file(file)
    file.write_text(json.dumps({"model_type": "mixtral"}))
    assert read_config_file(tmp_path) == read_config_file(file) == {"model_type": "mixtral"}
