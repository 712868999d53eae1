"""What a TPU chip can do at most: public peak figures, each with its source.

Peaks, not what a program reaches: a roofline made from them is a lower bound of the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GB, _GIB = 10**9, 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip of a TPU generation.

    Attributes:
        name: as topologies spell it ("v5e").
        dimensions: of the torus or mesh its links form.
        hbm_bytes: capacity.
        hbm_rate: bytes per second between HBM and chip.
        flop_rate: bfloat16 FLOP per second of the matrix units, a multiply-add being two.
        links: ICI links, two per dimension.
        link_rate: bytes per second of one link in one direction. Where the source gives the sum of
            all links in both directions, that is sum / 2 / links.
        wrap: chips along a dimension from which on the generation closes it to a ring.
        source: where the figures stand.
    """

    name: str
    dimensions: int
    hbm_bytes: int
    hbm_rate: float
    flop_rate: float
    links: int
    link_rate: float
    wrap: int
    source: str

    @property
    def ici_rate(self) -> float:
        """Bytes per second that all links together send."""
        return self.links * self.link_rate


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(
                name="v4",
                dimensions=3,
                hbm_bytes=32 * _GIB,
                hbm_rate=1200e9,
                flop_rate=275e12,
                links=6,
                link_rate=50e9,
                wrap=4,
                source="cloud.google.com/tpu/docs/v4 (275 TFLOPs, 32 GiB, 1200 GB/s); "
                "arXiv 2304.01433 (6 links of 50 GB/s)",
            ),
            Chip(
                name="v5e",
                dimensions=2,
                hbm_bytes=16 * _GB,
                hbm_rate=819e9,
                flop_rate=197e12,
                links=4,
                link_rate=50e9,
                wrap=16,
                source="cloud.google.com/tpu/docs/v5e (197 TFLOPs, 16 GB, 819 GB/s, ICI 400 GB/s "
                "both ways together over 4 ports)",
            ),
            Chip(
                name="v5p",
                dimensions=3,
                hbm_bytes=95 * _GIB,
                hbm_rate=2765e9,
                flop_rate=459e12,
                links=6,
                link_rate=100e9,
                wrap=4,
                source="cloud.google.com/tpu/docs/v5p (459 TFLOPs, 95 GiB, 2765 GB/s, ICI "
                "1200 GB/s both ways together)",
            ),
            Chip(
                name="v6e",
                dimensions=2,
                hbm_bytes=32 * _GB,
                hbm_rate=1638e9,
                flop_rate=918e12,
                links=4,
                link_rate=100e9,
                wrap=16,
                source="cloud.google.com/tpu/docs/v6e (918 TFLOPs, 32 GB, 1638 GB/s, ICI 800 GB/s "
                "both ways together over 4 ports)",
            ),
        )
    }
)
