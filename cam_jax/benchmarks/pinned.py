"""Processes of this machine that have a core of their own, and that end with who started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cam_jax.errors import DistributedError, InputError

# A process that fails ends the others within a second or so; the rest are ended after this.
_GRACE = 10.0


def free_cores() -> list[int]:
    """The cores that this process may use, one of each physical core first.

    Raises:
        InputError: a system that does not pin processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise InputError(f"{sys.platform} does not pin processes to cores; this needs Linux")
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for core in sorted(os.sched_getaffinity(0)):
        physical = _siblings(core)
        (second if physical in seen else first).append(core)
        seen.add(physical)
    return first + second


def pick_cores(number: int) -> list[int]:
    """One core for each of so many processes.

    Raises:
        InputError: fewer cores.
    """
    cores = free_cores()
    if len(cores) < number:
        raise InputError(
            f"{number} processes need a core each, this process may use {len(cores)} "
            f"({', '.join(map(str, cores))}): they would wait for each other's core, and the times "
            "would say nothing"
        )
    return cores[:number]


def separate(cores: Sequence[int]) -> bool:
    """Whether no two of them are threads of the same physical core."""
    return len({_siblings(core) for core in cores}) == len(cores)


def pin(core: int) -> None:
    """Keep this process, and threads that it starts from now on, on one core.

    Before JAX looks for devices: it starts as many threads as it sees cores.

    Raises:
        InputError: not a core that this process may use.
    """
    if core not in free_cores():
        raise InputError(f"--core {core}: this process may use {free_cores()}")
    os.sched_setaffinity(0, {core})


def free_port() -> int:
    """A TCP port that nobody uses right now."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def run_together(commands: Sequence[Sequence[str]], *, seconds: float) -> None:
    """Run the commands at the same time; none is left when this returns, whatever happens.

    They write where this process does.

    Raises:
        DistributedError: one failed, or the time was up.
    """
    began = time.monotonic()
    started: list[subprocess.Popen[bytes]] = []
    with _sigterm_raises():
        try:
            for command in commands:
                started.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                )
            deadline = began + seconds
            while any(process.poll() is None for process in started):
                if time.monotonic() > deadline:
                    break
                if any(process.returncode for process in started):
                    deadline = min(deadline, time.monotonic() + _GRACE)
                time.sleep(0.05)
        finally:
            codes = [process.poll() for process in started]
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for i, code in enumerate(codes):
        if code:
            raise DistributedError(f"process {i} ended with exit code {code}: see its message")
    if None in codes:
        raise DistributedError(f"not finished within {seconds:g} s, ended")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Who ends this process by SIGTERM ends those that it started too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _siblings(core: int) -> str:
    """The threads of this one's physical core; itself where the system does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(core)
