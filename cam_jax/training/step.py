"""One optimiser step: loss, gradient, AdamW."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.load_stats import LoadStats
from cam_jax.models.config import DecoderConfig
from cam_jax.models.decoder import forward, init_params, logits
from cam_jax.training.settings import TrainDemo


class State(NamedTuple):
    """What a checkpoint holds. ``step`` counts the steps that are done."""

    params: Any
    optimizer: optax.OptState
    step: Int[Array, ""]


class Report(NamedTuple):
    """Of one step: mean cross entropy in nats, the gradient's norm before clipping, routing."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    load: LoadStats


def optimizer(settings: TrainDemo) -> optax.GradientTransformation:
    """AdamW under a warm-up and a cosine, after clipping; norm weights do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_lr,
        warmup_steps=min(settings.warmup, settings.steps - 1),
        decay_steps=settings.steps,
        end_value=settings.final_lr,
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.98,
            weight_decay=settings.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(_decays, params),
        ),
    )


def _decays(path: tuple[Any, ...], _: Array) -> bool:
    # By name: stacked over layers a norm's weight has two axes, like a matrix.
    return not jax.tree_util.keystr(path).rstrip("']").endswith("norm")


def policy(settings: TrainDemo) -> CapacityPolicy | None:
    """The ceiling during training."""
    if settings.capacity_factor is None:
        return None
    return CapacityPolicy(capacity_factor=settings.capacity_factor, metric="score", group="batch")


def first_state(settings: TrainDemo, config: DecoderConfig) -> State:
    """The state before the first step."""
    params = init_params(config, jax.random.key(settings.seed), jnp.float32)
    return State(params, optimizer(settings).init(params), jnp.zeros((), jnp.int32))


def cross_entropy(
    scores: Float[Array, "*batch V"], targets: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """-log p(target) in nats, in float32.

    The target's score is picked by comparison: its gradient then fuses with the softmax, where
    that of an indexed read would be a scatter.
    """
    tokens = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1)
    picked = jnp.where(tokens == targets[..., None], scores, 0.0).sum(-1)
    return jax.nn.logsumexp(scores, axis=-1) - picked


@partial(jax.jit, static_argnames=("settings", "config"), donate_argnames="state")
def train_step(
    settings: TrainDemo,
    config: DecoderConfig,
    state: State,
    inputs: Int[Array, "B S"],
    targets: Int[Array, "B S"],
) -> tuple[State, Report]:
    """The state after one step on a batch. ``state`` is donated."""

    def loss_of(params: Any) -> tuple[Array, LoadStats]:
        hidden, _, load = forward(config, params, inputs, policy=policy(settings), unroll=True)
        assert load is not None  # None is for models without MoE layers
        return cross_entropy(logits(config, params, hidden), targets).mean(), load

    (loss, load), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, moments = optimizer(settings).update(gradients, state.optimizer, state.params)
    report = Report(loss, optax.tree.norm(gradients), load)
    return State(optax.apply_updates(state.params, updates), moments, state.step + 1), report
