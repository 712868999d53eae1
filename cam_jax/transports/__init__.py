"""How tokens reach their experts and come back. A plan says who goes; a transport moves them.

One signature for all:

    transport(x [G, T, D], plan, experts) -> y [G, T, D]

``plan`` is a `RoutingPlan` whose leaves have a leading axis of G groups. The result is in the dtype
of ``x``; a token that no expert kept gets exactly 0, and no token's NaN reaches another's row.

G groups, T tokens of one group, E experts, C slots per expert and group, D features.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxtyping import Array

from cam_jax.experts import ExpertWeights
from cam_jax.plan import RoutingPlan
from cam_jax.transports.dropless import dropless
from cam_jax.transports.einsum import einsum
from cam_jax.transports.gather import gather

Transport = Callable[[Array, RoutingPlan, ExpertWeights], Array]

TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {"einsum": einsum, "gather": gather, "dropless": dropless}
)

__all__ = ["TRANSPORTS", "Transport", "dropless", "einsum", "gather"]
