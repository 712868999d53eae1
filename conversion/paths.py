"""Paths that callers give, checked once: what the file system cannot even look up is refused."""

from pathlib import Path

from cam_jax.errors import CheckpointError


def local_path(path: str | Path) -> Path:
    """path with `~` expanded; it need not exist.

    Raises CheckpointError: neither a text nor a Path, empty, with a NUL character, or one that the
    system refuses to look up (too long, a loop of links, a folder that may not be searched).
    """
    if not isinstance(path, str | Path):
        raise CheckpointError(
            f"a path must be a text or a pathlib.Path, got a {type(path).__name__}; "
            "give the directory of the checkpoint."
        )
    text = str(path)
    if not text:
        raise CheckpointError("a path is empty; give the directory of the checkpoint.")
    if "\0" in text:
        raise CheckpointError(
            f"the path {text[:100]!r} holds a NUL character, which no file name can; remove it."
        )
    try:
        found = Path(path).expanduser()
        found.exists()  # the system's own limits show here, and not in the middle of some work
    # RuntimeError is `~name` of somebody who is not there.
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_be_used(text, error) from error
    return found


def real_path(path: str | Path) -> Path:
    """`local_path`, absolute and with links followed. Raises CheckpointError as that."""
    found = local_path(path)
    try:
        found = found.resolve()
        found.exists()  # the name that a relative path or a link stands for may be too long
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_be_used(str(path), error) from error
    return found


def _cannot_be_used(text: str, error: Exception) -> CheckpointError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CheckpointError(
        f"the path {text[:100]!r} cannot be used: {reason[:200]}. Give another one."
    )
