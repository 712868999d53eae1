"""What a checkpoint is, from its config and headers alone."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cam_jax.conversion.arrays import NAMES, load_dtype
from cam_jax.conversion.either import OpenAny, layout_of, open_any
from cam_jax.conversion.footprint import Footprint, MeshSizes, footprint, without_layer
from cam_jax.conversion.orbax import OpenOrbax
from cam_jax.models.config import AttentionConfig, DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A checkpoint's description.

    Attributes:
        directory, format: where, and "hf" or "orbax".
        layout: how experts are stored ("per_expert", "fused").
        config: the decoder.
        attention: kind and sizes in words.
        parameters, active: all, and those that one token meets (its top-k experts).
        dtypes: type -> parameters stored in it.
        weight_bytes, disk_bytes: of the weights, and of all files of the directory.
        ignored: tensor -> why the model does not need it.
        companions: tokenizer and generation files that are there.
        memory: what one device holds on the mesh that was asked for.
    """

    directory: Path
    format: str
    layout: str
    config: DecoderConfig
    attention: str
    parameters: int
    active: int
    dtypes: Mapping[str, int]
    weight_bytes: int
    disk_bytes: int
    ignored: Mapping[str, str]
    companions: tuple[str, ...]
    memory: Footprint


def inspect(
    path_or_repo_id: str | Path,
    *,
    mesh: MeshSizes | None = None,
    dtype: str | np.dtype | type | None = None,
    revision: str | None = None,
) -> Summary:
    """Describe a checkpoint of either kind; no weight is read.

    Args:
        mesh: sizes of the mesh that memory is told for; one device when None.
        dtype: the type it would be loaded in; None keeps the checkpoint's.

    Raises:
        CheckpointError, ConfigError: as `open_any`.
        MeshError: a mesh that the model cannot be divided over.
    """
    wanted = load_dtype(dtype)
    opened = open_any(path_or_repo_id, revision=revision)
    config = opened.config
    stored = _stored(opened)
    types = {path: opened_type(opened, path, wanted) for path in stored}
    sizes = {path: math.prod(shape) for path, (shape, _) in stored.items()}
    kept: Counter[str] = Counter()
    for path, (_, kind) in stored.items():
        kept[NAMES[kind]] += sizes[path]
    return Summary(
        directory=opened.directory,
        format="orbax" if isinstance(opened, OpenOrbax) else "hf",
        layout=layout_of(opened),
        config=config,
        attention=_attention(config),
        parameters=sum(sizes.values()),
        active=_active(config, sizes),
        dtypes=dict(kept.most_common()),
        weight_bytes=sum(sizes[path] * kind.itemsize for path, (_, kind) in stored.items()),
        disk_bytes=sum(f.stat().st_size for f in opened.directory.rglob("*") if f.is_file()),
        ignored={} if isinstance(opened, OpenOrbax) else dict(opened.plan.ignored),
        companions=tuple(opened.companions),
        # Keys and values have the type of the embedding.
        memory=footprint(config, types, mesh or MeshSizes(), cache=types["embed"]),
    )


def opened_type(opened: OpenAny, path: str, wanted: np.dtype | None) -> np.dtype:
    """The type that a leaf would be loaded in."""
    source = opened if isinstance(opened, OpenOrbax) else opened.plan
    return source.load_type(path, wanted)


def _stored(opened: OpenAny) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    if isinstance(opened, OpenOrbax):
        return {path: (leaf.shape, leaf.dtype) for path, leaf in opened.leaves.items()}
    plan = opened.plan
    return {path: (shape, plan.dtypes[path]) for path, shape in plan.shapes.items()}


def _active(config: DecoderConfig, sizes: Mapping[str, int]) -> int:
    """Parameters that one token meets: of the routed experts its top-k only."""
    if config.moe is None:
        return sum(sizes.values())
    router = config.moe.router
    return sum(
        size * router.top_k // router.num_experts
        if without_layer(path).startswith("moe.experts.")
        else size
        for path, size in sizes.items()
    )


def _attention(config: DecoderConfig) -> str:
    a = config.attention
    if not isinstance(a, AttentionConfig):
        query = "whole queries" if a.query_rank is None else f"query latent {a.query_rank}"
        return f"latent (MLA), {a.num_heads} heads, latent {a.latent_rank}, {query}"
    kind = {a.num_heads: "multi-head", 1: "multi-query"}.get(a.num_kv_heads, "grouped-query")
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    tail = f", window {', '.join(map(str, windows))}" if windows else ""
    return f"{kind}, {a.num_heads} heads, {a.num_kv_heads} of keys, {a.head_dim} features{tail}"
