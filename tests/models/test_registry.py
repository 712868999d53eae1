"""Which family a configuration belongs to."""

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.registry import family_of, read_config
from tests.models.tiny import OLMOE


def test_the_model_type_chooses_the_family():
    assert family_of(OLMOE).name == "olmoe"
    assert read_config(OLMOE).family == "olmoe"


def test_a_nested_text_config_is_found():
    nested = {"model_type": "wrapper", "tie_word_embeddings": True}
    inner = {key: value for key, value in OLMOE.items() if key != "tie_word_embeddings"}
    config = read_config(nested | {"text_config": inner})
    assert config.family == "olmoe"
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"model_type": ["olmoe"]}, "model_type=\\['olmoe'\\] is not supported"),
        ({"model_type": {}}, "model_type={} is not supported"),
        ({"model_type": "olmoe", "text_config": 3}, "text_config"),
    ],
)
def test_unknown_models_are_refused(values, word):
    with pytest.raises(ConfigError, match=word):
        read_config(values)
