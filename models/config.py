"""What a decoder is made of: one frozen, hashable description that every family fills in.

A family differs from another by these values, not by code. Layers that are equal (same feed-forward
kind, same window) and adjacent form a *segment*, the unit that is stacked and scanned.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from cam_jax.errors import ConfigError
from cam_jax.models.rope import RopeConfig
from cam_jax.router import RouterConfig

QKNorm = Literal["full", "head"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head attention with grouped keys and values.

    Attributes:
        num_heads: H, query heads.
        num_kv_heads: key and value heads; H is a multiple of it.
        head_dim: features of a head.
        scale: what scores are multiplied by.
        qkv_bias, out_bias: whether the projections carry biases.
        qk_norm: None, "full" (RMSNorm over all heads together, before the head split: OLMoE) or
            "head" (RMSNorm over each head's features: Qwen3).
        clip: absolute bound of query, key and value after their norm (OLMoE's clip_qkv), or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        num_heads: H.
        query_rank: features of the queries' latent (q_lora_rank), None for one projection.
        latent_rank: features of the latent that keys and values share (kv_lora_rank).
        nope_dim, rope_dim: features of a query and key head without and with rotation; the rotated
            part of the key is one for all heads.
        value_dim: features of a value head.
        scale: what scores are multiplied by, YaRN's mscale squared included.
        bias: whether the projections into latents and the output projection carry biases.
    """

    num_heads: int
    query_rank: int | None
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The experts of a layer.

    Attributes:
        expert_size: F, hidden features of one routed expert.
        router: how experts are chosen and weighted.
        selection_bias: whether a bias enters the choice (never the weight: DeepSeek-V3).
        shared_size: hidden features of the shared expert, 0 for none.
        shared_gated: whether the shared expert is multiplied by a sigmoid gate (Qwen2-MoE).
        quantized: "int8" if the routed experts' weights are int8 with scales
            (`cam_jax.quantized`), None if they are plain numbers.
    """

    expert_size: int
    router: RouterConfig
    selection_bias: bool = False
    shared_size: int = 0
    shared_gated: bool = False
    quantized: Literal["int8"] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What tells one layer of a decoder from another.

    Attributes:
        moe: experts if true, one dense MLP if not.
        window: sliding attention window in tokens, None for full attention.
    """

    moe: bool = True
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of `length` equal layers from layer `start`; its MoE layers count from `moe_start`."""

    start: int
    length: int
    moe_start: int
    kind: LayerKind


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that fixes a decoder's shapes and arithmetic. Hashable: a static argument of jit.

    Attributes:
        family: name of the family, the key of its weight table.
        vocab_size: V.
        hidden_size: D.
        max_positions: the most tokens a row may hold, prompt and continuation together.
        norm_eps: epsilon of the RMSNorms.
        tie_embeddings: whether the output projection is the embedding table.
        attention: the attention of all layers.
        rope: the rotary embedding of all layers.
        layers: one kind per layer.
        moe: the experts of the MoE layers, None if there is no such layer.
        mlp_size: hidden features of the dense layers, 0 if there is no such layer.
        initializer_range: standard deviation of freshly drawn weights.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    attention: AttentionConfig | MLAConfig
    rope: RopeConfig
    layers: tuple[LayerKind, ...]
    moe: MoEConfig | None = None
    mlp_size: int = 0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_hidden_layers must be at least 1")
        if any(kind.moe for kind in self.layers) and self.moe is None:
            raise ConfigError("layers ask for experts, but moe is None")
        if any(not kind.moe for kind in self.layers) and self.mlp_size < 1:
            raise ConfigError("layers ask for a dense MLP, but mlp_size is 0")

    def with_int8_experts(self) -> "DecoderConfig":
        """The same decoder with the routed experts' weights as int8.

        Raises:
            ConfigError: it has no experts.
        """
        if self.moe is None or not self.moe_layers:
            raise ConfigError(f"{self.family} without MoE layers has no expert to quantise")
        return replace(self, moe=replace(self.moe, quantized="int8"))

    @property
    def num_layers(self) -> int:
        """L, all layers."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts, in order; policies and LoadStats follow it."""
        return tuple(index for index, kind in enumerate(self.layers) if kind.moe)

    @property
    def num_moe_layers(self) -> int:
        """How many layers hold experts."""
        return len(self.moe_layers)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The maximal runs of equal layers, in order."""
        found = []
        start = moe_start = 0
        for kind, run in groupby(self.layers):
            length = len(tuple(run))
            found.append(Segment(start=start, length=length, moe_start=moe_start, kind=kind))
            start += length
            moe_start += length if kind.moe else 0
        return tuple(found)
