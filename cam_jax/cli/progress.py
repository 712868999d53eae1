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
    """What to give as `progress`: called with (bytes done, bytes in all); shown once it is.

    On a terminal the bar goes away at the end. Elsewhere (a log) there is one line of what was
    done, unless an error comes first: its message is to be the only one.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = messages()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(description, total=None)

    called = False

    def update(done: int, total: int) -> None:
        nonlocal called
        called = True
        if console.is_interactive:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:  # stopping one that is not would print an empty line
            bar.stop()
    if called and not console.is_interactive:
        console.print(bar)
