"""`python -m cam_jax.training [options]`: the same as `cam-jax train-demo`."""

import tyro

from cam_jax.training.loop import train_demo
from cam_jax.training.settings import TrainDemo

if __name__ == "__main__":
    train_demo(tyro.cli(TrainDemo, prog="python -m cam_jax.training"))
