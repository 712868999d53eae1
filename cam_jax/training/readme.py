"""The README that goes with an exported model: what it is, what it can do, how to make it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cam_jax.training.settings import TrainDemo

_TEXT = """\
# A small OLMoE, trained on the text that comes with Python

A Mixture-of-Experts language model that is small enough to ship and to run in seconds on a CPU, and
really trained: its router has preferences, and a capacity ceiling costs something. It is an input
for
`cam-jax demo` and for tests, not a language model to use for anything.

- Format: Hugging Face `OlmoeForCausalLM`, bfloat16.
- Shape: {layers} layers, D={hidden}, {experts} experts of F={expert_hidden}, top-{top_k},
  {heads} heads, byte-level BPE of {vocab_size} tokens, trained on {length} positions;
  {parameters:,} parameters.
- Training text: documentation topics, library source (without tests) and licence texts of a Python
  {python} installation, {training_megabytes:.1f} MB, {training_tokens:,} tokens.
- Held-out text: `cam_jax/assets/heldout`; no passage of six lines of it is in the training text.
- Training: {done} of {steps} steps of {batch} x {length} tokens, AdamW, capacity factor
  {capacity_factor} with the best-scored tokens kept, no balance loss; {minutes:.0f} minutes on a
  machine of {cores} CPU cores.

| bits per byte, held-out | {domains} |
|---|{rules}
| interpolated bigram, same tokens | {bigram} |
| this model | {model} |

That is {gain:.1%} below the bigram. Routing on the held-out text, most wanted expert over the mean,
by layer: {skew}.

## Reproduce

    cam-jax train-demo{options}

Data order, split and first weights follow from the seed; another Python version has other text, and
another machine rounds differently, so the figures will be near these, not equal.

The weights are released under the licence of cam_jax (Apache-2.0).
"""


def readme(settings: TrainDemo, metrics: Mapping[str, Any]) -> str:
    """The README of an export. ``metrics`` is the content of metrics.json."""
    model, bigram = metrics["model"]["bits_per_byte"], metrics["bigram"]["bits_per_byte"]
    names = list(model)
    return _TEXT.format(
        **dataclasses.asdict(settings),
        done=metrics["steps"],
        parameters=metrics["parameters"],
        python=metrics["python"],
        training_tokens=metrics["training_tokens"],
        training_megabytes=metrics["training_bytes"] / 1e6,
        minutes=metrics["seconds"] / 60,
        cores=metrics["cores"],
        domains=" | ".join(names),
        rules="---|" * len(names),
        bigram=" | ".join(f"{bigram[name]:.3f}" for name in names),
        model=" | ".join(f"{model[name]:.3f}" for name in names),
        gain=1 - model["all"] / bigram["all"],
        skew=", ".join(f"{value:.1f}" for value in metrics["model"]["skew_per_layer"]),
        options=_options(settings),
    )


def _options(settings: TrainDemo) -> str:
    """The options that are not at their default, as they are typed."""
    defaults = TrainDemo().arithmetic()
    given = {k: v for k, v in settings.arithmetic().items() if v != defaults[k]}
    return "".join(f" --{name.replace('_', '-')} {value}" for name, value in given.items())
