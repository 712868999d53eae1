"""The golden OLMoE checkpoint through the converter and the decoder (tests/data/checkpoints)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cam_jax.conversion import OpenCheckpoint, load_checkpoint, load_params, open_checkpoint
from cam_jax.models.decoder import forward, logits
from cam_jax.models.params import stack_params

NAMES = ("olmoe_bf16_4x",)
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


@jax.jit(static_argnames="config")
def run(config, params, ids, valid):
    hidden, _, _ = forward(config, params, ids, valid=valid)
    return logits(config, params, hidden)


@pytest.mark.parametrize("kind", ["", "pad_left_", "pad_right_"])
def test_logits(opened: OpenCheckpoint, golden: dict[str, np.ndarray], kind: str) -> None:
    params = load_params(opened, dtype="f32")
    ids = golden[f"{kind}input_ids"]
    valid = golden.get(f"{kind}attention_mask", np.ones_like(ids)).astype(bool)
    with jax.default_matmul_precision("highest"):
        found = run(opened.config, params, jnp.asarray(ids, jnp.int32), jnp.asarray(valid))
    difference = np.abs(np.asarray(found) - golden[f"{kind}logits"])[valid]
    assert difference.max() <= TOLERANCE


def test_per_layer_leaves_give_the_same_logits(
    opened: OpenCheckpoint, golden: dict[str, np.ndarray]
) -> None:
    loaded = load_checkpoint(opened.directory, dtype="f32")
    params = stack_params(loaded.config, loaded.leaves)
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    with jax.default_matmul_precision("highest"):
        found = run(loaded.config, params, ids, jnp.ones_like(ids, bool))
    assert np.abs(np.asarray(found) - golden["logits"]).max() <= TOLERANCE
