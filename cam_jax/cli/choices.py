"""Options that several commands share: the ceiling, and the mesh."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cam_jax.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from cam_jax.capacity import CapacityPolicy


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The ceiling on every expert's load; none without --capacity-factor or --capacity."""

    capacity_factor: float | None = None
    """γ: slots of an expert, in mean loads of its group."""
    capacity: int | None = None
    """Slots of an expert and group, instead of γ."""
    expand: str | None = None
    """Expanded Drop: "local", or the number m of best local experts."""
    metric: Literal["score", "first", "last", "random"] = "score"
    """Which tokens keep their slots."""
    scope: Literal["expert", "device"] = "expert"
    """What the ceiling holds for."""
    group: Literal["device", "sequence", "batch"] = "device"
    """Which tokens compete."""
    overflow: Literal["drop", "reroute", "fallback"] = "drop"
    """What becomes of what does not fit."""
    decode: Literal["exempt", "capped"] = "exempt"
    """Whether the ceiling holds in decode steps too."""

    def policy(self) -> "CapacityPolicy | None":
        """The policy, None if nothing was asked for.

        Raises:
            PolicyError: it cannot hold, or says how to drop without saying when.
            InputError: an ``expand`` that is neither "local" nor a number.
        """
        from cam_jax.capacity import CapacityPolicy
        from cam_jax.errors import PolicyError

        if self.capacity_factor is None and self.capacity is None:
            if self != PolicyOptions():
                raise PolicyError("there is no ceiling: add --capacity-factor or --capacity")
            return None
        return CapacityPolicy(
            capacity_factor=self.capacity_factor,
            capacity=self.capacity,
            expand=read_expand(self.expand),
            metric=self.metric,
            scope=self.scope,
            group=self.group,
            overflow=self.overflow,
            decode=self.decode,
        )


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """Devices: without any of these one device, or with several processes all on "expert"."""

    data: int | None = None
    """Copies of the experts."""
    expert: int | None = None
    """Devices that share the experts out; default: all that are left."""
    tensor: int | None = None
    """Devices that share each expert, the attention heads and the vocabulary."""

    def mesh(self) -> "Mesh | None":
        """The mesh, None for one device. JAX looks for its devices now.

        Raises:
            MeshError: a size below 1, or more devices than there are.
        """
        import jax

        from cam_jax.mesh import make_mesh

        if self == MeshOptions() and jax.process_count() == 1:
            return None
        return make_mesh(
            data=1 if self.data is None else self.data,
            expert=self.expert,
            tensor=1 if self.tensor is None else self.tensor,
        )


def read_expand(text: str | None) -> Literal["local"] | int | None:
    """What `CapacityPolicy` takes as ``expand``, from the command line.

    Raises:
        InputError: neither "local" nor a number.
    """
    if text is None:
        return None
    if text == "local":
        return "local"
    if not text.isascii() or not text.isdigit():
        raise InputError(f"--expand {text!r}: expected 'local' or a number of experts")
    return int(text)
