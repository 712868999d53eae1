"""The whole job on a tiny model: the same parameters after being killed, an export that loads."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from cam_jax.conversion.load import load_checkpoint
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.decoder import forward, stack_params
from cam_jax.training.bits import windows
from cam_jax.training.corpus import Document
from cam_jax.training.loop import Job, export_latest, train_demo
from cam_jax.training.measure import figures, measure
from cam_jax.training.settings import TrainDemo
from cam_jax.training.step import first_state

QUIET = Console(quiet=True)
TEXT = "".join(f"def function_{n}(x):\n    return x * {n % 7}\n" for n in range(60))
TRAINING = [Document(domain="source", name="a.py", text=TEXT)]
HELDOUT = [
    Document(domain="source", name="b.py", text=TEXT[500:900]),
    Document(domain="licence", name="C", text="Permission is granted to return x.\n" * 4),
]
TEXTS = {"training": TRAINING, "heldout": HELDOUT, "console": QUIET}


@pytest.fixture(scope="module")
def settings():
    return TrainDemo(
        steps=30, batch=2, length=16, layers=2, hidden=16, heads=2, expert_hidden=8, experts=4,
        top_k=2, vocab_size=300, warmup=2, checkpoint_every=8, export_every=20, peak_lr=1e-2,
    )  # fmt: skip


def _at(settings, folder):
    return dataclasses.replace(
        settings, output=folder / "model", checkpoints=folder / "checkpoints"
    )


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """An uninterrupted run: (its settings, what it returned)."""
    own = _at(settings, tmp_path_factory.mktemp("whole"))
    return own, train_demo(own, **TEXTS)


def _state(settings):
    job = Job.of(settings, TRAINING, HELDOUT)
    with job.checkpoints(reading=True) as checkpoints:
        return checkpoints.restore(first_state(settings, job.config))


def test_killed_and_resumed_is_bit_for_bit_the_same(settings, finished, tmp_path):
    own = _at(settings, tmp_path)
    losses = {}

    def kill(step, loss):
        losses[step] = loss
        if step == 25:  # one step after a checkpoint: that step is lost and done again
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_demo(own, on_step=kill, **TEXTS)
    assert not own.output.exists()
    again = {}
    train_demo(own, on_step=again.__setitem__, **TEXTS)
    assert sorted(again) == [25, 26, 27, 28, 29, 30]
    assert again[25] == losses[25]

    (state, _), (expected, _) = _state(own), _state(finished[0])
    assert int(state.step) == settings.steps
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert found.dtype == wanted.dtype
        assert np.array_equal(np.asarray(found), np.asarray(wanted))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        whole = (finished[0].output / name).read_bytes()
        assert (own.output / name).read_bytes() == whole


def test_a_finished_run_is_not_trained_again(finished):
    steps = []
    train_demo(finished[0], on_step=lambda step, loss: steps.append(step), **TEXTS)
    assert steps == []


def test_other_options_are_refused_by_name(finished):
    other = dataclasses.replace(finished[0], peak_lr=0.5)
    with pytest.raises(CheckpointError, match=r"peak_lr is 0\.5 and was 0\.01"):
        train_demo(other, **TEXTS)


def test_another_corpus_is_refused(finished):
    longer = [dataclasses.replace(TRAINING[0], text=TEXT + "more = 1\n")]
    with pytest.raises(CheckpointError, match="corpus"):
        train_demo(finished[0], training=longer, heldout=HELDOUT, console=QUIET)


def test_export_loads_through_the_converter(finished):
    own, metrics = finished
    loaded = load_checkpoint(own.output, dtype="float32")
    params = stack_params(loaded.config, loaded.leaves)
    tokenizer = Tokenizer.from_file(str(own.output / "tokenizer.json"))
    job = Job.of(own, TRAINING, HELDOUT)
    assert loaded.config == job.config
    assert tokenizer.to_str() == job.text.tokenizer.to_str()
    quality = measure(loaded.config, params, job.heldout, length=16, batch=2)
    assert figures(quality) == metrics["model"]
    written = json.loads((own.output / "metrics.json").read_text())
    assert written == json.loads(json.dumps(metrics))
    generation = json.loads((own.output / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 0, "pad_token_id": 1}


def test_readme_gives_the_command_and_the_figures(finished):
    own, metrics = finished
    readme = (own.output / "README.md").read_text()
    assert "cam-jax train-demo --steps 30 --batch 2" in readme
    assert f"{metrics['model']['bits_per_byte']['all']:.3f}" in readme
    assert "{" not in readme


def test_measure_predicts_each_token_from_those_before_it(finished):
    """The figure against a plain loop over windows and numpy's softmax."""
    own, metrics = finished
    loaded = load_checkpoint(own.output, dtype="float32")
    params = stack_params(loaded.config, loaded.leaves)
    stream = Job.of(own, TRAINING, HELDOUT).heldout.streams["licence"]
    read = jax.jit(lambda params, ids: forward(loaded.config, params, ids)[0])
    bits = 0.0
    for row, targets in zip(*windows(stream, 16, fill=0), strict=True):
        count = int((targets >= 0).sum())
        hidden = read(params, jnp.asarray(row[None]))
        scores = np.asarray(hidden)[0, :count] @ np.asarray(params["embed"]).T
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        bits -= scores[np.arange(count), targets[:count]].sum() / np.log(2)
    found = metrics["model"]["bits_per_byte"]["licence"]
    assert found == pytest.approx(bits / len((HELDOUT[1].text).encode()), abs=2e-4)


def test_training_learns_and_exports_on_the_way(finished):
    own, metrics = finished
    step_20 = own.output.with_name("model_step_20")
    early = json.loads((step_20 / "metrics.json").read_text())
    assert early["steps"] == 20 and metrics["steps"] == own.steps
    assert metrics["model"]["bits_per_byte"]["all"] < early["model"]["bits_per_byte"]["all"]
    assert load_checkpoint(step_20).config.num_layers == 2


def test_export_latest(finished, tmp_path):
    own, metrics = finished
    again = export_latest(own, tmp_path / "copy", **TEXTS)
    assert again == metrics
    weights = "model.safetensors"
    assert (tmp_path / "copy" / weights).read_bytes() == (own.output / weights).read_bytes()


def test_export_latest_without_a_checkpoint(settings, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_latest(_at(settings, tmp_path), tmp_path / "copy", **TEXTS)


@pytest.mark.parametrize("option", [{"steps": 0}, {"peak_lr": 0.0}, {"warmup": -1}])
def test_options_out_of_range(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        TrainDemo(**option)
