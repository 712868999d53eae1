"""The order of the text: a pure function of seed and step that visits everything."""

import numpy as np
import pytest

from cam_jax.errors import InputError
from cam_jax.training.data import batch_at

STREAM = np.arange(1000, dtype=np.int32)
OPTIONS = {"batch": 3, "length": 10, "seed": 5}


def test_targets_are_one_token_on():
    inputs, targets = batch_at(STREAM, 4, **OPTIONS)
    assert inputs.shape == targets.shape == (3, 10)
    assert (targets == inputs + 1).all()


def test_same_step_same_batch_in_any_order():
    later = batch_at(STREAM, 70, **OPTIONS)[0]
    first = batch_at(STREAM, 0, **OPTIONS)[0]
    assert (batch_at(STREAM, 70, **OPTIONS)[0] == later).all()
    assert (batch_at(STREAM, 0, **OPTIONS)[0] == first).all()
    assert (batch_at(STREAM, 0, **{**OPTIONS, "seed": 6})[0] != first).any()


def test_an_epoch_visits_disjoint_windows():
    windows_per_epoch = (len(STREAM) - 1) // 10 - 1  # 98
    rows = np.concatenate([batch_at(STREAM, s, **OPTIONS)[0] for s in range(windows_per_epoch)])
    one, two, three = np.split(rows, 3)
    for epoch in (one, two, three):
        assert len(np.unique(epoch)) == epoch.size
    assert len({int(epoch.min()) % 10 for epoch in (one, two, three)}) > 1  # other cuts each time


def test_too_little_text_is_an_error():
    with pytest.raises(InputError, match="20 tokens"):
        batch_at(STREAM[:20], 0, **OPTIONS)
