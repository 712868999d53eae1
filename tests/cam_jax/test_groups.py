"""How a batch is divided into groups, devices and expert ranks."""

import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.errors import PolicyError
from cam_jax.groups import Groups, mesh_sizes


def test_device_groups_are_contiguous_blocks_padded_at_the_end():
    groups = Groups(rows=5, positions=2, group="device", data=2, expert=2)
    x = jnp.arange(10).reshape(5, 2)
    split = groups.split(x, fill=-1)
    np.testing.assert_array_equal(
        split, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1], [-1, -1, -1, -1]]
    )
    np.testing.assert_array_equal(groups.merge(split), x)
    np.testing.assert_array_equal(groups.index, [0, 1, 2, 3])
    np.testing.assert_array_equal(groups.ep_rank, [0, 1, 0, 1])


def test_one_prompt_fills_one_group_of_eight():
    groups = Groups(rows=1, positions=3, group="device", expert=8)
    valid = groups.split(jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(valid.any(1), [True] + [False] * 7)


def test_sequences_are_groups_on_the_device_that_holds_them():
    groups = Groups(rows=5, positions=2, group="sequence", data=1, expert=2)
    assert groups.count == 5
    np.testing.assert_array_equal(groups.ep_rank, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(groups.split(jnp.zeros((5, 2, 7))).shape, [5, 2, 7])


def test_the_batch_is_one_group_whose_tokens_know_their_device():
    groups = Groups(rows=3, positions=2, group="batch", data=1, expert=3)
    np.testing.assert_array_equal(groups.ep_rank, [[0, 0, 1, 1, 2, 2]])
    np.testing.assert_array_equal(groups.index, [0])
    assert groups.split(jnp.zeros((3, 2))).shape == (1, 6)


def test_mesh_sizes():
    assert mesh_sizes(8) == (1, 8)
    assert mesh_sizes((2, 4)) == (2, 4)
    for wrong in (0, -1, (2, 0), True):
        with pytest.raises(PolicyError, match="virtual_devices"):
            mesh_sizes(wrong)
