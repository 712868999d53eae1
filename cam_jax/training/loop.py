"""The whole training: text, tokenizer, baseline, steps, checkpoints, measurement, export."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cam_jax.errors import CheckpointError
from cam_jax.models.config import DecoderConfig
from cam_jax.models.registry import read_config
from cam_jax.training.bigram import fit_bigram
from cam_jax.training.checkpoints import Checkpoints
from cam_jax.training.corpus import Document
from cam_jax.training.data import batch_at
from cam_jax.training.export import as_exported, export
from cam_jax.training.measure import Heldout, figures, measure, measure_bigram
from cam_jax.training.memory import keep_freed_memory
from cam_jax.training.settings import TrainDemo, hf_config
from cam_jax.training.step import State, first_state, train_step
from cam_jax.training.text import TrainingText, prepare, write

OnStep = Callable[[int, float], None]
# Without a terminal there is no bar; every so many steps a line is printed.
_LINE_EVERY = 50
# About so many steps are averaged in the loss that is shown.
_SMOOTHED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all parts of a training need."""

    settings: TrainDemo
    config: DecoderConfig
    text: TrainingText
    heldout: Heldout

    @classmethod
    def of(
        cls,
        settings: TrainDemo,
        training: Sequence[Document] | None,
        heldout: Sequence[Document] | None,
    ) -> Job:
        """Prepare the text, and the model's description from its vocabulary."""
        text, read = prepare(settings, training=training, heldout=heldout)
        vocab_size = text.tokenizer.get_vocab_size()
        config = read_config(hf_config(settings, vocab_size=vocab_size))
        return cls(settings=settings, config=config, text=text, heldout=read)

    def checkpoints(self, *, reading: bool = False) -> Checkpoints:
        """The checkpoints of this training and no other."""
        identity = {**self.settings.arithmetic(), "corpus": self.text.corpus}
        return Checkpoints(self.settings.checkpoints, identity, reading=reading)


def train_demo(
    settings: TrainDemo,
    *,
    training: Sequence[Document] | None = None,
    heldout: Sequence[Document] | None = None,
    console: Console | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train the demo model, or go on with a training that was interrupted, and export it.

    Killed at any moment, the next call with the same options goes on from the last checkpoint, and
    the parameters at the end are bit for bit those of an uninterrupted run.

    Args:
        settings: the options.
        training, heldout: other text than that of this machine and the package.
        console: where progress is shown.
        on_step: called after each step with (steps done, loss in nats).

    Returns:
        The figures that metrics.json holds.

    Raises:
        CheckpointError: the checkpoint folder holds another run's checkpoints.
        InputError: there is not enough text.
    """
    console = console or Console()
    keep_freed_memory()
    job = Job.of(settings, training, heldout)
    if training is None:
        write(settings, job.text)
    console.print(f"{job.text.size / 1e6:.1f} MB of training text, {len(job.text.stream):,} tokens")
    with job.checkpoints() as checkpoints:
        state, seconds = _train(job, checkpoints, console, on_step)
    return _finish(job, settings.output, state, seconds, console)


def export_latest(
    settings: TrainDemo,
    output: Path,
    *,
    training: Sequence[Document] | None = None,
    heldout: Sequence[Document] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure and export the last checkpoint of a training as ``output``, also while it still runs.

    Raises:
        CheckpointError: there is no checkpoint yet.
    """
    job = Job.of(settings, training, heldout)
    with job.checkpoints(reading=True) as checkpoints:
        restored = checkpoints.restore(first_state(settings, job.config))
    if restored is None:
        raise CheckpointError(f"{settings.checkpoints} holds no checkpoint yet")
    return _finish(job, output, *restored, console or Console())


def _train(
    job: Job,
    checkpoints: Checkpoints,
    console: Console,
    on_step: OnStep | None,
) -> tuple[State, float]:
    """(state after the last step, seconds of computing over all calls)."""
    settings = job.settings
    # What is compiled must not depend on places: a resumed run finds it in JAX's cache.
    recipe = settings.recipe()
    state, before = first_state(recipe, job.config), 0.0
    if restored := checkpoints.restore(state):
        state, before = restored
        console.print(f"going on after step {int(state.step)}")
    done, shown, seconds = int(state.step), 0.0, before
    started = time.perf_counter()
    with _Progress(console, settings.steps, done) as advance:
        for step in range(done, settings.steps):
            inputs, targets = batch_at(
                job.text.stream,
                step,
                batch=settings.batch,
                length=settings.length,
                seed=settings.seed,
            )
            state, report = train_step(recipe, job.config, state, inputs, targets)
            loss = float(report.loss)
            shown += _smoothing(step - done) * (loss - shown)
            seconds = before + time.perf_counter() - started
            finished = step + 1
            if finished % settings.checkpoint_every == 0 or finished == settings.steps:
                checkpoints.save(state, seconds)
            if settings.export_every and finished % settings.export_every == 0:
                place = settings.output.with_name(f"{settings.output.name}_step_{finished}")
                _finish(job, place, state, seconds, console)
            advance(finished, shown)
            if on_step is not None:
                on_step(finished, loss)
    return state, seconds


def _smoothing(steps: int) -> float:
    """The newest loss's share in the shown one: a plain mean at first, then a moving one."""
    return 1 / min(steps + 1, _SMOOTHED_STEPS)


class _Progress:
    """A bar with the loss and the time left on a terminal, lines elsewhere."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self._console, self._steps, self._first = console, steps, done
        self._started = time.perf_counter()
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, loss="-")

    def __enter__(self) -> Callable[[int, float], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self, done: int, loss: float) -> None:
        self._bar.update(self._task, completed=done, loss=f"{loss:.3f}")
        if not self._console.is_terminal and (done % _LINE_EVERY == 0 or done == self._steps):
            each = (time.perf_counter() - self._started) / (done - self._first)
            left = each * (self._steps - done) / 60
            self._console.print(
                f"step {done}/{self._steps}  loss {loss:.3f}  {each:.2f} s/step  "
                f"{left:.0f} min left",
                soft_wrap=True,
            )


def _finish(
    job: Job, output: Path, state: State, seconds: float, console: Console
) -> dict[str, Any]:
    """Measure what the export will hold, and export it with the figures."""
    text, params = job.text, as_exported(state.params)
    quality = measure(
        job.config, params, job.heldout, length=job.settings.length, batch=job.settings.batch
    )
    bigram = fit_bigram(text.stream, vocab_size=job.config.vocab_size)
    baseline = measure_bigram(bigram, job.heldout)
    model = figures(quality)
    metrics = {
        "steps": int(state.step),
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "corpus": text.corpus,
        "training_bytes": text.size,
        "training_tokens": len(text.stream),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "model": model,
        "bigram": {
            "bits_per_byte": {name: round(value, 4) for name, value in baseline.items()},
            "weights": [round(weight, 4) for weight in bigram.weights],
        },
        "below_bigram": round(1 - quality.bits_per_byte["all"] / baseline["all"], 4),
    }
    export(
        output,
        settings=job.settings,
        config=job.config,
        params=params,
        tokenizer=text.tokenizer,
        metrics=metrics,
    )
    console.print(
        f"{output}: {quality.bits_per_byte['all']:.3f} bits per byte on held-out text, "
        f"{metrics['below_bigram']:.1%} below a bigram's {baseline['all']:.3f}; "
        f"routing skew by layer {model['skew_per_layer']}",
        soft_wrap=True,
    )
    return metrics
