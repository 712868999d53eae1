"""`cam-jax train-demo`: train the model that the demo reads with."""

from dataclasses import dataclass, field

import tyro

from cam_jax.cli.console import messages, write_json
from cam_jax.training.settings import TrainDemo


@dataclass(frozen=True, kw_only=True)
class Options:
    training: tyro.conf.OmitArgPrefixes[TrainDemo] = field(default_factory=TrainDemo)
    json: bool = False
    """Write the figures of the finished model as JSON."""


def run(options: Options) -> None:
    from cam_jax.training.loop import train_demo

    metrics = train_demo(options.training, console=messages())
    if options.json:
        write_json(metrics)
