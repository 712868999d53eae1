"""`load`: golden figures, special tokens, tokenizers, faults found before weights are read."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from cam_jax import CapacityPolicy
from cam_jax.errors import CheckpointError, ConfigError, InputError, PolicyError
from cam_jax.inference import load, loading
from tests.cam_jax.inference.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def golden_dir(request):
    return request.path.parents[2] / "data" / "checkpoints" / "olmoe_bf16_4x"


@pytest.fixture(scope="module")
def golden(golden_dir):
    return dict(np.load(golden_dir / "golden.npz"))


@pytest.fixture(scope="module")
def lm(golden_dir):
    return load(golden_dir, dtype="float32")


@pytest.fixture
def copy(golden_dir, tmp_path):
    """A checkpoint of one's own to damage."""
    return shutil.copytree(golden_dir, tmp_path / "copy")


def test_greedy_tokens_are_golden(lm, golden):
    prompt, expected = golden["generated"][:, :17], golden["generated"][:, 17:]
    with jax.default_matmul_precision("highest"):
        found = lm.generate(prompt, max_new_tokens=8, stop_at_eos=False)
    assert found.tokens.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "name",
    [
        "mixtral_bf16_5x",
        "qwen2moe_bf16_4x",
        "qwen3moe_bf16_4x",
        "dsv1_moe16b_style",
        "dsv2_lite_4x_bf16_yarn",
        "dsv3_bf16_4x_yarn",
    ],
)
def test_greedy_tokens_of_the_other_families_are_golden(golden_dir, name):
    lm = load(golden_dir.parent / name, dtype="float32")
    with np.load(golden_dir.parent / name / "golden.npz") as data:
        tokens = data["generated"]
    with jax.default_matmul_precision("highest"):
        found = lm.generate(tokens[:, :17], max_new_tokens=8, stop_at_eos=False)
    assert found.tokens.tolist() == tokens[:, 17:].tolist()


def test_logits_and_scores_are_golden(lm, golden):
    ids = golden["input_ids"]
    with jax.default_matmul_precision("highest"):
        assert abs(lm.logits(ids) - golden["logits"]).max() < 1e-3
        for side in ("left", "right"):
            mask = golden[f"pad_{side}_attention_mask"]
            found = lm.logits(golden[f"pad_{side}_input_ids"], mask)
            assert abs(found - golden[f"pad_{side}_logits"])[mask > 0].max() < 1e-3
        logprobs = np.asarray(jax.nn.log_softmax(golden["logits"]))[:, :-1]
        expected = np.take_along_axis(logprobs, ids[:, 1:, None], 2)[..., 0]
        np.testing.assert_allclose(lm.score(ids), expected, atol=1e-3)


def test_what_a_model_knows(lm):
    assert lm.config.num_moe_layers == 3 and lm.tokenizer is None
    assert lm.policy is None and lm.mesh is None
    assert (lm.special.eos_ids, lm.special.bos_id, lm.special.pad_id) == ((2,), 1, 0)


def test_policies_share_the_weights(lm):
    policy = CapacityPolicy(capacity_factor=1.0)
    other = lm.with_policy((policy, None, policy))
    assert other.params is lm.params and other.policy == (policy, None, policy)
    assert other.with_policy(None).policy is None
    with pytest.raises(PolicyError, match=r"2 entries.* 3 MoE layers"):
        lm.with_policy((policy, None))


def test_the_checkpoints_own_type_is_kept_unless_asked(golden_dir):
    assert load(golden_dir).params["embed"].dtype == "bfloat16"
    assert load(golden_dir, dtype="float32").params["embed"].dtype == "float32"


@pytest.mark.parametrize("format", ["orbax", "hf"])
def test_a_saved_model_loads_again(lm, tmp_path, golden, format):
    saved = lm.save(tmp_path / "saved", format=format)
    again = load(saved)
    assert again.params["embed"].dtype == "float32" and again.special == lm.special
    ids = golden["input_ids"]
    with jax.default_matmul_precision("highest"):
        assert (np.asarray(again.logits(ids)) == np.asarray(lm.logits(ids))).all()
    with pytest.raises(CheckpointError, match="exists"):
        lm.save(saved, format=format)
    with pytest.raises(InputError, match=r"format='gguf': expected one of orbax, hf"):
        lm.save(tmp_path / "other", format="gguf")
    with pytest.raises(InputError, match=r"config\.json"):
        dataclasses.replace(lm, origin=None).save(tmp_path / "other")


def test_eos_of_both_files(copy):
    generation = copy / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 6], "pad_token_id": 9}))
    special = load(copy).special
    assert special.eos_ids == (5, 6, 2) and special.pad_id == 9
    generation.unlink()
    assert load(copy).special.eos_ids == (2,)


def test_a_tokenizer_never_cuts_or_fills(copy):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(copy / "tokenizer.json"))
    assert load(copy).tokenizer.encode("abcd").ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("generation_config.json", "{", CheckpointError),
        ("generation_config.json", "[1]", CheckpointError),
        ("generation_config.json", '{"eos_token_id": "2"}', ConfigError),
        ("tokenizer.json", "{}", CheckpointError),
    ],
)
def test_damaged_companions_are_named_before_weights_are_read(
    copy, name, content, error, monkeypatch
):
    monkeypatch.setattr(loading, "load_any", _never)
    (copy / name).write_text(content)
    with pytest.raises(error, match=name if error is CheckpointError else "eos_token_id"):
        load(copy)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": (None,)},
        {"policy": 1.5},
        {"virtual_devices": 0},
        {"virtual_devices": (2, 0)},
        {"virtual_devices": 17},
    ],
)
def test_policies_that_cannot_hold_are_refused_before_weights_are_read(
    golden_dir, options, monkeypatch
):
    monkeypatch.setattr(loading, "load_any", _never)
    with pytest.raises(PolicyError):
        load(golden_dir, **options)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load(tmp_path / "nowhere")


def _never(*args, **options):
    raise AssertionError("weights were read")
