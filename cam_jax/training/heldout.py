"""The held-out text that the package ships: what the demo reads and the model is measured on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from cam_jax.errors import InputError
from cam_jax.training.corpus import DOMAINS, PYTHON_LICENCE, Document, Domain
from cam_jax.training.files import write_folder

# About 200 KB in all. Single files are bounded so that no one file is the whole domain.
_SOURCE_BYTES = 125_000
_SOURCE_FILE_BYTES = range(1_500, 40_000)
# A library file that names a licence or an owner of its own is not ours to pass on under Python's.
_OWN_TERMS = re.compile(r"licen[sc]e|copyright|\(c\)|all rights reserved", re.IGNORECASE)

_README = """\
# Held-out text

What the demo reads, and what the demo model is measured on. None of it, and no passage of it that
is six lines long, is in the model's training text (`cam_jax/training/corpus.py`).

| folder | what |
|---|---|
| `documentation` | topics of Python's own documentation, as `help()` prints them |
| `source` | files of Python's standard library that name no other owner or licence |
| `licence` | the licence of Python |

All of it is part of {version}, copyright (c) 2001-2023 Python Software Foundation, all rights
reserved, and is passed on under the PSF License Version 2. That licence, with the history it
belongs to, is `licence/PYTHON.txt` in this folder. The only changes: `/` in a name is written `__`,
form feeds are line breaks, blank lines at both ends are left out.
"""


def heldout_folder() -> Path:
    """Where the package keeps the held-out text: one folder a domain, one file a document."""
    return Path(str(resources.files("cam_jax"))) / "assets" / "heldout"


def shipped_heldout(domain: Domain | None = None) -> list[Document]:
    """The held-out documents that come with the package, sorted by domain and name.

    Raises ``InputError`` if there are none, as in a broken installation.
    """
    documents = [
        Document(domain=d, name=path.stem.replace("__", "/"), text=path.read_text("utf-8"))
        for d in sorted(DOMAINS if domain is None else (domain,))
        for path in sorted((heldout_folder() / d).glob("*.txt"))
    ]
    if not documents:
        raise InputError(f"{heldout_folder()} holds no text: install the package again")
    return documents


def choose(heldout: Iterable[Document]) -> list[Document]:
    """What of the held-out side is shipped: all topics, Python's licence, some of the source."""
    chosen, source_bytes = [], 0
    for document in sorted(heldout, key=lambda document: document.rank):
        size = len(document.text.encode())
        if document.domain == "documentation":
            chosen.append(document)
        elif document.domain == "licence":
            if document.name == PYTHON_LICENCE:
                chosen.append(document)
        elif (
            size in _SOURCE_FILE_BYTES
            and source_bytes + size <= _SOURCE_BYTES
            and not _OWN_TERMS.search(document.text)
        ):
            chosen.append(document)
            source_bytes += size
    return chosen


def write_heldout(documents: Iterable[Document], folder: Path, *, version: str) -> None:
    """Write the folder that ``shipped_heldout`` reads; ``version`` is the Python it comes from."""
    files = {
        f"{document.domain}/{document.name.replace('/', '__')}.txt": document.text
        for document in documents
    }
    write_folder(folder, {"README.md": _README.format(version=version), **files})
