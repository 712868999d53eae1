"""Windows predict every token once; bits per byte are what the definition says."""

import math

import numpy as np
import pytest

from cam_jax.training.bits import bits_per_byte, windows


@pytest.mark.parametrize("size", [2, 5, 8, 9, 10])
def test_every_token_but_the_first_is_a_target_once(size):
    stream = np.arange(100, 100 + size, dtype=np.int32)
    inputs, targets = windows(stream, 4, fill=7)
    assert inputs.shape == targets.shape and inputs.shape[1] == 4
    assert targets[targets >= 0].tolist() == stream[1:].tolist()
    assert inputs[targets >= 0].tolist() == stream[:-1].tolist()
    assert (inputs[targets < 0] == 7).all()


def test_bits_per_byte():
    sizes = np.array([0, 2, 3], np.int32)  # token 0 ends a document: it costs bits, has no bytes
    targets = np.array([1, 2, 0], np.int32)
    log_probabilities = np.log(np.array([0.5, 0.25, 0.25]))
    assert math.isclose(bits_per_byte(log_probabilities, targets, sizes), (1 + 2 + 2) / 5)
