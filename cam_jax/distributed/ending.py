"""How a process ends when something is wrong: with a message, and at once.

Python's own way out waits for the other processes in JAX's shutdown barrier, while they wait for
this one in a collective.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import jax

from cam_jax.errors import CamError


@dataclass(frozen=True)
class Hooks:
    """What Python called on an uncaught exception before `install` changed it."""

    main: Callable[..., Any]
    thread: Callable[..., Any]

    def restore(self) -> None:
        sys.excepthook, threading.excepthook = self.main, self.thread


def install(name: str) -> Hooks:
    """From now on an uncaught exception in any thread ends the process at once.

    Args:
        name: what the process is called in the message: "process 1 of 4".
    """
    before = Hooks(sys.excepthook, threading.excepthook)

    def main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_with(name, error)

    def thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
            end_with(name, arguments.exc_value)

    sys.excepthook, threading.excepthook = main, thread
    return before


def end_with(name: str, error: BaseException) -> NoReturn:
    """Print the error (a `CamError` without its traceback, as the command line does) and end."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        what = "" if isinstance(error.code, int) else f": {error.code}"
        end(code, f"cam-jax: {name} ends with exit code {code}{what}")
    if isinstance(error, KeyboardInterrupt):
        end(130, f"cam-jax: {name}: interrupted")
    ours = isinstance(error, CamError)
    said = f"cam-jax: {name}: error: {type(error).__name__}: {' '.join(str(error).split())}"
    if not ours or os.environ.get("CAM_JAX_DEBUG", "0") not in ("", "0"):
        said = "".join(traceback.format_exception(error)) + said
    if isinstance(error, jax.errors.JaxRuntimeError):
        said += "\ncam-jax: another process may have ended first: look at its messages"
    end(2 if ours else 1, said)


def end(code: int, message: str) -> NoReturn:
    """Print and end, without Python's clean-up."""
    with suppress(Exception):  # a closed pipe must not keep the process alive
        sys.stdout.flush()
    _say(message)
    os._exit(code)


@contextmanager
def ends_after(seconds: float, message: str) -> Iterator[None]:
    """End the process with ``message`` if the block takes longer; the block may be in C++."""
    with _timer(seconds, lambda: end(2, message)):
        yield


@contextmanager
def says_after(seconds: float, message: str) -> Iterator[None]:
    """Print ``message`` if the block takes longer."""
    with _timer(seconds, lambda: _say(message)):
        yield


@contextmanager
def _timer(seconds: float, call: Callable[[], Any]) -> Iterator[None]:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(message: str) -> None:
    with suppress(Exception):
        print(message, file=sys.stderr, flush=True)
