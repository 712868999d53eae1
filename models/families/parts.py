"""What several families' configurations have in common, read the same way."""

from collections.abc import Sequence
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.config import AttentionConfig, DecoderConfig, LayerKind, MLAConfig, MoEConfig
from cam_jax.models.reading import Fields, head_size
from cam_jax.models.rope import RopeConfig
from cam_jax.router import RouterConfig


def refuse_unbuilt(fields: Fields) -> None:
    """Refuses activations that no family here computes with."""
    fields.only("hidden_act", "silu")


def assemble(
    fields: Fields,
    *,
    family: str,
    attention: AttentionConfig | MLAConfig,
    rope: RopeConfig,
    layers: Sequence[LayerKind],
    moe: MoEConfig,
) -> DecoderConfig:
    """The decoder, from its parts and the fields that all families spell alike."""
    dense = any(not kind.moe for kind in layers)
    return DecoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention=attention,
        rope=rope,
        layers=tuple(layers),
        moe=moe,
        mlp_size=fields.integer("intermediate_size") if dense else 0,
        initializer_range=fields.number("initializer_range", default=0.02),
    )


def read_attention(fields: Fields, **options: Any) -> AttentionConfig:
    """Heads with grouped keys; head_dim is D / H where the configuration does not give it."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", default=None)
    if dim is None:
        dim = head_size(fields, hidden=hidden, heads=heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=dim,
        scale=dim**-0.5,
        **options,
    )


def read_router(fields: Fields, *experts: str, **options: Any) -> RouterConfig:
    """The router, its number of experts under any of the names given.

    Raises:
        ConfigError: a token is to choose more experts than there are.
    """
    count = fields.integer(*experts)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        raise ConfigError(f"config: num_experts_per_tok={top_k} is more than {experts[0]}={count}")
    return RouterConfig(num_experts=count, top_k=top_k, **options)


def read_groups(fields: Fields, *, experts: int, top_k: int) -> tuple[int, int]:
    """(n_group, topk_group) of group-limited selection.

    Raises:
        ConfigError: groups of unequal size, or too few experts in the groups chosen.
    """
    groups, chosen = fields.integer("n_group"), fields.integer("topk_group")
    if experts % groups:
        raise ConfigError(f"config: n_group={groups} does not divide n_routed_experts={experts}")
    if chosen > groups:
        raise ConfigError(f"config: topk_group={chosen} is more than n_group={groups}")
    if top_k > chosen * (experts // groups):
        raise ConfigError(
            f"config: num_experts_per_tok={top_k} experts are not in topk_group={chosen} groups of "
            f"{experts // groups}"
        )
    return groups, chosen


def sparse_layers(fields: Fields, windows: Sequence[int | None]) -> tuple[LayerKind, ...]:
    """Qwen's layers: experts in each `decoder_sparse_step`-th one that is not in mlp_only_layers.

    Args:
        fields: the configuration.
        windows: each layer's sliding window.
    """
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    beyond = [layer for layer in dense if layer >= len(windows)]
    if beyond:
        raise ConfigError(
            f"config: mlp_only_layers names layers {beyond}, but there are only {len(windows)}"
        )
    return tuple(
        LayerKind(moe=layer not in dense and (layer + 1) % step == 0, window=window)
        for layer, window in enumerate(windows)
    )
