"""Capacity-aware Mixture-of-Experts inference in JAX: a static ceiling on every expert's load."""

from typing import TYPE_CHECKING, Any

from cam_jax.capacity import CapacityPolicy, expert_capacity
from cam_jax.dispatch import combine, dispatch
from cam_jax.experts import ExpertWeights, MoEParams, SharedExpert
from cam_jax.load_stats import LoadStats
from cam_jax.mesh import make_mesh
from cam_jax.moe import moe_layer
from cam_jax.plan import RoutingPlan
from cam_jax.router import RouterConfig, Selection, select, select_from_scores
from cam_jax.routing import route

if TYPE_CHECKING:
    from cam_jax.inference import LanguageModel, load

__all__ = [
    "CapacityPolicy",
    "ExpertWeights",
    "LanguageModel",
    "LoadStats",
    "MoEParams",
    "RouterConfig",
    "RoutingPlan",
    "Selection",
    "SharedExpert",
    "combine",
    "dispatch",
    "expert_capacity",
    "load",
    "make_mesh",
    "moe_layer",
    "route",
    "select",
    "select_from_scores",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cam-jax")
    # Models bring Flax and tokenizers along, which the routing core alone can do without.
    if name in ("LanguageModel", "load"):
        from cam_jax import inference

        return getattr(inference, name)
    raise AttributeError(f"module 'cam_jax' has no attribute {name!r}")
