"""How tokens reach their experts and come back. A plan says who goes; a transport moves them.

One signature for all:

    transport(x [G, T, D], plan, experts) -> y [G, T, D]

``plan`` is a `RoutingPlan` whose leaves have a leading axis of G groups. The result is in the dtype
of ``x``; a token that no expert kept gets exactly 0, and no token's NaN reaches another's row.

G groups, T tokens of one group, E experts, C slots per expert and group, D features.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jax import lax
from jaxtyping import Array

from cam_jax.experts import ExpertWeights
from cam_jax.plan import RoutingPlan
from cam_jax.transports.all_gather import all_gather, gathered_dropless
from cam_jax.transports.all_to_all import all_to_all
from cam_jax.transports.dropless import dropless
from cam_jax.transports.einsum import einsum
from cam_jax.transports.gather import gather
from cam_jax.transports.ragged import ragged_dropless

Transport = Callable[[Array, RoutingPlan, ExpertWeights], Array]

TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {"einsum": einsum, "gather": gather, "dropless": dropless}
)


def mesh_dropless(x: Array, plan: RoutingPlan, experts: ExpertWeights) -> Array:
    """No ceiling on a mesh: a ragged all-to-all where there is one (TPU), else gathered tokens.

    The platform is that of the lowered program, so that a plan for a TPU is the TPU's.
    """
    return lax.platform_dependent(x, plan, experts, tpu=ragged_dropless, default=gathered_dropless)


# Inside shard_map: x and experts are one device's, as is the plan (all_gather: that of all tokens).
MESH_TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "dropless": mesh_dropless,
        "gathered": gathered_dropless,
        "ragged": ragged_dropless,
    }
)

__all__ = ["MESH_TRANSPORTS", "TRANSPORTS", "Transport", "dropless", "einsum", "gather"]
