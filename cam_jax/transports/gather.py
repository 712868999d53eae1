"""One device, with a ceiling: slot index -> gather, one batched matmul, gather-combine.

Time and memory are linear in the slots, E·C per group, hence in T.
"""

from jaxtyping import Array, Float

from cam_jax.dispatch import combine, dispatch, merge_groups
from cam_jax.experts import ExpertWeights, expert_buffers
from cam_jax.plan import RoutingPlan


def gather(
    x: Float[Array, "G T D"], plan: RoutingPlan, experts: ExpertWeights
) -> Float[Array, "G T D"]:
    """See `cam_jax.transports`. All groups' slots of an expert share one matmul."""
    merged = merge_groups(plan)
    y_e = expert_buffers(dispatch(x.reshape(-1, x.shape[-1]), merged), experts)
    return combine(y_e, merged).reshape(x.shape)
