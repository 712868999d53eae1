"""Turns what a caller gives (text, id lists, arrays with a mask) into checked host arrays.

Letters: B rows, S positions, V vocabulary. A mask, never a token id, says what is padding; whatever
ids stand on padding are replaced by 0 here, so that no id out of range reaches a device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import Tokenizer

from cam_jax.errors import InputError
from cam_jax.inference.buckets import bucket


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids on the host, ready for a device.

    Attributes:
        ids: [B, S] int32, in [0, V), 0 on padding.
        valid: [B, S] bool, which positions are real.
        priority: [B, S] int32 or None.
    """

    ids: Int32[np.ndarray, "B S"]
    valid: Bool[np.ndarray, "B S"]
    priority: Int32[np.ndarray, "B S"] | None = None

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """Ids, mask and priority."""
        return self.ids, self.valid, self.priority

    @property
    def lengths(self) -> Int32[np.ndarray, " B"]:
        """Real tokens of each row."""
        return self.valid.sum(axis=1, dtype=np.int32)

    def pad_right(self, length: int) -> "Batch":
        """The same rows with padding at the end, up to ``length`` positions."""
        width = ((0, 0), (0, length - self.ids.shape[1]))
        return Batch(
            ids=np.pad(self.ids, width),
            valid=np.pad(self.valid, width),
            priority=None if self.priority is None else np.pad(self.priority, width),
        )

    def fill_rows(self, devices: int) -> "Batch":
        """The same rows, and empty ones at the end that make them divide over so many devices."""
        width = ((0, -len(self.ids) % devices), (0, 0))
        return Batch(
            ids=np.pad(self.ids, width),
            valid=np.pad(self.valid, width),
            priority=None if self.priority is None else np.pad(self.priority, width),
        )

    def align(self, side: str, *, largest: int | None = None) -> "Batch":
        """Every row's real tokens moved together to the ``"left"`` or ``"right"`` end of a bucket
        of positions.

        The layout of the padding the caller chose is forgotten here: it cannot change a result.
        """
        lengths = self.lengths
        width = bucket(int(lengths.max()), largest=largest)
        column = np.cumsum(self.valid, axis=1) - 1
        if side == "right":
            column = column + (width - lengths[:, None])
        row = np.broadcast_to(np.arange(len(lengths))[:, None], column.shape)
        target = (row[self.valid], column[self.valid])
        shape = (len(lengths), width)

        def move(values: np.ndarray) -> np.ndarray:
            moved = np.zeros(shape, values.dtype)
            moved[target] = values[self.valid]
            return moved

        return Batch(
            ids=move(self.ids),
            valid=move(self.valid),
            priority=None if self.priority is None else move(self.priority),
        )

    def unalign(self, values: np.ndarray) -> np.ndarray:
        """[B, width] of rows moved to the left by `align`, back at the positions [B, S] they came
        from; else 0.
        """
        column = np.cumsum(self.valid, axis=1) - 1
        row = np.broadcast_to(np.arange(len(column))[:, None], column.shape)
        placed = np.zeros(self.ids.shape, values.dtype)
        placed[self.valid] = values[row[self.valid], column[self.valid]]
        return placed


def read_batch(
    input_ids: Any,
    attention_mask: Any = None,
    priority: Any = None,
    *,
    vocab_size: int,
    max_positions: int,
    name: str = "input_ids",
    allow_empty_rows: bool = False,
) -> Batch:
    """An integer array [B, S] and its mask, checked.

    Args:
        input_ids: [B, S] integers (NumPy, JAX, or nested lists of equal length).
        attention_mask: [B, S] of 0 and 1 (or bool), None = all real.
        priority: [B, S] integers or None.
        vocab_size: ids are in [0, vocab_size) wherever the mask is 1.
        max_positions: most real tokens that a row may have.
        name: what the caller calls ``input_ids``, for messages.
        allow_empty_rows: rows with no real token are accepted (they only fill a batch up).

    Raises:
        InputError: names the argument and what is wrong with it.
    """
    ids = _integer_array(input_ids, name)
    if ids.ndim != 2:
        hint = f"; for one sequence write [{name}]" if ids.ndim == 1 else ""
        raise InputError(f"{name} must have shape [B, S], got {list(ids.shape)}{hint}")
    if ids.size == 0:
        raise InputError(f"{name} is empty (shape {list(ids.shape)}): give at least one token")
    if attention_mask is None:
        valid = np.ones(ids.shape, np.bool_)
    else:
        valid = _mask(attention_mask, ids.shape, name)
    if not allow_empty_rows and not valid.any(axis=1).all():
        row = int(np.argmin(valid.any(axis=1)))
        raise InputError(
            f"attention_mask has no real token in row {row}: every row needs at least one"
        )
    wrong = valid & ((ids < 0) | (ids >= vocab_size))
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise InputError(
            f"{name}[{row}, {column}] is {int(ids[row, column])}: token ids of this model "
            f"are in [0, {vocab_size})"
        )
    longest = int(valid.sum(axis=1).max())
    if longest > max_positions:
        row = int(valid.sum(axis=1).argmax())
        raise InputError(
            f"{name} row {row} has {longest} tokens, the model has {max_positions} "
            "positions: shorten it"
        )
    return Batch(
        ids=np.where(valid, ids, 0).astype(np.int32),
        valid=valid,
        priority=None if priority is None else _priority(priority, ids.shape),
    )


