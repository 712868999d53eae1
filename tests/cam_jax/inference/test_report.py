"""Routing reports: figures by hand, means, the worst layer."""

import numpy as np
import pytest

from cam_jax import CapacityPolicy, LoadStats
from cam_jax.inference import RoutingReport
from tests.cam_jax.inference import tiny


def stats(**changes) -> LoadStats:
    """Two layers, four experts, K = 2, 6 tokens: 12 assignments, 3 per expert on average."""
    zero = np.zeros(2, np.int32)
    given = {
        "demand": [[6, 3, 2, 1], [3, 3, 3, 3]],
        "load": [[4, 3, 2, 1], [3, 3, 3, 3]],
        "tokens": [6, 6],
        "capacity": [4, 4],
        "slots": [16, 16],
        "dropped_capacity": [2, 0],
        "unserved_tokens": [1, 0],
    }
    names = (
        "dropped_max_experts dropped_expert_drop dropped_nonfinite nonfinite_tokens expanded "
        "rerouted"
    )
    arrays = {name: np.array(v, np.int32) for name, v in (given | changes).items()}
    return LoadStats(**dict.fromkeys(names.split(), zero), **arrays, top_k=2)


def test_figures_by_hand():
    report = RoutingReport.of(stats(), layers=(1, 3), devices=2, notes=("one",))
    assert report.tokens == 6 and report.top_k == 2 and report.notes == ("one",)
    np.testing.assert_allclose(report.straggler_factor, [4 / 3, 1])
    np.testing.assert_allclose(report.demand_straggler_factor, [2, 1])
    np.testing.assert_allclose(report.device_straggler_factor, [7 / 6, 1])
    np.testing.assert_allclose(report.dropped_share, [2 / 12, 0])
    np.testing.assert_allclose(report.slot_use, [10 / 16, 12 / 16])
    assert report.dropped.tolist() == report.dropped_by_cause["capacity"].tolist() == [2, 0]
    assert set(report.dropped_by_cause) == {"capacity", "max_experts", "expert_drop", "nonfinite"}
    assert report.unserved_tokens.tolist() == [1, 0]


def test_the_mean_of_the_layers_and_the_worst_of_them():
    report = RoutingReport.of(stats(), layers=(1, 3), devices=2)
    assert report.worst_layer == 1
    assert report.worst == report.layer(0)
    assert report.mean.straggler_factor == pytest.approx((4 / 3 + 1) / 2)
    assert report.mean.device_straggler_factor == pytest.approx((7 / 6 + 1) / 2)
    assert report.mean.dropped_share == pytest.approx(1 / 12)
    assert report.mean.slot_use == pytest.approx(11 / 16)


def test_one_device_has_no_figure_by_device():
    report = RoutingReport.of(stats(), layers=(1, 3))
    assert report.device_straggler_factor is None
    assert report.mean.device_straggler_factor is report.worst.device_straggler_factor is None


def test_of_a_model():
    lm = tiny.model()
    policy = CapacityPolicy(capacity_factor=1.0)
    many = type(lm)(config=lm.config, params=lm.params, policy=policy, virtual_devices=(1, 3))
    ids, mask = tiny.padded(tiny.prompts(8, 5), "left")
    report = many.routing(ids, mask)
    assert report.layers == (0, 1) and report.demand.shape == report.load.shape == (2, 6)
    assert report.tokens == 13 and (report.demand.sum(axis=1) == 26).all()
    # Groups of 8 and of 5 tokens: ceil(2 * 8 / 6) = 3 and ceil(2 * 5 / 6) = 2 slots an expert.
    assert report.capacity.tolist() == [3, 3] and report.slots.tolist() == [30, 30]
    assert (report.load <= 5).all() and (report.load <= report.demand).all()
    assert (report.demand - report.load).sum(axis=1).tolist() == report.dropped.tolist()
    assert "2 rows fill 2 of the 3 groups" in report.notes[0]
    free = lm.routing(ids, mask)
    assert free.notes == () and not free.dropped.any()
    assert free.load.tolist() == free.demand.tolist()
