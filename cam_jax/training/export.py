"""The finished model as a Hugging Face folder: OLMoE format, bfloat16, tokenizer, README."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from cam_jax.conversion.save import save_hf
from cam_jax.models.config import DecoderConfig
from cam_jax.models.decoder import unstack_params
from cam_jax.training.readme import readme
from cam_jax.training.settings import TrainDemo, hf_config
from cam_jax.training.tokenizer import EOS, PAD, SPECIALS


def export(
    folder: Path,
    *,
    settings: TrainDemo,
    config: DecoderConfig,
    params: Any,
    tokenizer: Tokenizer,
    metrics: Mapping[str, Any],
) -> None:
    """Write config, weights, generation config, tokenizer, metrics.json and README.md.

    ``folder`` appears by rename, complete; a model in a folder of that name is replaced.

    Raises:
        CheckpointError: the folder holds something else, or cannot be written.
    """
    description = hf_config(settings, vocab_size=config.vocab_size)
    files = {
        "generation_config.json": _json(
            {"eos_token_id": SPECIALS.index(EOS), "pad_token_id": SPECIALS.index(PAD)}
        ),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS,
                "pad_token": PAD,
                "model_max_length": description["max_position_embeddings"],
            }
        ),
        "metrics.json": _json(metrics),
        "README.md": readme(settings, metrics),
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name, text in files.items():
            Path(temporary, name).write_text(text, encoding="utf-8")
        save_hf(
            folder,
            description,
            _Bfloat16(unstack_params(config, params)),
            companions=[Path(temporary, name) for name in files],
            overwrite=True,
        )


def as_exported(params: Any) -> Any:
    """The parameters as the export holds them: rounded to bfloat16 (returned in float32)."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


@dataclass(frozen=True)
class _Bfloat16(Mapping[str, np.ndarray]):
    """Leaves, each rounded when it is asked for."""

    leaves: Mapping[str, Any]

    def __getitem__(self, path: str) -> np.ndarray:
        return np.asarray(jnp.asarray(self.leaves[path]).astype(jnp.bfloat16))

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
