"""One decoder layer: attention, then experts or a dense MLP, each behind a norm, both residual."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import ExpertWeights, MoEParams, SharedExpert
from cam_jax.load_stats import LoadStats
from cam_jax.mesh import TENSOR
from cam_jax.models.attention import Attention, AttentionContext, Entries
from cam_jax.models.config import DecoderConfig, LayerKind, MLAConfig
from cam_jax.models.mla import LatentAttention
from cam_jax.models.norm import linear, rms_norm
from cam_jax.models.partition import constrain
from cam_jax.moe import moe_layer
from cam_jax.quantized import QuantizedWeight, quantize


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """What all layers share in one call: attention's tables, and how tokens reach experts.

    Attributes:
        attention: positions and rotary tables.
        valid: [B, S] bool, false at padding.
        priority: [B, S] int32 or None, larger is kept first.
        mesh, virtual_devices, transport: as `cam_jax.moe_layer` takes them.
    """

    attention: AttentionContext
    valid: Bool[Array, "B S"]
    priority: Int[Array, "B S"] | None
    mesh: Mesh | None
    virtual_devices: int | tuple[int, int]
    transport: str | None


class Experts(nnx.Module):
    """The routed experts' weights: gate, up [E, F, D] and down [E, D, F].

    If quantised these are int8, beside float32 gate_scale, up_scale [E, F] and down_scale [E, D].
    """

    def __init__(self, weights: ExpertWeights) -> None:
        for name in ("gate", "up", "down"):
            weight = getattr(weights, name)
            if isinstance(weight, QuantizedWeight):
                setattr(self, f"{name}_scale", nnx.Param(weight.scale))
                weight = weight.values
            setattr(self, name, nnx.Param(weight))

    def weights(self) -> ExpertWeights:
        """As `cam_jax.moe_layer` takes them."""

        def weight(name: str) -> Any:
            values, scale = getattr(self, name)[...], getattr(self, f"{name}_scale", None)
            return values if scale is None else QuantizedWeight(values=values, scale=scale[...])

        return ExpertWeights(gate=weight("gate"), up=weight("up"), down=weight("down"))


class Shared(nnx.Module):
    """The shared expert's weights: gate, up [F, D], down [D, F], and router [1, D] if gated."""

    def __init__(
        self, gate: jax.Array, up: jax.Array, down: jax.Array, router: jax.Array | None
    ) -> None:
        self.gate = nnx.Param(gate)
        self.up = nnx.Param(up)
        self.down = nnx.Param(down)
        self.router = None if router is None else nnx.Param(router)

    def weights(self) -> SharedExpert:
        """As `cam_jax.moe_layer` takes them."""
        return SharedExpert(
            gate=self.gate[...],
            up=self.up[...],
            down=self.down[...],
            router=None if self.router is None else self.router[...],
        )


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x). Parameters gate, up [F, D] and down [D, F]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        draw = nnx.initializers.normal(config.initializer_range)
        inner, outer = config.mlp_size, config.hidden_size
        self.gate = nnx.Param(draw(rngs.params(), (inner, outer), dtype))
        self.up = nnx.Param(draw(rngs.params(), (inner, outer), dtype))
        self.down = nnx.Param(draw(rngs.params(), (outer, inner), dtype))

    def __call__(self, x: Float[Array, "B S D"], mesh: Mesh | None) -> Float[Array, "B S D"]:
        """Applies the MLP to every position."""
        hidden = jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...])
        return constrain(linear(constrain(hidden, mesh, None, TENSOR), self.down[...]), mesh)


class MoE(nnx.Module):
    """Router, experts and, where the family has them, selection bias and shared expert.

    Parameters: router [E, D]; bias [E] float32; experts.{gate, up} [E, F, D], experts.down
    [E, D, F], with scales if int8; shared.{gate, up, down, router}.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        moe = config.moe
        assert moe is not None  # DecoderConfig refuses MoE layers without it
        self.config = moe
        draw = nnx.initializers.normal(config.initializer_range)

        def weight(*shape: int) -> jax.Array:
            return draw(rngs.params(), shape, dtype)

        count, inner, outer = moe.router.num_experts, moe.expert_size, config.hidden_size
        self.router = nnx.Param(weight(count, outer))
        if moe.selection_bias:
            self.bias = nnx.Param(jnp.zeros(count, jnp.float32))
        experts = ExpertWeights(
            gate=weight(count, inner, outer),
            up=weight(count, inner, outer),
            down=weight(count, outer, inner),
        )
        self.experts = Experts(jax.tree.map(quantize, experts) if moe.quantized else experts)
        if moe.shared_size:
            self.shared = Shared(
                gate=weight(moe.shared_size, outer),
                up=weight(moe.shared_size, outer),
                down=weight(outer, moe.shared_size),
                router=weight(1, outer) if moe.shared_gated else None,
            )

    def parameters(self) -> MoEParams:
        """The parameters as `cam_jax.moe_layer` takes them."""
        return MoEParams(
            router=self.router[...],
            experts=self.experts.weights(),
            bias=self.bias[...] if self.config.selection_bias else None,
            shared=self.shared.weights() if self.config.shared_size else None,
        )

    def __call__(
        self,
        x: Float[Array, "B S D"],
        context: CallContext,
        *,
        policy: CapacityPolicy | None,
        layer: jax.Array | int,
    ) -> tuple[Float[Array, "B S D"], LoadStats]:
        """Sends each position to its experts; layer counts MoE layers."""
        return moe_layer(
            x,
            self.parameters(),
            self.config.router,
            policy,
            mesh=context.mesh,
            virtual_devices=context.virtual_devices,
            valid=context.valid,
            priority=context.priority,
            layer=layer,
            transport=context.transport,
        )


def make_attention(
    config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike
) -> Attention | LatentAttention:
    """The attention module that the configuration describes."""
    latent = isinstance(config.attention, MLAConfig)
    return (LatentAttention if latent else Attention)(config, rngs=rngs, dtype=dtype)


def cache_entries(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Per array that attention caches, its heads and features."""
    if isinstance(config.attention, MLAConfig):
        return LatentAttention.cache_entries(config.attention)
    return Attention.cache_entries(config.attention)


class Block(nnx.Module):
    """One layer. Parameters: attn_norm [D], attn.*, ffn_norm [D], and moe.* or mlp.*."""

    def __init__(
        self, config: DecoderConfig, kind: LayerKind, *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        self.kind = kind
        self.eps = config.norm_eps
        self.attn_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.attn = make_attention(config, rngs=rngs, dtype=dtype)
        self.ffn_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        if kind.moe:
            self.moe = MoE(config, rngs=rngs, dtype=dtype)
        else:
            self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        context: CallContext,
        *,
        entries: Entries | None,
        policy: CapacityPolicy | None,
        layer: jax.Array | int,
        moe_layer_index: jax.Array | int,
    ) -> tuple[Float[Array, "B S D"], Entries | None, LoadStats | None]:
        """Applies layer `layer`; its statistics are None for a dense layer."""
        attended, entries = self.attn(
            rms_norm(x, self.attn_norm[...], self.eps),
            context.attention,
            window=self.kind.window,
            entries=entries,
            layer=layer,
        )
        x = x + attended
        y = rms_norm(x, self.ffn_norm[...], self.eps)
        load = None
        if self.kind.moe:
            y, load = self.moe(y, context, policy=policy, layer=moe_layer_index)
        else:
            y = self.mlp(y, context.mesh)
        return x + y, entries, load
