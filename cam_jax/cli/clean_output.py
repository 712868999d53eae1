"""Keeps what libraries print out of a command's result."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_ours() -> Iterator[None]:
    """Inside, what anything writes to standard output goes to standard error.

    Gloo, JAX's engine for several processes on CPU, announces its connections on the file
    descriptor itself, where `contextlib.redirect_stdout` does not reach.
    """
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)
