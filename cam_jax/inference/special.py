"""EOS, BOS and padding ids, from config.json and generation_config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from cam_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids with a meaning.

    Attributes:
        eos_ids: every id that ends a row.
        bos_id: the id that starts a text, if there is one; only used to recognise one that was
            added twice.
        pad_id: what stands after EOS.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int = 0

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None,
        *,
        vocab_size: int,
    ) -> "SpecialTokens":
        """The union of both files' EOS ids; BOS and padding from generation_config first.

        Raises:
            ConfigError: an id that is no integer (names the field). One outside the vocabulary
                can never be drawn and is left out.
        """
        files = [generation_config or {}, config.get("text_config") or {}, config]
        eos: list[int] = []
        for file in files:
            for token in _ids(file, "eos_token_id", vocab_size):
                if token not in eos:
                    eos.append(token)
        bos = [token for file in files for token in _ids(file, "bos_token_id", vocab_size)]
        pad = [token for file in files for token in _ids(file, "pad_token_id", vocab_size)]
        return cls(
            eos_ids=tuple(eos),
            bos_id=bos[0] if bos else None,
            pad_id=(pad or eos or [0])[0],
        )

    def eos_array(self, stop_at_eos: bool) -> Int32[np.ndarray, " n"]:
        """The EOS ids; -1, which is no token, in their place when rows do not stop. Same shape in
        both cases.
        """
        ids = np.full(max(1, len(self.eos_ids)), -1, np.int32)
        if stop_at_eos and self.eos_ids:
            ids[:] = self.eos_ids
        return ids

    def lengths(
        self, tokens: Int32[np.ndarray, "B N"], stop_at_eos: bool
    ) -> Int32[np.ndarray, " B"]:
        """Tokens of each row up to its first EOS, that one included."""
        ended = np.isin(tokens, self.eos_array(stop_at_eos))
        first = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, tokens.shape[1])
        return first.astype(np.int32)


def _ids(values: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    value = values.get(name)
    if value is None:
        return []
    found = list(value) if isinstance(value, list | tuple) else [value]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"config: {name}={value!r} must hold integers")
    # Some files say -1 for "none", or name a padding token that was never added to the vocabulary.
    return [token for token in found if 0 <= token < vocab_size]
