"""Load statistics: hand-computed shares and straggler factors, and sums over groups."""

import jax
import jax.numpy as jnp
import numpy as np

from cam_jax.load_stats import LoadStats, device_counts


def stats(demand, load, *, tokens, capacity=4, slots=16, dropped=0, nonfinite=0, top_k=2):
    zero = jnp.int32(0)
    return LoadStats(
        demand=jnp.array(demand, jnp.int32),
        load=jnp.array(load, jnp.int32),
        tokens=jnp.int32(tokens),
        capacity=jnp.int32(capacity),
        slots=jnp.int32(slots),
        dropped_capacity=jnp.int32(dropped),
        dropped_max_experts=zero,
        dropped_expert_drop=zero,
        dropped_nonfinite=jnp.int32(nonfinite),
        nonfinite_tokens=zero,
        unserved_tokens=zero,
        expanded=zero,
        rerouted=zero,
        top_k=top_k,
    )


def test_shares_and_straggler_factor():
    one = stats([8, 4, 3, 1], [4, 4, 3, 1], tokens=8, dropped=4)
    assert float(one.dropped_share) == 4 / 16
    assert float(one.slot_use) == 12 / 16
    assert float(one.straggler()) == 4 / (2 * 8 / 4)
    assert float(one.straggler(of="demand")) == 8 / (2 * 8 / 4)
    # two devices hold 8 and 4 kept assignments; the mean of what was asked is 8
    assert float(one.straggler(devices=2)) == 8 / 8
    assert float(one.straggler(devices=2, of="demand")) == 12 / 8


def test_nonfinite_assignments_count_as_asked_for():
    assert float(stats([4, 2], [4, 2], tokens=4, nonfinite=2).dropped_share) == 2 / 8


def test_nothing_asked_for_divides_by_nothing():
    empty = stats([0, 0], [0, 0], tokens=0, slots=0)
    assert [float(empty.dropped_share), float(empty.slot_use), float(empty.straggler())] == [
        0,
        0,
        0,
    ]


def test_sum_adds_groups_and_keeps_the_largest_capacity():
    groups = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        stats([3, 1], [2, 1], tokens=2, capacity=2, slots=4, dropped=1),
        stats([1, 5], [1, 3], tokens=3, capacity=3, slots=6, dropped=2),
    )
    total = groups.sum()
    assert np.array_equal(total.demand, [4, 6])
    assert np.array_equal(total.load, [3, 4])
    assert (int(total.tokens), int(total.capacity), int(total.slots)) == (5, 3, 10)
    assert int(total.dropped) == 3
    assert np.allclose(groups.dropped_share, [1 / 4, 2 / 6])


def test_devices_hold_consecutive_blocks_also_when_they_do_not_divide():
    counts = jnp.array([[1, 2, 3, 4, 5, 6, 7]])
    assert np.array_equal(device_counts(counts, 4), [[3, 7, 11, 7]])
    assert np.array_equal(device_counts(counts, 7), counts)
