"""A whole model on a mesh answers what one device answers that emulates it.

Eight devices: two copies of the data axis, two expert devices, two that share heads, experts'
features and vocabulary. Eleven rows, so that the last device gets one less.
"""

import dataclasses

import numpy as np
import pytest

import cam_jax
from cam_jax import CapacityPolicy, make_mesh
from cam_jax.errors import MeshError
from cam_jax.inference import LanguageModel
from tests.cam_jax.inference.tiny import VOCABULARY, model, padded, prompts
from tests.models.tiny import TINY, params_of, tiny

POLICY = CapacityPolicy(capacity_factor=0.75, expand="local", decode="capped")
IDS, MASK = padded(prompts(5, 9, 2, 7, 7, 4, 1, 8, 3, 9, 6), "left")


@pytest.fixture(scope="module")
def pair(devices):
    """The same weights on a mesh, and on one device with its groups."""
    one = dataclasses.replace(model(), policy=POLICY, virtual_devices=(2, 2))
    mesh = make_mesh(data=2, expert=2, tensor=2, devices=devices)
    return LanguageModel(config=one.config, params=one.params, mesh=mesh, policy=POLICY), one


def test_weights_lie_on_the_mesh(pair):
    lm, _ = pair
    experts = lm.params["segments"][0]["moe"]["experts"]["gate"]
    assert experts.sharding.shard_shape(experts.shape) == (2, 3, 4, 16)  # of [2, 6, 8, 16]
    assert lm.params["embed"].sharding.shard_shape((VOCABULARY, 16)) == (25, 16)
    assert lm.with_policy(None).params["embed"] is lm.params["embed"]


def test_logits(pair):
    found, expected = (np.asarray(m.logits(IDS, MASK)) for m in pair)
    assert found.shape == expected.shape == (11, 9, VOCABULARY)
    np.testing.assert_allclose(found[MASK == 1], expected[MASK == 1], atol=1e-4)


def test_score_and_routing_in_one_pass(pair):
    (found, report), (expected, other) = (m.score_with_routing(IDS, MASK) for m in pair)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert report.tokens == MASK.sum()
    for name in ("demand", "load", "dropped", "capacity", "slots", "expanded"):
        np.testing.assert_array_equal(getattr(report, name), getattr(other, name), err_msg=name)
    assert report.dropped.sum() > 0 and report.expanded.sum() > 0
    routing = pair[0].routing(IDS, MASK)
    np.testing.assert_array_equal(routing.load, report.load)


@pytest.mark.slow
def test_empty_rows_change_nothing(pair):
    """They are spread so that each device keeps its real rows."""
    ids, mask = np.pad(IDS, ((0, 5), (0, 0))), np.pad(MASK, ((0, 5), (0, 0)))
    (found, report), (expected, other) = (
        m.score_with_routing(ids, mask, allow_empty_rows=True) for m in pair
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(report.load, other.load)
    np.testing.assert_array_equal(report.load, pair[0].routing(IDS, MASK).load)


def test_generation(pair):
    steps = []
    found = pair[0].generate(
        IDS, MASK, max_new_tokens=6, on_token=lambda step, tokens: steps.append(tokens)
    )
    expected = pair[1].generate(IDS, MASK, max_new_tokens=6)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_array_equal(np.stack(steps, axis=1), found.tokens)


def test_sampling_draws_the_same(pair):
    options = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 3}
    found, expected = (m.generate(IDS, MASK, **options) for m in pair)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_a_batch_smaller_than_the_mesh_is_refused(pair):
    lm, _ = pair
    for call in (lm.logits, lm.score, lm.routing):
        with pytest.raises(MeshError, match=r"a batch of 3 for data=2 x expert=2 = 4 devices"):
            call(IDS[:3], MASK[:3])
    with pytest.raises(MeshError, match="send at least 4 sequences at a time, or use a smaller"):
        lm.generate(prompts(3))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_decodes_on_a_mesh(family, devices):
    """Three devices for six or eight experts, heads over two: whatever has to be padded is."""
    config = tiny(family, num_hidden_layers=2)
    params = params_of(config)
    mesh = make_mesh(expert=3, tensor=2, devices=devices)
    policy = CapacityPolicy(capacity_factor=1.0)
    lm = LanguageModel(config=config, params=params, mesh=mesh, policy=policy)
    one = LanguageModel(config=config, params=params, virtual_devices=(1, 3), policy=policy)
    found, expected = (m.generate(IDS[:4], MASK[:4], max_new_tokens=5) for m in (lm, one))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2moe_bf16_4x", "dsv3_bf16_4x_yarn"])
def test_saved_on_one_mesh_and_loaded_on_another(name, data_dir, devices, tmp_path):
    """The formats, the meshes, and one device: all say the same."""
    ids = np.abs(IDS) % 200
    lm = cam_jax.load(
        data_dir / "checkpoints" / name,
        dtype="float32",
        mesh=make_mesh(expert=4, tensor=2, devices=devices),
    )
    expected = np.asarray(lm.logits(ids, MASK))[MASK == 1]
    for format, mesh in (
        ("orbax", make_mesh(data=2, expert=3, devices=devices)),
        ("orbax", None),
        ("hf", make_mesh(data=2, expert=2, tensor=2, devices=devices)),
    ):
        saved = lm.save(tmp_path / format, format=format, overwrite=True)
        again = cam_jax.load(saved, mesh=mesh)
        found = np.asarray(again.logits(ids, MASK))[MASK == 1]
        np.testing.assert_allclose(found, expected, atol=1e-4)
