"""A bar with bytes, speed and time left, on standard error."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cam_jax.cli.console import messages


@contextlib.contextmanager
def byte_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """What to give as `progress`: called with (bytes done, bytes in all); shown once it is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=messages())
    task = bar.add_task(description, total=None)

    def update(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
