"""`cam-jax bench-straggler`: the straggler of a skewed router, and what a ceiling saves."""

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from cam_jax.benchmarks.straggler import DEVICES, SkewedLayer, cases
from cam_jax.cli.console import messages, write_json
from cam_jax.distributed import Processes
from cam_jax.errors import DistributedError, InputError

if TYPE_CHECKING:
    from cam_jax.benchmarks.straggler_run import Found

_flat = tyro.conf.arg(name="")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax bench-straggler`. Without those of processes it starts the two that it
    needs on this machine, each on a core of its own."""

    capacity_factor: tuple[float, ...] = (1.5, 1.0)
    """Values of γ, each for Token Drop and for Expanded Drop."""
    rounds: int = 15
    """How often every case is measured, in turn; the median counts."""
    layer: Annotated[SkewedLayer, _flat] = field(default_factory=SkewedLayer)
    time_limit: int = 300
    """Seconds after which the processes are ended."""
    core: int | None = None
    """The core that this one of several processes runs on. Default: by its id."""
    processes: Annotated[Processes, _flat] = field(default_factory=Processes)
    keep_priorities: bool = False
    """Let gloo's waiting thread take half of the straggler's core, as it does by itself on CPU;
    dropless then looks slower than it is elsewhere."""
    out: Path | None = None
    """Where to write a picture of the speed-ups, as PNG."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Starts two processes that measure, or measures as one of them.

    Raises:
        InputError: fewer than two cores, or a size, share or path that cannot be.
        PolicyError: a γ that cannot be.
        DistributedError: the processes did not come together, one failed, or time ran out.
    """
    options = _checked(options)
    if options.processes.several:
        _measure(options)
        return
    from cam_jax.benchmarks.pinned import free_port, pick_cores, run_together, separate

    if options.core is not None:
        raise InputError("--core is for one of several processes; without them both get their own")
    cores = pick_cores(DEVICES)
    if not separate(cores):
        messages().print(
            f"cores {cores} are threads of one physical core: while one process waits, the other "
            "runs faster, and dropless looks faster than it is",
            style="yellow",
        )
    address = f"127.0.0.1:{free_port()}"
    program = "import sys; from cam_jax.cli.main import main; sys.exit(main())"
    commands = []
    for i, core in enumerate(cores):
        processes = dataclasses.replace(
            options.processes, coordinator=address, num_processes=DEVICES, process_id=i
        )
        own = dataclasses.replace(options, processes=processes, core=core)
        commands.append([sys.executable, "-c", program, "bench-straggler", *as_arguments(own)])
    run_together(commands, seconds=float(options.time_limit))


def _checked(options: Options) -> Options:
    options.layer.check()
    cases(options.capacity_factor)  # refuses what is no γ
    if len(set(options.capacity_factor)) != len(options.capacity_factor):
        raise InputError(f"--capacity-factor {options.capacity_factor}: one of them is there twice")
    for name in ("rounds", "time_limit"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected at least 1")
    processes = options.processes
    if processes.num_processes not in (None, DEVICES) or processes.cpu_devices not in (None, 1):
        raise DistributedError(
            f"--num-processes {processes.num_processes} --cpu-devices {processes.cpu_devices}: the "
            f"benchmark is of {DEVICES} processes with one device each"
        )
    processes = dataclasses.replace(processes, cpu_devices=1)
    # Of the several only: alone, this process needs no devices.
    dataclasses.replace(processes, cpu_devices=None).check()
    if options.out is not None:
        from cam_jax.demo.picture import check_picture_path

        options = dataclasses.replace(options, out=check_picture_path(options.out))
    return dataclasses.replace(options, processes=processes)


def as_arguments(options: Any) -> list[str]:
    """A dataclass of options as the command line that gives them; None is left out."""
    arguments: list[str] = []
    for each in dataclasses.fields(options):
        value, flag = getattr(options, each.name), "--" + each.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            arguments += as_arguments(value)
        elif value is None or value is False:
            continue
        elif value is True:
            arguments.append(flag)
        else:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [flag, *map(str, values)]
    return arguments


def _measure(options: Options) -> None:
    import jax
    from rich.progress import Progress

    from cam_jax.benchmarks.pinned import free_cores, pin
    from cam_jax.cli.clean_output import only_ours
    from cam_jax.distributed import is_main, start
    from cam_jax.distributed.ending import ends_after

    core, cores = options.core, free_cores()
    if core is None:
        core = cores[(options.processes.process_id or 0) % len(cores)]
    pin(core)
    jax.config.update("jax_platforms", "cpu")
    late = f"cam-jax: not finished within {options.time_limit} s: see --time-limit"
    with ends_after(float(options.time_limit), late):
        with only_ours(), start(options.processes):
            if jax.process_count() != DEVICES:
                raise DistributedError(
                    f"{jax.process_count()} processes: the benchmark is of {DEVICES}"
                )
            # After the core is chosen: what this imports may start threads.
            from cam_jax.benchmarks.straggler_run import measure

            main = is_main()
            with Progress(console=messages(), disable=not main) as bar:
                task = bar.add_task("measuring", total=options.rounds)
                found = measure(
                    options.layer,
                    cases(options.capacity_factor),
                    rounds=options.rounds,
                    progress=lambda: bar.advance(task),
                    keep_priorities=options.keep_priorities,
                )
        if main:
            _report(options, found)


def _report(options: Options, found: "Found") -> None:
    if options.out is not None:
        from cam_jax.benchmarks.straggler_picture import draw

        draw(options.out, found.rows, options.layer)
    if options.json:
        write_json(
            {
                "layer": dataclasses.asdict(options.layer),
                "rounds": options.rounds,
                "lowered_threads": found.lowered_threads,
                "rows": [dataclasses.asdict(f) | {"achieved": f.achieved} for f in found.rows],
            }
        )
        return
    from rich.console import Console

    # Into a file or a pipe rich would write 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(_table(options.layer, found))
    console.print(
        "rows: that the busiest device computes, assignments (dropless) or slots (ceiling). layer "
        "ms: of the slower process, median of the rounds. expert ms: the experts' computation "
        "alone. by rows, by expert: the speed-up over dropless that these predict; measured: that "
        "of the layer; achieved: of the one by rows. straggler: load of the busier device over "
        "the mean, as the router asks → as kept.",
        style="dim",
    )
    if not found.lowered_threads:
        console.print(
            "gloo's waiting thread had its part of the straggler's core: dropless looks slower "
            "than it is.",
            style="yellow",
        )


def _table(layer: SkewedLayer, found: "Found") -> Any:
    from rich.table import Table

    what = "assignments to device" if layer.skew == "device" else "tokens to expert"
    table = Table(
        title=f"{layer.share:.0%} of {what} 0\nT = {layer.tokens} on each of {DEVICES} devices, "
        f"{layer.top_k} of {layer.num_experts} experts, D = {layer.features}, F = {layer.hidden}",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    # Names wrap in a terminal of 80 columns, figures never.
    table.add_column("")
    for header in (
        "\nrows",
        "layer\nms",
        "expert\nms",
        "by\nrows",
        "by\nexpert",
        "\nmeasured",
        "\nachieved",
        "\ndropped",
        "\nstraggler",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for f in found.rows:
        table.add_row(
            f.name,
            str(f.rows),
            f"{f.seconds * 1e3:.0f}",
            f"{f.expert_seconds * 1e3:.0f}",
            f"{f.predicted:.2f}",
            f"{f.predicted_experts:.2f}",
            f"{f.measured:.2f}",
            f"{f.achieved:.0%}",
            f"{f.dropped_share:.0%}",
            f"{f.straggler_before:.2f}→{f.straggler_after:.2f}",
        )
    return table
