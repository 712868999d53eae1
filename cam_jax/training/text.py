"""The text of a training, ready to use; kept beside the checkpoints for a resumed run.

What text a machine holds changes when packages are installed or Python is updated. A training that
goes on after that must not notice.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from cam_jax.training.corpus import Document, fingerprint, gather, split
from cam_jax.training.files import write_folder
from cam_jax.training.heldout import shipped_heldout
from cam_jax.training.measure import Heldout
from cam_jax.training.settings import TrainDemo
from cam_jax.training.tokenizer import encode_documents, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """Attributes:
    tokenizer: trained on this text.
    stream: all of it as tokens, EOS between documents.
    corpus: fingerprint of the documents.
    size: in bytes.
    """

    tokenizer: Tokenizer
    stream: Int[np.ndarray, " N"]
    corpus: str
    size: int


def prepare(
    settings: TrainDemo,
    *,
    training: Sequence[Document] | None = None,
    heldout: Sequence[Document] | None = None,
) -> tuple[TrainingText, Heldout]:
    """The text of a training: what was written beside its checkpoints, else this machine's.

    Args:
        settings: the options.
        training, heldout: other documents than this machine's and the package's.
    """
    heldout = shipped_heldout() if heldout is None else heldout
    folder = text_folder(settings)
    if training is None and (text := _read(folder, vocab_size=settings.vocab_size)):
        return text, Heldout.of(heldout, text.tokenizer)
    if training is None:
        training, _ = split(gather(), shipped=heldout)
    texts = [document.text for document in training]
    tokenizer = train_tokenizer(texts, vocab_size=settings.vocab_size)
    text = TrainingText(
        tokenizer=tokenizer,
        stream=encode_documents(tokenizer, texts),
        corpus=fingerprint(training),
        size=sum(len(text.encode()) for text in texts),
    )
    return text, Heldout.of(heldout, tokenizer)


def text_folder(settings: TrainDemo) -> Path:
    """Where `write` puts the text: next to the checkpoints."""
    return settings.checkpoints.with_name(f"{settings.checkpoints.name}_text")


def write(settings: TrainDemo, text: TrainingText) -> None:
    """Keep the text for later calls."""
    tokens = io.BytesIO()
    np.save(tokens, text.stream)
    facts = {"corpus": text.corpus, "size": text.size, "vocab_size": settings.vocab_size}
    write_folder(
        text_folder(settings),
        {
            "stream.npy": tokens.getvalue(),
            "tokenizer.json": text.tokenizer.to_str(),
            "text.json": json.dumps(facts),
        },
    )


def _read(folder: Path, *, vocab_size: int) -> TrainingText | None:
    """What `write` wrote, unless it is not there or is for another vocabulary."""
    if not folder.is_dir():
        return None
    facts = json.loads((folder / "text.json").read_text())
    if facts["vocab_size"] != vocab_size:
        return None
    return TrainingText(
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        stream=np.load(folder / "stream.npy"),
        corpus=facts["corpus"],
        size=facts["size"],
    )
