"""`cam-jax COMMAND`: finds the command, reads its options, runs it, says what was wrong.

A command is one module of this folder that holds

- `Options`: a frozen dataclass; its fields are the options, its docstrings the help;
- `run(options)`: does the work; returns an exit code, or None for 0.

It is imported once it is asked for, so `cam-jax --help` does not wait for what a command needs.
"""

import dataclasses
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from cam_jax.errors import CamError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A name on the command line, the module behind it, and its line in `cam-jax --help`."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command(
        name="demo",
        module="cam_jax.cli.demo",
        summary="Read real text with a trained MoE model under several capacity ceilings.",
    ),
    Command(
        name="train-demo",
        module="cam_jax.cli.train_demo",
        summary="Train the demo's model on the text that comes with Python.",
    ),
    Command(
        name="bench-transports",
        module="cam_jax.cli.bench_transports",
        summary="Measure how memory and time of the one-device transports grow with T.",
    ),
    Command(
        name="generate",
        module="cam_jax.cli.generate",
        summary="Continue prompts under a ceiling, on one device, a mesh, or many hosts.",
    ),
    Command(
        name="plan",
        module="cam_jax.cli.plan",
        summary="Compile a model for a TPU pod on this machine: memory, traffic, least time.",
    ),
    Command(
        name="convert",
        module="cam_jax.cli.convert",
        summary="Convert a checkpoint: Hugging Face to Orbax, and back.",
    ),
    Command(
        name="inspect",
        module="cam_jax.cli.inspect",
        summary="Say what a checkpoint is and what it takes on a mesh, without loading it.",
    ),
    Command(
        name="bench-loading",
        module="cam_jax.cli.bench_loading",
        summary="Measure memory and time of loading and converting a made-up checkpoint.",
    ),
    Command(
        name="bench-straggler",
        module="cam_jax.cli.bench_straggler",
        summary="Measure a straggler on two real processes, and what a ceiling saves.",
    ),
    Command(
        name="env",
        module="cam_jax.cli.env",
        summary="Say which versions and devices are in use (for a bug report).",
    ),
)

# Characters of an error; the longest of our own messages list a few dozen names.
_LONGEST = 4000

DESCRIPTION = """Capacity-aware Mixture-of-Experts inference in JAX.

`cam-jax COMMAND --help` tells a command's options, `cam-jax --version` the version. With --json a
command writes one JSON document to standard output and everything else to standard error.
CAM_JAX_DEBUG=1 shows the whole traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0, or 2 where cam_jax refuses the input, or 130 when interrupted.

    Raises:
        SystemExit: after `--help` (0) or on a usage error (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except CamError as error:
        if os.environ.get("CAM_JAX_DEBUG", "0") not in ("", "0"):
            raise
        print(f"cam-jax: error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cam-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _one_line(message: str) -> str:
    """On one line of bearable length, without what would steer the terminal (names from files)."""
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"cam-jax {importlib.metadata.version('cam-jax')}")
        return 0
    command = next((c for c in COMMANDS if arguments[:1] == [c.name]), None)
    if command is None:
        tyro.cli(_overview(), prog="cam-jax", description=DESCRIPTION, args=arguments)
        raise AssertionError("tyro accepts only the names that are in COMMANDS")
    module = importlib.import_module(command.module)
    options = tyro.cli(
        module.Options,
        prog=f"cam-jax {command.name}",
        description=command.summary,
        args=arguments[1:],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    # Before anything of JAX starts: over a flag that it cannot read, XLA ends the whole process.
    from cam_jax.xla_flags import check_xla_flags

    check_xla_flags()
    return module.run(options) or 0


def _overview() -> Any:
    """All commands without their options: what help and usage errors at the top are made from."""
    empty = [
        Annotated[
            dataclasses.make_dataclass(f"Command{i}", ()),
            tyro.conf.subcommand(name=command.name, description=command.summary),
        ]
        for i, command in enumerate(COMMANDS)
    ]
    return Union[tuple(empty)]  # noqa: UP007 (the members are known only now)
