"""A directory that appears complete or not at all: made beside its place, then renamed.

What an interrupted call leaves behind is hidden (".name.*.tmp") and locked by nobody; the next call
for the same place clears it away.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from cam_jax.conversion.files import CONFIG
from cam_jax.errors import CheckpointError

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows; what a crash leaves there stays until somebody removes it
    HAS_LOCKS = False


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError if something stands at target that must not be replaced.

    An empty directory may be; with `overwrite` a checkpoint (of either kind) too.
    """
    _bring_back(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another path or overwrite=True.")
    if not (target / CONFIG).is_file():
        raise CheckpointError(f"{target} is not a checkpoint (no {CONFIG}) and is left alone.")


@contextlib.contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary directory to fill, which stands at target once the block ends without an error.

    Args:
        target: where; checked by `refuse_existing` before.
        overwrite: replace what is there (it moves aside first, and comes back if that fails).

    Raises CheckpointError for an operating system's error within the block or here (disk full, no
    right to write, something at target in the meantime).
    """
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(target)
        temporary.mkdir()
        try:
            with _locked(temporary):
                yield temporary
                _flush(temporary)
                _into_place(temporary, target, overwrite)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{target} cannot be written: {reason}.") from error


def _into_place(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename; what was there moves aside first and comes back if the rename fails."""
    if not overwrite or not target.exists() or not any(target.iterdir()):
        temporary.rename(target)  # fails if something has appeared there in the meantime
        return
    aside = temporary.with_suffix(".old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


def _clear_stale(target: Path) -> None:
    """Remove what calls that were killed have left for this target; running ones hold a lock."""
    for left in target.parent.glob(f".{_escape(target.name)}.*.tmp"):
        with contextlib.suppress(OSError), _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    for aside in target.parent.glob(f".{_escape(target.name)}.*.old"):
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _bring_back(target: Path) -> None:
    """Undo half of a replacement that was killed between its two renames."""
    if not target.exists():
        for aside in target.parent.glob(f".{_escape(target.name)}.*.old"):
            aside.rename(target)
            return


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock if it is free; it ends with the process, however that ends."""
    if not HAS_LOCKS:
        yield False
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # somebody's, or a file system without locks
            free = False
        yield free
    finally:
        os.close(handle)


def _flush(directory: Path) -> None:
    """All file contents to the disk, so that no power cut can leave a name without its bytes."""
    for folder, _, names in os.walk(directory):
        for name in names:
            handle = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
