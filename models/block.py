"""One decoder layer: attention, then experts or a dense MLP, each behind a norm and on the residual."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from cam_jax.capacity import CapacityPolicy
from cam_jax.experts import ExpertWeights, SharedExpert
from cam_jax.load_stats import LoadStats
from cam_jax.models.attention import Attention, AttentionContext, Entries
from cam_jax.models.config import DecoderConfig, LayerKind
from cam_jax.models.norm import linear, rms_norm
from cam_jax.moe import MoEParams, moe_layer


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
    mesh: Any
    virtual_devices: int | tuple[int, int]
    transport: str | None


class Weights(nnx.Module):
    """A named group of parameters without arithmetic of its own."""

    def __init__(self, **parameters: jax.Array) -> None:
        for name, value in parameters.items():
            setattr(self, name, nnx.Param(value))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x). Parameters gate, up [F, D] and down [D, F]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        draw = nnx.initializers.normal(config.initializer_range)
        inner, outer = config.mlp_size, config.hidden_size
        self.gate = nnx.Param(draw(rngs.params(), (inner, outer), dtype))
        self.up = nnx.Param(draw(rngs.params(), (inner, outer), dtype))
        self.down = nnx.Param(draw(rngs.params(), (outer, inner), dtype))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Applies the MLP to every position."""
        hidden = jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...])
        return linear(hidden, self.down[...])


class MoE(nnx.Module):
    """Router, experts and, where the family has them, selection bias and shared expert.

    Parameters: router [E, D]; bias [E] float32; experts.{gate, up} [E, F, D], experts.down
    [E, D, F]; shared.{gate, up, down, router}.
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
        self.experts = Weights(
            gate=weight(count, inner, outer),
            up=weight(count, inner, outer),
            down=weight(count, outer, inner),
        )
        if moe.shared_size:
            shared = {
                "gate": weight(moe.shared_size, outer),
                "up": weight(moe.shared_size, outer),
                "down": weight(outer, moe.shared_size),
            }
            if moe.shared_gated:
                shared["router"] = weight(1, outer)
            self.shared = Weights(**shared)

    def parameters(self) -> MoEParams:
        """The parameters as `cam_jax.moe_layer` takes them."""
        shared = None
        if self.config.shared_size:
            gated = self.config.shared_gated
            shared = SharedExpert(
                gate=self.shared.gate[...],
                up=self.shared.up[...],
                down=self.shared.down[...],
                router=self.shared.router[...] if gated else None,
            )
        return MoEParams(
            router=self.router[...],
            experts=ExpertWeights(
                gate=self.experts.gate[...],
                up=self.experts.up[...],
                down=self.experts.down[...],
            ),
            bias=self.bias[...] if self.config.selection_bias else None,
            shared=shared,
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


class Block(nnx.Module):
    """One layer. Parameters: attn_norm [D], attn.*, ffn_norm [D], and moe.* or mlp.*."""

    def __init__(
        self, config: DecoderConfig, kind: LayerKind, *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        self.kind = kind
        self.eps = config.norm_eps
        self.attn_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.attn = Attention(config, rngs=rngs, dtype=dtype)
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
            y = self.mlp(y)
        return x + y, entries, load
