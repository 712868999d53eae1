"""Empty rows leave the division of the real ones over the devices as it was."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.inference.rows import spread_rows


def test_hand_computed():
    real = np.array([True, True, True, False, False, False])
    assert spread_rows(real, 2).tolist() == [0, 1, -1, 2, -1, -1]
    assert spread_rows(real, 3).tolist() == [0, -1, 1, -1, 2, -1]
    assert spread_rows(np.ones(5, bool), 2).tolist() == [0, 1, 2, 3, 4]


@given(real=st.lists(st.booleans(), min_size=1, max_size=20), devices=st.integers(1, 8))
def test_each_device_gets_what_it_would_get_without_empty_rows(real, devices):
    real = np.array(real)
    order = spread_rows(real, devices)
    if real.all():
        return
    filled = np.flatnonzero(real)
    share = -(-len(filled) // devices)
    for device, block in enumerate(order.reshape(devices, -1)):
        own = filled[device * share : (device + 1) * share]
        assert block[block >= 0].tolist() == own.tolist()
