"""Text as batches of equal shape, so that one program per policy reads all of it.

Letters: W windows, R rows of a batch, S positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import Tokenizer

from cam_jax.errors import InputError
from cam_jax.training.heldout import shipped_heldout


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A text cut into windows of S tokens; each begins with the token that ended the one before.

    Every token but the very first thus is predicted exactly once.

    Attributes:
        ids: [W, S] int32, 0 on padding.
        valid: [W, S] bool; only the last window holds padding.
        num_bytes: of the text in UTF-8. Separators between documents cost bits and have no bytes.
    """

    ids: Int32[np.ndarray, "W S"]
    valid: Bool[np.ndarray, "W S"]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.valid[:, 1:].sum())

    def batches(
        self, rows: int
    ) -> Iterator[tuple[Int32[np.ndarray, "R S"], Bool[np.ndarray, "R S"]]]:
        """Consecutive windows, ``rows`` at a time; the last batch is filled up with empty rows."""
        spare = ((0, -len(self.ids) % rows), (0, 0))
        ids, valid = np.pad(self.ids, spare), np.pad(self.valid, spare)
        for start in range(0, len(ids), rows):
            yield ids[start : start + rows], valid[start : start + rows]


def read_texts(path: Path | None) -> list[str]:
    """The documents of a file or of a folder of .txt files; None: the text that is shipped.

    Raises:
        InputError: nothing there, nothing in it, or not UTF-8.
    """
    if path is None:
        return [document.text for document in shipped_heldout()]
    if not path.exists():
        raise InputError(f"text {path} does not exist: give a text file or a folder of .txt files")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"text {path} holds no .txt file")
    texts = [_read(file) for file in files]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise InputError(f"text {path} is empty")
    return texts


def beginnings(texts: Sequence[str], share: float) -> list[str]:
    """The first ``share`` of every document, in whole lines (at least one).

    Raises:
        InputError: a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: expected more than 0 and at most 1")
    if share == 1:
        return list(texts)
    shortened = []
    for text in texts:
        end = text.find("\n", int(len(text) * share))
        shortened.append(text if end < 0 else text[: end + 1])
    return shortened


def cut(
    texts: Sequence[str], tokenizer: Tokenizer, *, separator: int | None, length: int
) -> Windows:
    """Tokens of all documents as one stream, cut into windows.

    Args:
        texts: documents.
        tokenizer: of the model.
        separator: the id that stands before, between and after documents; None for none.
        length: S, at least 2.
    """
    between = [] if separator is None else [separator]
    stream = list(between)
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        stream += [*encoding.ids, *between]
    if len(stream) < 2:
        raise InputError("text holds fewer than two tokens: there is nothing to predict")
    step = length - 1
    count = -(-(len(stream) - 1) // step)
    ids = np.zeros((count, length), np.int32)
    valid = np.zeros((count, length), np.bool_)
    for row in range(count):
        part = stream[row * step : row * step + length]
        ids[row, : len(part)] = part
        valid[row, : len(part)] = True
    return Windows(ids=ids, valid=valid, num_bytes=sum(len(text.encode()) for text in texts))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text {file} cannot be read as UTF-8: {error}") from error