def read_prompts(
    prompts: Any,
    attention_mask: Any = None,
    priority: Any = None,
    *,
    tokenizer: Tokenizer | None,
    bos_id: int | None,
    vocab_size: int,
    max_positions: int,
) -> Batch:
    """Prompts in any accepted form: text, a list of texts, lists of ids (of any lengths), or an
    array [B, S].

    Raises:
        InputError: an empty prompt, text without a tokenizer, mixed kinds, and whatever
        ``read_batch`` refuses;
            names the argument and the prompt.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    ragged = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    if not ragged:
        return read_batch(
            prompts,
            attention_mask,
            priority,
            vocab_size=vocab_size,
            max_positions=max_positions,
            name="prompts",
        )
    if not prompts:
        raise InputError("prompts is empty: give at least one prompt")
    texts = [isinstance(prompt, str) for prompt in prompts]
    if any(texts):
        if not all(texts):
            other = texts.index(not texts[0])
            raise InputError(
                f"prompts mixes text and token ids (prompt {other} is a "
                f"{type(prompts[other]).__name__}): give only one kind"
            )
        if attention_mask is not None or priority is not None:
            which = "attention_mask" if attention_mask is not None else "priority"
            raise InputError(
                f"{which} needs prompts as token ids: its positions are tokens, not text"
            )
        rows = [
            encode(text, tokenizer, bos_id=bos_id, name=f"prompts[{i}]")
            for i, text in enumerate(prompts)
        ]
    else:
        rows = [_id_row(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    width = max(len(row) for row in rows)
    if len({len(row) for row in rows}) > 1 and attention_mask is not None:
        raise InputError(
            "attention_mask needs prompts of equal length; lists of ids are padded for you"
        )
    ids = np.zeros((len(rows), width), np.int64)
    valid = np.zeros((len(rows), width), np.bool_)
    ranks = None if priority is None else np.zeros((len(rows), width), np.int64)
    if priority is not None and (
        not isinstance(priority, Sequence | np.ndarray) and not hasattr(priority, "shape")
    ):
        raise InputError(
            f"priority must hold integers like prompts, got a {type(priority).__name__}"
        )
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        valid[i, : len(row)] = True
        if ranks is not None:
            ranks[i, : len(row)] = _priority_row(priority, i, len(rows), len(row))
    return read_batch(
        ids,
        valid if attention_mask is None else attention_mask,
        ranks,
        vocab_size=vocab_size,
        max_positions=max_positions,
        name="prompts",
    )


def encode(
    text: str, tokenizer: Tokenizer | None, *, bos_id: int | None, name: str = "text"
) -> np.ndarray:
    """The token ids of a text, int64 [S], with the special tokens that the tokenizer's own template
    adds.

    A text that already starts with the model's BOS (a rendered chat template) gets no second one.

    Raises:
        InputError: no tokenizer, or a text without any token.
    """
    if tokenizer is None:
        raise InputError(
            f"{name} is text, but this checkpoint has no tokenizer.json: give token ids instead"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds {text[error.start]!r} at position {error.start}, which is no character: "
            "it was not UTF-8 where it came from"
        ) from error
    ids = tokenizer.encode(text).ids
    if bos_id is not None and ids[:1] == [bos_id]:
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        if plain[:1] == [bos_id] and ids[1 : 1 + len(plain)] == plain:
            ids = ids[1:]
    if not text or not ids:
        raise InputError(f"{name} is empty: give at least one token")
    return np.asarray(ids, np.int64)


def _id_row(prompt: Any, name: str) -> np.ndarray:
    if isinstance(prompt, int | np.integer):
        raise InputError("prompts is a flat list of ids: for one prompt write [ids]")
    row = _integer_array(prompt, name)
    if row.ndim != 1:
        raise InputError(f"{name} must be a list of token ids, got shape {list(row.shape)}")
    if not row.size:
        raise InputError(f"{name} is empty: give at least one token")
    return row


def _integer_array(values: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} is not an array of integers (rows of unequal length?)") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} must hold integer token ids, got {array.dtype}")
    if array.size and array.dtype.kind == "u" and array.dtype.itemsize == 8:
        # An unsigned id that does not fit would turn negative and be reported as such.
        array = np.minimum(array, np.uint64(2**62))
    return array.astype(np.int64)


def _mask(attention_mask: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    try:
        mask = np.asarray(attention_mask)
    except (ValueError, TypeError) as error:
        raise InputError("attention_mask is not an array (rows of unequal length?)") from error
    if mask.shape != shape:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, {name} has {list(shape)}: "
            "they must be equal"
        )
    if mask.dtype == object or not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask must hold only 0 (padding) and 1 (real)")
    return mask.astype(np.bool_)


def _priority(priority: Any, shape: tuple[int, ...]) -> np.ndarray:
    ranks = _integer_array(priority, "priority")
    if ranks.shape != shape:
        raise InputError(f"priority has shape {list(ranks.shape)}, the token ids {list(shape)}")
    limits = np.iinfo(np.int32)
    if ranks.size and (ranks.min() < limits.min or ranks.max() > limits.max):
        raise InputError("priority must fit into 32 bits")
    return ranks.astype(np.int32)


def _priority_row(priority: Any, row: int, rows: int, length: int) -> np.ndarray:
    if len(priority) != rows:
        raise InputError(f"priority has {len(priority)} rows, prompts {rows}")
    ranks = _integer_array(priority[row], f"priority[{row}]")
    if ranks.shape != (length,):
        raise InputError(
            f"priority[{row}] has shape {list(ranks.shape)}, its prompt {length} tokens"
        )
    return ranks
