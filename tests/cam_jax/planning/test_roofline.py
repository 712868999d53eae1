"""Times by hand."""

import dataclasses

import pytest

from cam_jax.planning.chips import CHIPS
from cam_jax.planning.collectives import Collective
from cam_jax.planning.costs import Costs
from cam_jax.planning.roofline import Network, roofline

V5E = CHIPS["v5e"]
# 4 x 4, rows first.
GRID = Network(
    chip=V5E,
    places=[(x, y, 0) for x in range(4) for y in range(4)],
    shape=(4, 4),
    wraps=(False, False),
)
ROW, BOTH, ALL = (0, 1, 2, 3), (0, 1), tuple(range(16))


def among(kind, group):
    return Collective(kind=kind, dtype="bf16", bytes=1e9, group=group)


@pytest.mark.parametrize(
    ("kind", "group", "links", "hops"),
    [
        ("all-gather", ROW, 2, 1),  # neighbours in a line: both directions of one dimension
        ("all-gather", BOTH, 1, 1),  # two chips: one link leads to the other
        ("all-gather", (0, 2), 1, 2),  # every other chip
        ("all-gather", ALL, 4, 1),
        ("all-to-all", ROW, 2, 5 / 3),  # mean distance of two different places of 0..3
        ("all-to-all", ALL, 4, 2 * 1.25 * 16 / 15),  # and in the plane
        ("all-gather", (0,), 0, 0),
    ],
)
def test_links_and_hops(kind, group, links, hops):
    collective = among(kind, group)
    seconds = GRID.seconds(collective)
    if links == 0:
        assert seconds == 0
        return
    sent = 1e9 * (len(group) - 1) / len(group)
    assert seconds == pytest.approx(sent * hops / (links * 50e9))


def test_a_ring_shortens_the_way():
    ring = dataclasses.replace(GRID, wraps=(True, True))
    assert ring.seconds(among("all-to-all", ROW)) == pytest.approx(0.75e9 * (4 / 3) / (2 * 50e9))


def test_all_three_resources():
    costs = Costs(
        flops=197e12,
        grouped_flops=100e12,
        hbm_bytes=819e9 / 4,
        collectives=(dataclasses.replace(among("all-gather", ROW), count=10),),
    )
    found = roofline(costs, GRID)
    assert found.compute == pytest.approx(1.0)
    assert found.hbm == pytest.approx(0.25)
    assert found.link == pytest.approx(10 * 0.75e9 / 100e9)
    assert found.estimate == pytest.approx(1.0 + 0.075)
    assert found.bound == "compute"
    # Half of the rows of grouped matmuls are real.
    assert roofline(costs, GRID, grouped_share=0.5).compute == pytest.approx(147 / 197)


def test_a_ragged_exchange_follows_the_load():
    costs = Costs(collectives=(among("ragged-all-to-all", ROW), among("all-to-all", ROW)))
    balanced = roofline(costs, GRID).link
    assert roofline(costs, GRID, load=3.0).link == pytest.approx(2 * balanced)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_chips_are_consistent(chip):
    assert chip.links == 2 * chip.dimensions
    assert chip.ici_rate == chip.links * chip.link_rate
    assert "cloud.google.com/tpu/docs" in chip.source
    # Chips do between 100 and 600 FLOP in the time of one byte from HBM, links are slower yet.
    assert 100 < chip.flop_rate / chip.hbm_rate < 600
    assert chip.ici_rate < chip.hbm_rate < 1e13
