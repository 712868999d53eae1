"""Capacity-aware Mixture-of-Experts inference in JAX: a static ceiling on every expert's load."""

from cam_jax.capacity import CapacityPolicy, expert_capacity
from cam_jax.load import LoadStats
from cam_jax.plan import RoutingPlan
from cam_jax.router import RouterConfig, Selection, select, select_from_scores
from cam_jax.routing import route

__all__ = [
    "CapacityPolicy",
    "LoadStats",
    "RouterConfig",
    "RoutingPlan",
    "Selection",
    "expert_capacity",
    "route",
    "select",
    "select_from_scores",
]
