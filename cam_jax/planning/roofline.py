"""A lower bound of the time, from what a program does and the chip's peak figures.

Assumed, and said in every report:

- compute: the matrix units at their bfloat16 peak, products alone;
- HBM: every operand and result of every fused instruction once, at the peak rate;
- link: a ring (all-gather, reduce-scatter, all-reduce) or direct messages (all-to-all, permute)
  over all the links in the dimensions that a group spans, each byte taking up as many links as it
  has hops; latency, congestion and the edge of a mesh are left out;
- compute and HBM overlap, collectives with neither.

Real programs take longer. What one is for: what bounds the time, and what a ceiling changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cam_jax.planning.chips import Chip
from cam_jax.planning.collectives import RAGGED, Collective
from cam_jax.planning.costs import Costs

_RINGS = ("all-gather", "reduce-scatter", "all-reduce", "collective-broadcast")

Coordinates = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one run on each resource.

    Attributes:
        compute: matrix products.
        hbm: HBM traffic.
        link: collectives.
    """

    compute: float
    hbm: float
    link: float

    @property
    def estimate(self) -> float:
        """The slower of compute and HBM, then the collectives."""
        return max(self.compute, self.hbm) + self.link

    @property
    def bound(self) -> str:
        """Which resource takes the longest."""
        times = {"compute": self.compute, "HBM": self.hbm, "link": self.link}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True, kw_only=True)
class Network:
    """Where the chips of a mesh stand.

    Attributes:
        chip: their kind.
        places: coordinates in the pod, in mesh order.
        shape: of the slice.
        wraps: per dimension, whether it is a ring.
    """

    chip: Chip
    places: Coordinates
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def seconds(self, collective: Collective) -> float:
        """Of one run of a collective."""
        group = [self.places[number] for number in collective.group]
        links = sum(self._links(group, axis) for axis in range(len(self.shape)))
        if links == 0:
            return 0.0
        hops = self._hops(group, nearest=collective.kind in _RINGS)
        return collective.sent_bytes * hops / (links * self.chip.link_rate)

    def _links(self, group: Coordinates, axis: int) -> int:
        """Links of a chip along a dimension that lead to others of its group: 0, 1 or 2."""
        return min(len({place[axis] for place in group}), 3) - 1

    def _hops(self, group: Coordinates, *, nearest: bool) -> float:
        """Mean distance of a chip from the nearest one of its group, or from all the others."""
        total = 0.0
        for number, place in enumerate(group):
            away = [self._distance(place, g) for n, g in enumerate(group) if n != number]
            total += min(away) if nearest else sum(away) / len(away)
        return total / len(group)

    def _distance(self, here: tuple[int, ...], there: tuple[int, ...]) -> int:
        total = 0
        for size, wraps, a, b in zip(self.shape, self.wraps, here, there, strict=False):
            straight = abs(a - b)
            total += min(straight, size - straight) if wraps else straight
        return total


def roofline(
    costs: Costs, network: Network, *, grouped_share: float = 1.0, load: float = 1.0
) -> Roofline:
    """What the chip's peaks allow.

    Args:
        costs: of the program.
        network: what it runs on.
        grouped_share: rows that grouped products really have, of those they are compiled for.
        load: what the busiest device gets in ragged exchanges, in means.
    """
    flops = costs.flops - costs.grouped_flops * (1.0 - grouped_share)
    return Roofline(
        compute=flops / network.chip.flop_rate,
        hbm=costs.hbm_bytes / network.chip.hbm_rate,
        link=sum(
            (
                c.count * network.seconds(c) * (load if c.kind == RAGGED else 1.0)
                for c in costs.collectives
            ),
            0.0,
        ),
    )
