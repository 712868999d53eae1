"""Running a loaded model: logits, generation, scores, routing reports."""

from cam_jax.inference.generate import Generation
from cam_jax.inference.language_model import LanguageModel
from cam_jax.inference.loading import load
from cam_jax.inference.report import RoutingReport, RoutingSummary
from cam_jax.inference.special import SpecialTokens

__all__ = [
    "Generation",
    "LanguageModel",
    "RoutingReport",
    "RoutingSummary",
    "SpecialTokens",
    "load",
]
