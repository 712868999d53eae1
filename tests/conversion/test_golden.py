"""Golden checkpoints of every family through converter and decoder (tests/data/checkpoints)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cam_jax.conversion import (
    CheckpointSource,
    OpenCheckpoint,
    load_checkpoint,
    load_params,
    open_checkpoint,
    save_hf,
)
from cam_jax.models.attention import AttentionContext
from cam_jax.models.block import Block
from cam_jax.models.decoder import forward, logits
from cam_jax.models.norm import rms_norm
from cam_jax.models.params import stack_params
from cam_jax.models.rope import rope_tables
from cam_jax.router import select
from tests.conversion.checkpoints import same

NAMES = (
    "olmoe_bf16_4x",
    "mixtral_bf16_5x",
    "qwen2moe_bf16_4x",
    "qwen3moe_bf16_4x",
    "dsv1_moe16b_style",
    "dsv2_lite_4x_bf16_yarn",
    "dsv3_bf16_4x_yarn",
)
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest, data_dir: Path) -> Path:
    return data_dir / "checkpoints" / request.param


@pytest.fixture(scope="module")
def opened(directory: Path) -> OpenCheckpoint:
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def golden(directory: Path) -> dict[str, np.ndarray]:
    with np.load(directory / "golden.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def params(opened: OpenCheckpoint) -> Any:
    return load_params(opened, dtype="f32")


@jax.jit(static_argnames="config")
def run(config, params, ids, valid):
    hidden, _, _ = forward(config, params, ids, valid=valid)
    return logits(config, params, hidden)


@pytest.mark.parametrize("kind", ["", "pad_left_", "pad_right_"])
def test_logits(
    opened: OpenCheckpoint, params: Any, golden: dict[str, np.ndarray], kind: str
) -> None:
    ids = golden[f"{kind}input_ids"]
    valid = golden.get(f"{kind}attention_mask", np.ones_like(ids)).astype(bool)
    with jax.default_matmul_precision("highest"):
        found = run(opened.config, params, jnp.asarray(ids, jnp.int32), jnp.asarray(valid))
    difference = np.abs(np.asarray(found) - golden[f"{kind}logits"])[valid]
    assert difference.max() <= TOLERANCE


@jax.jit(static_argnames="config")
def first_router(config, params, ids):
    """(router logits of the first MoE layer [T, E], the selection)."""
    places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    cos, sin = rope_tables(config.rope, places)
    context = AttentionContext(
        cos=cos, sin=sin, query_positions=places, key_positions=places, column=None, local=True
    )
    x = params["embed"][ids]
    for segment, stack in zip(config.segments, params["segments"], strict=True):
        kind = segment.kind
        abstract = nnx.eval_shape(
            lambda kind=kind: Block(config, kind, rngs=nnx.Rngs(0), dtype="f4")
        )
        for layer in range(segment.length):
            row = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stack)
            block = nnx.merge(nnx.split(abstract)[0], row)
            y = rms_norm(x, block.attn_norm[...], config.norm_eps)
            x = x + block.attn(y, context, window=kind.window, entries=None, layer=0)[0]
            y = rms_norm(x, block.ffn_norm[...], config.norm_eps)
            if kind.moe:
                found = y.reshape(-1, y.shape[-1]) @ block.moe.router[...].T
                bias = block.moe.parameters().bias
                return found, select(found, config.moe.router, bias=bias)
            x = x + block.mlp(y, None)


def test_the_first_router(
    opened: OpenCheckpoint, params: Any, golden: dict[str, np.ndarray]
) -> None:
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    with jax.default_matmul_precision("highest"):
        found, selection = first_router(opened.config, params, ids)
    assert np.abs(np.asarray(found) - golden["router0_logits"]).max() <= TOLERANCE
    experts, scores = np.asarray(selection.experts), np.asarray(selection.scores)
    weights = np.take_along_axis(scores, experts, 1) * selection.scale
    weights = weights / np.asarray(selection.denominator)[:, None]
    order = np.argsort(-weights, axis=1, kind="stable")  # by weight, where a bias chose
    np.testing.assert_array_equal(np.take_along_axis(experts, order, 1), golden["router0_topk_idx"])
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1), golden["router0_topk_weight"], atol=1e-5
    )


def test_per_layer_leaves_are_the_same_parameters(opened: OpenCheckpoint, params: Any) -> None:
    loaded = load_checkpoint(opened.directory, dtype="f32")
    stacked = stack_params(loaded.config, loaded.leaves)
    assert jax.tree.structure(stacked) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(stacked), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_a_round_trip_changes_no_bit(directory: Path, tmp_path: Path, layout: str) -> None:
    """To leaves, out in either layout, back, and out as it was."""
    loaded = load_checkpoint(directory)
    assert loaded.layout == "per_expert"
    save_hf(tmp_path / "other", loaded.config_json, loaded.leaves, layout=layout)
    again = load_checkpoint(tmp_path / "other")
    assert again.layout == layout
    save_hf(tmp_path / "back", again.config_json, again.leaves, layout="per_expert")
    theirs, ours = CheckpointSource.open(directory), CheckpointSource.open(tmp_path / "back")
    assert set(theirs.names()) == set(ours.names())
    assert all(same(theirs.read(name), ours.read(name)) for name in theirs.names())
