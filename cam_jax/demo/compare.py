"""Several policies on one text."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from cam_jax.demo.cases import Case
from cam_jax.demo.measure import Measured, measure, warm_up
from cam_jax.demo.text import Windows, cut
from cam_jax.errors import InputError
from cam_jax.inference.language_model import LanguageModel

NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the demo shows.

    Attributes:
        results: one per policy, the unlimited model first.
        windows: the text that was read.
        rows: sequences of a batch.
        generated: the prompt and its continuation, or None.
        compile_seconds: wall time in which all programs were compiled.
    """

    results: tuple[Measured, ...]
    windows: Windows
    rows: int
    generated: tuple[str, str] | None
    compile_seconds: float

    def of(self, case: Case) -> Measured:
        """The result of a policy."""
        return next(measured for measured in self.results if measured.case == case)


def check_model(model: LanguageModel, *, rows: int, length: int, prompt: str | None) -> Tokenizer:
    """Refuses what would fail after minutes of work; the tokenizer that the text is read with.

    Raises:
        InputError: names the option.
    """
    if model.tokenizer is None:
        raise InputError("model has no tokenizer.json, which reading text needs")
    if not model.config.num_moe_layers:
        raise InputError("model has no MoE layer: there is no expert to limit")
    if rows < 1:
        raise InputError(f"rows={rows}: expected at least 1")
    longest = model.config.max_positions
    if not 2 <= length <= longest:
        raise InputError(
            f"length={length}: expected at least 2 and at most the model's {longest} positions"
        )
    if prompt is not None:
        tokens = len(model.tokenizer.encode(prompt).ids)
        if not tokens or tokens + NEW_TOKENS > longest:
            raise InputError(
                f"prompt has {tokens} tokens: expected at least 1 and, with {NEW_TOKENS} new "
                f"ones, at most the model's {longest} positions"
            )
    return model.tokenizer


def compare(
    model: LanguageModel,
    texts: Sequence[str],
    cases: Sequence[Case],
    *,
    rows: int,
    length: int,
    prompt: str | None,
    console: Console,
) -> Comparison:
    """Read the texts under every policy.

    Args:
        model: with a tokenizer.
        texts: documents.
        cases: the policies, the unlimited model first.
        rows: sequences of a batch.
        length: tokens of a sequence.
        prompt: what is continued without a ceiling; None for nothing.
        console: where progress is shown.

    Raises:
        InputError: as `check_model`.
    """
    tokenizer = check_model(model, rows=rows, length=length, prompt=prompt)
    eos = model.special.eos_ids
    windows = cut(texts, tokenizer, separator=eos[0] if eos else None, length=length)
    started = time.perf_counter()
    with _progress(console) as progress:
        generated = _compile_all(model, cases, windows, rows=rows, prompt=prompt, progress=progress)
        compiled = time.perf_counter()
        task = progress.add_task(
            "", total=len(cases) * -(-len(windows.ids) // rows), unit="batches"
        )
        results = []
        for case in cases:
            progress.update(task, description=case.title)
            results.append(
                measure(model, case, windows, rows=rows, advance=lambda: progress.advance(task))
            )
        progress.update(task, description="Reading")
    return Comparison(
        results=tuple(results),
        windows=windows,
        rows=rows,
        generated=generated,
        compile_seconds=compiled - started,
    )


def _compile_all(
    model: LanguageModel,
    cases: Sequence[Case],
    windows: Windows,
    *,
    rows: int,
    prompt: str | None,
    progress: Progress,
) -> tuple[str, str] | None:
    """Compile every program at once, on all cores; the text is generated on the way."""
    task = progress.add_task("Compiling", total=len(cases) + (prompt is not None), unit="programs")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(warm_up, model, case, windows, rows=rows) for case in cases]
        writing = None if prompt is None else pool.submit(_generate, model, prompt)
        waiting: list[Future[Any]] = jobs if writing is None else [*jobs, writing]
        for job in waiting:
            job.add_done_callback(lambda _: progress.advance(task))
        for job in jobs:
            job.result()
        return None if writing is None else writing.result()


def _generate(model: LanguageModel, prompt: str) -> tuple[str, str]:
    result = model.with_policy(None).generate(
        prompt, max_new_tokens=NEW_TOKENS, temperature=0.6, top_p=0.95, seed=1
    )
    assert result.texts is not None  # check_model has seen a tokenizer
    return prompt, result.texts[0]


def _progress(console: Console) -> Any:
    return Progress(
        TextColumn("{task.description:23}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
    )
