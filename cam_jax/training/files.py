"""Folders that appear by rename: either all of a result is there, or none of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_folder(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write ``files`` (relative name to content) as ``folder``, replacing a folder of that name.

    The new folder is complete, and on the disk, before its name is; a reader never sees half of it.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        for name, content in files.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
