"""Real text that every machine with Python has: documentation topics, library source, licences.

The split into training and held-out text goes by *file* (by topic for the documentation) and only
by its name, so it is the same on every machine and for every Python version. The held-out text
which the package ships was drawn from that held-out side once. Passages of it that stand in
training files as well (one topic quotes another, two licences share a clause) are cut out of the
training side.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cam_jax.errors import InputError

Domain = Literal["documentation", "source", "licence"]
DOMAINS: tuple[Domain, ...] = ("documentation", "source", "licence")

# One name in this many is held out. Topics are few, library files many.
HELDOUT_ONE_IN: dict[Domain, int] = {"documentation": 7, "source": 24, "licence": 12}
# This licence is held out whatever its name hashes to: it has to go with the shipped text anyway.
PYTHON_LICENCE = "PYTHON"
# A run of this many equal lines (blank ones and indentation aside) is a copy, not a coincidence.
SHARED_RUN = 6
# What is left of a document after cutting is kept if it is at least this long.
MIN_CHARACTERS = 400

# Not what a person wrote for reading (tests, tables), or not Python's own.
_SKIPPED_DIRECTORIES = frozenset(
    [
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "encodings",
        "lib-dynload",
    ]
)
_SKIPPED_FILES = re.compile(
    r"(^|/)(_sysconfigdata.*|pydoc_data/topics|html/entities|stringprep)\.py$"
)
_LICENCE_NAME = re.compile(r"^(licen[cs]e|copying)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file of the corpus. ``name`` is unique in its domain and the same on every machine."""

    domain: Domain
    name: str
    text: str

    @property
    def heldout(self) -> bool:
        """Whether the split, which looks only at domain and name, holds this document out."""
        if self.domain == "licence" and self.name == PYTHON_LICENCE:
            return True
        return self.rank % HELDOUT_ONE_IN[self.domain] == 0

    @property
    def rank(self) -> int:
        """A number that depends on domain and name only, spread evenly."""
        digest = hashlib.sha256(f"{self.domain}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "big")


def gather() -> list[Document]:
    """All documents of this machine's Python installation, sorted by domain and name.

    Raises ``InputError`` when the installation holds no library source (an embedded Python without
    it).
    """
    library = Path(sysconfig.get_path("stdlib"))
    documents = [*_topics(), *_source(library), *_licences(library)]
    if not any(document.domain == "source" for document in documents):
        raise InputError(
            f"{library} holds no .py files: train with a Python that has its library's source"
        )
    return sorted(documents, key=lambda document: (document.domain, document.name))


def _topics() -> Iterable[Document]:
    from pydoc_data.topics import topics  # about a megabyte: only where it is needed

    for name, text in topics.items():
        yield Document(domain="documentation", name=name, text=_clean(text))


def _source(library: Path) -> Iterable[Document]:
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(set(folders) - _SKIPPED_DIRECTORIES)
        for file in sorted(files):
            path = Path(folder, file)
            name = path.relative_to(library).as_posix()
            wanted = file.endswith(".py") and not _SKIPPED_FILES.search(name)
            if wanted and (text := _read(path)):
                yield Document(domain="source", name=name, text=text)


def _licences(library: Path) -> Iterable[Document]:
    """Python's own licence, a Debian system's common ones, and those of installed packages.

    Most packages repeat the same three licences, so passages that came before are left out.
    """
    paths = [(PYTHON_LICENCE, library / "LICENSE.txt")]
    common = Path("/usr/share/common-licenses")
    paths += [(path.name, path) for path in sorted(common.glob("*")) if not path.is_symlink()]
    packages = Path(sysconfig.get_path("purelib"))
    for path in sorted(packages.glob("*.dist-info/**/*")):
        if _LICENCE_NAME.match(path.name):
            # Without the version, which is not the same on every machine.
            info, *inside = path.relative_to(packages).parts
            paths.append(("/".join([info.split("-")[0].lower(), *inside]), path))
    seen: set[int] = set()
    for name, path in paths:
        if text := _read(path):
            whole = Document(domain="licence", name=name, text=text)
            document = cut_runs(whole, seen)
            seen |= run_hashes([whole])
            if len(document.text) >= MIN_CHARACTERS:
                yield document


def _read(path: Path) -> str | None:
    """The file's text, or None for what is not one (absent, empty, a folder, not UTF-8)."""
    try:
        return _clean(path.read_bytes().decode("utf-8")) if path.is_file() else None
    except UnicodeDecodeError:
        return None


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\f", "\n").strip("\n") + "\n" if text.strip() else ""


def split(
    documents: Iterable[Document], *, shipped: Iterable[Document] = ()
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, without a shared run of lines between the two.

    ``shipped`` is the held-out text that comes with the package: it counts as held out whatever
    files this machine has, but is not added to the second list.
    """
    documents = list(documents)
    heldout = [document for document in documents if document.heldout]
    forbidden = run_hashes([*heldout, *shipped])
    training = (cut_runs(document, forbidden) for document in documents if not document.heldout)
    return [document for document in training if len(document.text) >= MIN_CHARACTERS], heldout


def run_hashes(documents: Iterable[Document], length: int = SHARED_RUN) -> frozenset[int]:
    """Hashes of all runs of ``length`` consecutive non-blank lines, indentation ignored."""
    return frozenset(
        key for document in documents for key, _ in _runs(document.text.split("\n"), length)
    )


def cut_runs(document: Document, forbidden: Set[int], length: int = SHARED_RUN) -> Document:
    """The document without the lines that belong to a run in ``forbidden``."""
    lines = document.text.split("\n")
    cut = {i for key, where in _runs(lines, length) if key in forbidden for i in where}
    if not cut:
        return document
    return replace(document, text="\n".join(x for i, x in enumerate(lines) if i not in cut))


def _runs(lines: Sequence[str], length: int) -> Iterable[tuple[int, list[int]]]:
    solid = [i for i, line in enumerate(lines) if line.strip()]
    for start in range(len(solid) - length + 1):
        where = solid[start : start + length]
        key = hashlib.blake2b(
            "\n".join(lines[i].strip() for i in where).encode(), digest_size=8
        ).digest()
        yield int.from_bytes(key, "big"), where


def fingerprint(documents: Iterable[Document]) -> str:
    """A short hash of all names and texts: two trainings saw the same corpus if it is equal."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.domain}/{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()[:16]
