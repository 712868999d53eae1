"""A tiny checkpoint with a tokenizer, as the demo reads one."""

import json
from pathlib import Path

from cam_jax.conversion import save_hf
from cam_jax.models.params import unstack_params
from cam_jax.models.registry import read_config
from cam_jax.training.tokenizer import train_tokenizer
from tests.models.tiny import OLMOE, params_of

TEXT = "The quick brown fox jumps over the lazy dog. Ünïcödé, too: 1, 2, 3!\n" * 9


def write(folder: Path, *, tokenizer: bool = True) -> Path:
    """Two layers of eight experts; byte-level BPE of 270 tokens."""
    bpe = train_tokenizer([TEXT], vocab_size=270)
    config = OLMOE | {
        "vocab_size": bpe.get_vocab_size(),
        "num_hidden_layers": 2,
        "num_experts": 8,
        "eos_token_id": 0,
    }
    companions = []
    if tokenizer:
        companions = [folder / "tokenizer.json", folder / "generation_config.json"]
        bpe.save(str(companions[0]))
        companions[1].write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 1}))
    decoder = read_config(config)
    leaves = unstack_params(decoder, params_of(decoder))
    return save_hf(folder / "model", config, leaves, companions=companions)
