"""Starts real Python processes, waits for them, and leaves none behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Exit code, negative for a signal; None: it had to be killed when the time was up."""
    seconds: float
    """From the start of the first process."""
    output: str
    """Standard output and standard error together, unless they were asked for apart."""
    errors: str = ""
    """Standard error, if asked for apart."""


def free_port() -> int:
    """A TCP port that nobody uses right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_processes(
    commands: Sequence[Sequence[str]],
    *,
    timeout: float,
    environment: dict[str, str] | None = None,
    wait_for: Sequence[int] | None = None,
    separate_errors: bool = False,
) -> list[Ended]:
    """Run ``python ARGUMENTS`` for each of ``commands`` at the same time, in the repository's root.

    Each is the head of a process group of its own, which is killed before this returns.

    Args:
        timeout: seconds until those that are left are killed.
        environment: added to this process's; JAX_PLATFORMS is "cpu", XLA_FLAGS compile fast.
        wait_for: return when these have ended; None: all.
        separate_errors: keep standard output and standard error apart.
    """
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # as in conftest
    }
    env |= environment or {}
    began = time.monotonic()
    started: list[subprocess.Popen[bytes]] = []
    ended: dict[int, float] = {}
    awaited = set(range(len(commands)) if wait_for is None else wait_for)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(len(commands))]
        try:
            for log, arguments in zip(logs, commands, strict=True):
                with log.open("wb") as stream, _errors(log).open("wb") as errors:
                    started.append(
                        subprocess.Popen(
                            [sys.executable, *arguments],
                            cwd=ROOT,
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=stream,
                            stderr=errors if separate_errors else subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            while not awaited <= ended.keys() and time.monotonic() - began < timeout:
                for i, process in enumerate(started):
                    if i not in ended and process.poll() is not None:
                        ended[i] = time.monotonic() - began
                time.sleep(0.05)
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            Ended(
                code=process.returncode if i in ended else None,
                seconds=ended.get(i, timeout),
                output=log.read_text(errors="replace"),
                errors=_errors(log).read_text(errors="replace"),
            )
            for i, (process, log) in enumerate(zip(started, logs, strict=True))
        ]


def _errors(log: Path) -> Path:
    return log.with_suffix(".err")


def report(results: Sequence[Ended]) -> str:
    """Everything about the processes, for the message of a failed assertion."""
    return "\n".join(
        f"--- process {i}: code {r.code} after {r.seconds:.1f} s\n"
        f"{r.output[-3000:]}{r.errors[-3000:]}"
        for i, r in enumerate(results)
    )
