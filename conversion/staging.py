"""A directory that appears complete or not at all: made beside its place, then renamed.

What an interrupted call leaves behind is hidden (".name.*.tmp") and locked by nobody; the next call
for the same place clears it away.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cam_jax.conversion.files import COMPANIONS, CONFIG, MARKER, WEIGHTS
from cam_jax.conversion.header import read_json
from cam_jax.conversion.paths import real_path
from cam_jax.errors import CheckpointError, ConfigError
from cam_jax.models.registry import family_of

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows; what a crash leaves there stays until somebody removes it
    HAS_LOCKS = False

# What directories of models hold, here and on the hub. Anything else is somebody's work.
_KNOWN_FILE = re.compile(
    "|".join(
        (
            *map(re.escape, (CONFIG, MARKER, *COMPANIONS)),
            r".*\.safetensors(\.index\.json)?",
            r"pytorch_model.*\.bin(\.index\.json)?",
            r"tokenizer\.model(\.v\d+)?|tekken\.json",
            r"added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template\.json",
            r"(preprocessor|processor|quantize|quantization)_config\.json",
            r"(configuration|modeling|tokenization)_\w+\.py",  # of models that bring their code
            r"README\.md|LICENSE.*|NOTICE.*|\.gitattributes",
        )
    )
)


def refuse_existing(target: Path, overwrite: bool, companions: Iterable[Path] = ()) -> None:
    """Raise CheckpointError if something stands at target that must not be replaced.

    An empty directory may be; with `overwrite` a checkpoint (of either kind) too, if it holds
    nothing that checkpoints do not hold.

    Args:
        target: what `plan.directory_of` gave.
        companions: files that are to be copied into the new directory. They must not lie in the old
            one; files of their names may be replaced.
    """
    companions = tuple(map(Path, companions))
    target = real_path(target)
    _bring_back(target)
    try:
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
    except OSError as error:
        raise _cannot_look(target, error) from error
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; give another path, or overwrite=True (--overwrite)."
        )
    try:
        _refuse_other_things(target, {file.name for file in companions})
    except OSError as error:
        raise _cannot_look(target, error) from error
    for file in companions:
        # The link and what it leads to: either would go with the directory.
        if any(p.is_relative_to(target) for p in (real_path(file.parent), real_path(file))):
            raise CheckpointError(
                f"{file} is to be copied, but lies in {target}, which would be replaced; give "
                "another path."
            )


def _cannot_look(target: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or str(error)
    return CheckpointError(f"{target} cannot be looked into: {reason}. Give another path.")


def _refuse_other_things(target: Path, expected: Collection[str]) -> None:
    """Raise CheckpointError unless a directory is a checkpoint and holds nothing else."""
    if not (target / CONFIG).is_file():
        raise CheckpointError(f"{target} is not a checkpoint (no {CONFIG}) and is left alone.")
    is_orbax = (target / MARKER).is_file()
    if not is_orbax:
        try:
            family_of(read_json(target / CONFIG))
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(
                f"{target} is not a checkpoint of a known model ({str(error)[:200]}) and is left "
                "alone; give another path."
            ) from error
    unknown = sorted(
        path.name
        for path in target.iterdir()
        if not (path.is_file() and (path.name in expected or _KNOWN_FILE.fullmatch(path.name)))
        and not _is_known_folder(path, is_orbax)
    )
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        shown = ", ".join(repr(name[:100]) for name in unknown[:3])
        raise CheckpointError(
            f"{target} is not only a checkpoint (it also holds {shown}{more}) and is left alone; "
            "move those away, or give another path."
        )


def _is_known_folder(path: Path, is_orbax: bool) -> bool:
    """The weights of an Orbax checkpoint, or what the hub's client notes down beside a download."""
    if path.is_symlink() or not path.is_dir():
        return False
    if path.name == WEIGHTS and is_orbax:
        return all(re.fullmatch("[0-9]+", part.name) for part in path.iterdir())
    return path.name == ".cache" and [entry.name for entry in path.iterdir()] == ["huggingface"]


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
    made: list[Path] = []
    try:
        made = [parent for parent in target.parents if not parent.exists()]
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
    finally:
        for parent in made:  # the innermost first; those that are in use by now stay
            with contextlib.suppress(OSError):
                parent.rmdir()


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
    for left in _leftovers(target, "tmp"):
        with contextlib.suppress(OSError), _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    for aside in _leftovers(target, "old"):
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _bring_back(target: Path) -> None:
    """Undo half of a replacement that was killed between its two renames."""
    if target.exists():
        return
    for aside in _leftovers(target, "old"):
        try:
            aside.rename(target)
        except FileNotFoundError:  # another call was faster
            continue
        except OSError as error:
            # Going on would let the next call take it for something that was replaced long ago.
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"{aside}, what an interrupted call left of {target}, cannot be moved back: "
                f"{reason}. Rename or remove it."
            ) from error
        return


def _leftovers(target: Path, kind: str) -> list[Path]:
    """Directories of calls for target, and for no name that merely begins like its own."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{kind}")
    try:
        return sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name))
    except OSError:  # no such folder yet, or one that may not be listed
        return []


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
