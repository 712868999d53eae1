"""How a transport's temporary memory and time grow with the number of tokens, on one device."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import ExpertWeights, MoEParams
from cam_jax.moe import moe_layer
from cam_jax.router import RouterConfig


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer's sizes: E experts, K per token, D model and F hidden features."""

    num_experts: int = 64
    top_k: int = 8
    features: int = 128
    hidden: int = 64


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One transport at one size.

    Attributes:
        transport: its name.
        tokens: T, one group.
        temporary_bytes: the compiled program's scratch memory (`memory_analysis`), which is
            allocated at once; exact, not sampled.
        seconds: median of ``repeats`` calls, compilation excluded; None if it was not run.
    """

    transport: str
    tokens: int
    temporary_bytes: int
    seconds: float | None


def random_layer(shape: LayerShape, *, seed: int = 0) -> MoEParams:
    """Float32 weights of one layer, scaled to keep activations near 1."""
    keys = jax.random.split(jax.random.key(seed), 4)
    e, d, f = shape.num_experts, shape.features, shape.hidden
    return MoEParams(
        router=jax.random.normal(keys[0], (e, d)) / d**0.5,
        experts=ExpertWeights(
            gate=jax.random.normal(keys[1], (e, f, d)) / d**0.5,
            up=jax.random.normal(keys[2], (e, f, d)) / d**0.5,
            down=jax.random.normal(keys[3], (e, d, f)) / f**0.5,
        ),
    )


def measure_transport(
    transport: str,
    tokens: int,
    *,
    shape: LayerShape = LayerShape(),
    policy: CapacityPolicy | None = None,
    repeats: int = 5,
) -> Measurement:
    """Compiles one layer for ``tokens`` tokens and measures it.

    Args:
        repeats: timed calls; 0 compiles only (the one-hot form may not fit into memory).
    """
    router = RouterConfig(num_experts=shape.num_experts, top_k=shape.top_k)
    params = random_layer(shape)

    def layer(x: jax.Array, params: MoEParams) -> jax.Array:
        return moe_layer(x, params, router, policy, transport=transport)[0]

    x = jax.random.normal(jax.random.key(1), (tokens, shape.features))
    compiled = jax.jit(layer).lower(x, params).compile()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x, params))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend that cam_jax runs on reports it
    return Measurement(
        transport=transport,
        tokens=tokens,
        temporary_bytes=memory.temp_size_in_bytes,
        seconds=float(np.median(seconds)) if seconds else None,
    )


def growth(measurements: list[Measurement], of: str = "temporary_bytes") -> float:
    """The exponent p of a fit figure ~ T^p over the measured sizes: 1 is linear, 2 quadratic."""
    tokens = jnp.log(jnp.array([m.tokens for m in measurements], jnp.float32))
    figures = jnp.log(jnp.array([getattr(m, of) for m in measurements], jnp.float32))
    centred = tokens - tokens.mean()
    return float((centred * (figures - figures.mean())).sum() / (centred**2).sum())
