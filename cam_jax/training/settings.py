"""What a training of the demo model is: its shape, its length, its places. One frozen value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.training.tokenizer import EOS, PAD, SPECIALS

# Options that say where results go, and when, but not what they are.
_PLACES = frozenset({"output", "checkpoints", "checkpoint_every", "export_every"})


@dataclass(frozen=True, kw_only=True)
class TrainDemo:
    """Options of `cam-jax train-demo`. The defaults are those of the model that the package ships.

    Attributes:
        output: folder of the finished model, in Hugging Face's OLMoE format.
        checkpoints: folder of the Orbax checkpoints, from which a run that was killed goes on; its
            text is kept beside it, in `<checkpoints>_text`.
        steps: optimiser steps. The learning rate's course depends on their number.
        batch: sequences a step.
        length: tokens a sequence.
        peak_lr: learning rate of AdamW after the warm-up; it then falls to `final_lr` on a cosine.
        final_lr: learning rate at the end.
        warmup: steps of linear warm-up.
        weight_decay: of matrices; norm weights have none.
        clip: largest norm of a step's gradient.
        capacity_factor: ceiling of every expert's load during training (kept by score, over all
            tokens of the step); None trains without.
        layers: L.
        hidden: D.
        heads: H; divides D.
        expert_hidden: F.
        experts: E.
        top_k: K.
        vocab_size: V of the tokenizer, which is trained too.
        tie_embeddings: whether the output projection is the embedding table.
        initializer_range: standard deviation of the first weights.
        checkpoint_every: steps between checkpoints.
        export_every: steps between exports `<output>_step_<n>` before the end; 0 for none.
        seed: of the first weights and of the order of the text.
    """

    output: Path = Path("demo_model")
    checkpoints: Path = Path("demo_model_checkpoints")
    steps: int = 4800
    batch: int = 8
    length: int = 256
    peak_lr: float = 4e-3
    final_lr: float = 4e-5
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    capacity_factor: float | None = 2.0
    layers: int = 6
    hidden: int = 160
    heads: int = 5
    expert_hidden: int = 48
    experts: int = 32
    top_k: int = 4
    vocab_size: int = 2048
    tie_embeddings: bool = True
    initializer_range: float = 0.04
    checkpoint_every: int = 200
    export_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1), ("batch", 1), ("length", 1), ("warmup", 0), ("checkpoint_every", 1),
            ("export_every", 0), ("layers", 1), ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least {least}")
        for name in ("peak_lr", "clip", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number above 0")

    def arithmetic(self) -> dict[str, Any]:
        """The options that decide what the parameters become: a resumed run must share them."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in _PLACES}

    def recipe(self) -> TrainDemo:
        """These options with the places at their defaults: equal for runs that compute the same."""
        return TrainDemo(**self.arithmetic())


def hf_config(settings: TrainDemo, *, vocab_size: int) -> dict[str, Any]:
    """The config.json of the model, as transformers' OlmoeConfig writes it."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "clip_qkv": None,
        "eos_token_id": SPECIALS.index(EOS),
        "hidden_act": "silu",
        "hidden_size": settings.hidden,
        "initializer_range": settings.initializer_range,
        "intermediate_size": settings.expert_hidden,
        "max_position_embeddings": 4 * settings.length,
        "norm_topk_prob": False,
        "num_attention_heads": settings.heads,
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.top_k,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": settings.heads,
        "output_router_logits": False,
        "pad_token_id": SPECIALS.index(PAD),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": settings.tie_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }
