"""A byte-level BPE tokenizer, trained on the training text, and the bytes of each token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from cam_jax.errors import ConfigError

# The spelling of OLMoE's own tokenizer.
EOS = "<|endoftext|>"
PAD = "<|padding|>"
SPECIALS = (EOS, PAD)
_BYTES = 256


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 2048) -> Tokenizer:
    """Train on ``texts``. Ids 0 and 1 are EOS and padding; any text at all round-trips."""
    if vocab_size < _BYTES + len(SPECIALS):
        raise ConfigError(
            f"vocab_size={vocab_size}: byte-level BPE needs {_BYTES + len(SPECIALS)} tokens or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> Int[np.ndarray, " V"]:
    """UTF-8 bytes that each token stands for; 0 for EOS and padding, which stand for none.

    A byte-level token spells each of its bytes as one character, so the sum over a text's tokens is
    exactly the length of the text in bytes: bits per byte need no decoding.
    """
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if token in SPECIALS else len(token)
    return sizes


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Int[np.ndarray, " N"]:
    """All texts as one stream of ids, EOS before the first, between two, and after the last."""
    eos = tokenizer.token_to_id(EOS)
    stream = [eos]
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        stream += encoding.ids
        stream.append(eos)
    return np.asarray(stream, np.int32)
