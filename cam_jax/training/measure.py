"""What a trained model is worth: bits per byte on held-out text, and how skewed its routing is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from cam_jax.capacity import CapacityPolicy
from cam_jax.models.config import DecoderConfig
from cam_jax.models.decoder import forward, logits
from cam_jax.training.bigram import Bigram
from cam_jax.training.bits import bits_per_byte, windows
from cam_jax.training.corpus import DOMAINS, Document
from cam_jax.training.step import cross_entropy
from cam_jax.training.tokenizer import encode_documents, token_bytes


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """Held-out text as tokens: one stream per domain, and the bytes of every token."""

    streams: Mapping[str, Int[np.ndarray, " N"]]
    sizes: Int[np.ndarray, " V"]

    @classmethod
    def of(cls, documents: Iterable[Document], tokenizer: Tokenizer) -> Heldout:
        """Encode ``documents``; domains without one are left out."""
        documents = list(documents)
        texts = {d: [x.text for x in documents if x.domain == d] for d in DOMAINS}
        return cls(
            streams={d: encode_documents(tokenizer, t) for d, t in texts.items() if t},
            sizes=token_bytes(tokenizer),
        )

    def bits_per_byte(self, score: Any) -> dict[str, float]:
        """Per domain and in "all"; ``score(stream)`` gives log p of every token but the first."""
        found = {name: score(stream) for name, stream in self.streams.items()}
        result = {
            name: bits_per_byte(found[name], stream[1:], self.sizes)
            for name, stream in self.streams.items()
        }
        result["all"] = bits_per_byte(
            np.concatenate(list(found.values())),
            np.concatenate([stream[1:] for stream in self.streams.values()]),
            self.sizes,
        )
        return result


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A model on held-out text.

    Attributes:
        bits_per_byte: by domain, and "all".
        skew: per MoE layer, the most wanted expert's demand over the mean of all, on all the text.
    """

    bits_per_byte: Mapping[str, float]
    skew: tuple[float, ...]


def measure_bigram(bigram: Bigram, heldout: Heldout) -> dict[str, float]:
    """The baseline's bits per byte, by domain and in "all"."""
    return heldout.bits_per_byte(lambda s: bigram.log_probabilities(s[:-1], s[1:]))


def measure(
    config: DecoderConfig,
    params: Any,
    heldout: Heldout,
    *,
    length: int,
    batch: int = 8,
    policy: CapacityPolicy | None = None,
) -> Quality:
    """Read the held-out text in windows of ``length`` tokens, every token predicted once."""
    demand = np.zeros((config.num_moe_layers, config.moe.router.num_experts if config.moe else 0))

    def score(stream: Int[np.ndarray, " N"]) -> Float[np.ndarray, " M"]:  # M = N - 1
        inputs, targets = windows(stream, length, fill=0)
        spare = -len(inputs) % batch
        inputs = np.pad(inputs, ((0, spare), (0, 0)))
        targets = np.pad(targets, ((0, spare), (0, 0)), constant_values=-1)
        found = []
        for start in range(0, len(inputs), batch):
            rows = slice(start, start + batch)
            log_probabilities, asked = _score(config, params, inputs[rows], targets[rows], policy)
            found.append(np.asarray(log_probabilities))
            demand[:] += np.asarray(asked)
        flat = targets.reshape(-1)
        return np.concatenate(found).reshape(-1)[flat >= 0]

    bits = heldout.bits_per_byte(score)
    skew = demand.max(axis=1) / demand.mean(axis=1)
    return Quality(bits_per_byte=bits, skew=tuple(skew.tolist()))


@partial(jax.jit, static_argnames=("config", "policy"))
def _score(
    config: DecoderConfig,
    params: Any,
    inputs: Int[Array, "B S"],
    targets: Int[Array, "B S"],
    policy: CapacityPolicy | None,
) -> tuple[Float[Array, "B S"], Int[Array, "L E"]]:
    valid = targets >= 0
    hidden, _, load = forward(config, params, inputs, valid=valid, policy=policy)
    assert load is not None  # None is for models without MoE layers
    return -cross_entropy(logits(config, params, hidden), jnp.maximum(targets, 0)), load.demand


def figures(quality: Quality) -> dict[str, Any]:
    """As plain data, rounded to what is meaningful."""
    plain = dataclasses.asdict(quality)
    return {
        "bits_per_byte": {k: round(v, 4) for k, v in plain["bits_per_byte"].items()},
        "skew_per_layer": [round(v, 2) for v in plain["skew"]],
    }
