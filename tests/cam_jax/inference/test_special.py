"""EOS, BOS and padding ids out of two files."""

import numpy as np
import pytest

from cam_jax.errors import ConfigError
from cam_jax.inference import SpecialTokens


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ((), None, 0)),
        ({"eos_token_id": 2}, None, ((2,), None, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2, 9]}, ((7, 2, 9), None, 7)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, ((5, 3, 4), None, 5)),
        ({"eos_token_id": 2, "pad_token_id": 1}, {"pad_token_id": 6}, ((2,), None, 6)),
        ({"bos_token_id": 1, "eos_token_id": None}, {"bos_token_id": None}, ((), 1, 0)),
        ({"text_config": {"eos_token_id": 8}, "eos_token_id": 2}, {}, ((8, 2), None, 8)),
        ({"eos_token_id": 2, "pad_token_id": -1}, {"pad_token_id": 99}, ((2,), None, 2)),
    ],
)
def test_union(config, generation, expected):
    special = SpecialTokens.of(config, generation, vocab_size=10)
    assert (special.eos_ids, special.bos_id, special.pad_id) == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, ["2"], {}])
def test_an_id_that_is_no_integer_is_refused(value):
    with pytest.raises(ConfigError, match="eos_token_id"):
        SpecialTokens.of({"eos_token_id": value}, None, vocab_size=10)


def test_stopping_or_not_has_one_shape():
    special = SpecialTokens(eos_ids=(4, 5))
    assert special.eos_array(True).tolist() == [4, 5]
    assert special.eos_array(False).tolist() == [-1, -1]
    assert SpecialTokens().eos_array(True).tolist() == [-1]


def test_lengths_end_with_the_first_eos():
    special = SpecialTokens(eos_ids=(4, 5), pad_id=4)
    tokens = np.array([[1, 5, 4, 4], [4, 4, 4, 4], [1, 2, 3, 1]], np.int32)
    assert special.lengths(tokens, True).tolist() == [2, 1, 4]
    assert special.lengths(tokens, False).tolist() == [4, 4, 4]
