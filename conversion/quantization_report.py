"""How far quantised weights are from those they were made of."""

import math
from dataclasses import dataclass

from cam_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LeafError:
    """The error of one layer's gate, up or down matrices, all experts together.

    Attributes:
        layer: number of the decoder layer.
        name: "gate", "up" or "down".
        error: norm of w - q, over all elements.
        norm: norm of w.
        largest: the largest |w - q| of one element.
    """

    layer: int
    name: str
    error: float
    norm: float
    largest: float

    @property
    def relative(self) -> float:
        """Relative RMS error, ||w - q|| / ||w||; 0 for weights that are all 0."""
        return self.error / self.norm if self.norm else 0.0


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """Errors of int8 experts, measured while they were made; `str` gives the short form.

    On a mesh that spans processes they are those of the experts that this process's devices hold.

    Attributes:
        leaves: per layer and name, in the order of the layers.
    """

    leaves: tuple[LeafError, ...]

    def relative(self, name: str | None = None) -> float:
        """Relative RMS error over all layers, of one of "gate", "up", "down" or of all three.

        Raises:
            InputError: another name.
        """
        own = [leaf for leaf in self.leaves if name in (None, leaf.name)]
        if not own:
            raise InputError(f"name={name!r}: expected 'gate', 'up', 'down' or None")
        norm = math.hypot(*(leaf.norm for leaf in own))
        return math.hypot(*(leaf.error for leaf in own)) / norm if norm else 0.0

    @property
    def worst(self) -> LeafError:
        """The one with the largest relative error."""
        return max(self.leaves, key=lambda leaf: leaf.relative)

    @property
    def largest(self) -> float:
        """The largest |w - q| of all."""
        return max(leaf.largest for leaf in self.leaves)

    @property
    def notes(self) -> tuple[str, ...]:
        """The report in two sentences."""
        each = ", ".join(f"{name} {self.relative(name):.2%}" for name in ("gate", "up", "down"))
        worst = self.worst
        return (
            f"int8 experts: relative RMS error of the weights {self.relative():.2%} ({each}), "
            f"largest error of one {self.largest:.2g}",
            f"worst: {worst.name} of layer {worst.layer}, {worst.relative:.2%}",
        )

    def __str__(self) -> str:
        return "; ".join(self.notes)
