"""A tiny language model, built once and shared: every new program costs seconds."""

from functools import cache

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from cam_jax.inference import LanguageModel, SpecialTokens
from tests.models.tiny import olmoe, params_of

VOCABULARY = 50
POSITIONS = 64


@cache
def model() -> LanguageModel:
    """Two layers, six experts, no tokenizer, no EOS."""
    config = olmoe(num_hidden_layers=2, max_position_embeddings=POSITIONS)
    return LanguageModel(config=config, params=params_of(config))


def with_special(**ids) -> LanguageModel:
    """The same model with other special tokens."""
    lm = model()
    return LanguageModel(config=lm.config, params=lm.params, special=SpecialTokens(**ids))


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Lower-case letters, space and full stop; id 0 is BOS, which a template adds if asked."""
    words = ["<s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "."]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token=None)
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str, extra: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), padded on one side with ids that no model has."""
    width = max(map(len, rows)) + extra
    ids = np.full((len(rows), width), -100)
    mask = np.zeros((len(rows), width), int)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask
