"""`cam-jax bench-loading`: memory and time of loading and converting a made-up checkpoint."""

import dataclasses
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cam_jax.cli.console import messages, write_json
from cam_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax bench-loading`."""

    gigabytes: float = 3.0
    """Size of the checkpoint; three times as much is needed on the disk."""
    dir: Path | None = None
    """Where to put it for the while. Default: the system's folder for temporary files."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> int:
    """Measures, then prints. Returns 1 if a bound on memory does not hold.

    Raises:
        InputError: a size below 10 MB, or one that the disk has no room for.
    """
    # Here, so that --help waits for none of it.
    import shutil

    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from cam_jax.benchmarks.loading import CASES, make_checkpoint, measure_loading

    nbytes = int(options.gigabytes * 1e9)
    cases = [c for c in CASES if c != "torch" or importlib.util.find_spec("transformers")]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="cam_jax_bench_") as name:
        directory = Path(name)
        free = shutil.disk_usage(directory).free
        if free < 3.2 * nbytes:
            raise InputError(
                f"--gigabytes {options.gigabytes} needs {3.2 * options.gigabytes:.1f} GB on the "
                f"disk, {directory.parent} has {free / 1e9:.1f}: give another --dir"
            )
        make_checkpoint(directory / "hf", nbytes)
        found = [
            measure_loading(case, directory)
            for case in track(cases, description="measuring", console=messages())
        ]
    if options.json:
        rows = [{**dataclasses.asdict(r), "extra": r.extra, "holds": r.holds} for r in found]
        write_json({"bytes": nbytes, "rows": rows})
    else:
        table = Table(
            "case", "s", "peak above start", "of that kept", "extra", "bound", title="in MB"
        )
        for r in found:
            figures = (r.peak - r.start, r.kept, r.extra, r.bound)
            table.add_row(
                r.case,
                f"{r.seconds:.1f}",
                *("-" if n is None else f"{n / 1e6:.0f}" for n in figures),
                style=None if r.holds else "red",
            )
        Console().print(table)
    return 0 if all(r.holds for r in found) else 1
