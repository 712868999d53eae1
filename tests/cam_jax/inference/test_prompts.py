"""What callers may give as prompts, and what is refused before any work."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.errors import InputError
from cam_jax.inference.prompts import Batch, encode, read_batch, read_prompts
from tests.cam_jax.inference.tiny import byte_tokenizer

LIMITS = {"vocab_size": 50, "max_positions": 8}


def read(prompts, mask=None, priority=None, tokenizer=None, bos_id=None):
    return read_prompts(prompts, mask, priority, tokenizer=tokenizer, bos_id=bos_id, **LIMITS)


def rows_of(batch: Batch) -> list[list[int]]:
    return [ids[valid].tolist() for ids, valid in zip(batch.ids, batch.valid, strict=True)]


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 3], [4]],
        ((1, 2, 3), (4,)),
        [np.array([1, 2, 3], np.uint8), jnp.array([4])],
    ],
)
def test_lists_of_ids_of_any_length(prompts):
    assert rows_of(read(prompts)) == [[1, 2, 3], [4]]


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int32])
def test_arrays_with_a_mask(kind):
    ids = np.array([[1, 2, 3], [99, 99, 4]], kind)
    assert rows_of(read(ids, [[1, 1, 1], [0, 0, 1]])) == [[1, 2, 3], [4]]
    assert rows_of(read(jnp.asarray(ids), np.array([[1, 1, 1], [0, 0, 1]], bool))) == [
        [1, 2, 3],
        [4],
    ]


def test_ids_on_padding_never_reach_a_device():
    batch = read([[-100, 7], [10**12, 8]], [[0, 1], [0, 1]])
    assert batch.ids.tolist() == [[0, 7], [0, 8]] and batch.ids.dtype == np.int32


def test_priority_goes_with_its_tokens():
    batch = read([[1, 2, 3], [4]], None, [[5, 6, 7], [8]])
    right = batch.align("right")
    assert right.priority[right.valid].tolist() == [5, 6, 7, 8]
    assert read(np.ones((1, 2), int), None, np.array([[3, 4]])).priority.tolist() == [[3, 4]]


def test_text_needs_a_tokenizer():
    tokenizer = byte_tokenizer()
    assert rows_of(read("ab", tokenizer=tokenizer)) == [[1, 2]]
    assert rows_of(read(["ab", "c d"], tokenizer=tokenizer)) == [[1, 2], [3, 27, 4]]
    with pytest.raises(InputError, match=r"prompts\[0\] is text.*tokenizer.json"):
        read("ab")


@pytest.mark.parametrize(
    ("bos", "text", "ids"),
    [
        (False, "ab", [1, 2]),
        (True, "ab", [0, 1, 2]),
        (True, "<s>ab", [0, 1, 2]),
        (False, "<s>ab", [0, 1, 2]),
        # Two in the text itself are the caller's wish.
        (True, "<s><s>ab", [0, 0, 1, 2]),
    ],
)
def test_bos_is_not_added_twice(bos, text, ids):
    assert encode(text, byte_tokenizer(bos=bos), bos_id=0).tolist() == ids


@pytest.mark.parametrize(
    ("prompts", "mask", "priority", "message"),
    [
        ([], None, None, "prompts is empty"),
        ([[]], None, None, r"prompts\[0\] is empty"),
        ([[1], []], None, None, r"prompts\[1\] is empty"),
        ("", None, None, r"prompts\[0\] is empty"),
        (["a", ""], None, None, r"prompts\[1\] is empty"),
        (np.zeros((2, 0), int), None, None, "prompts is empty"),
        (np.zeros((0, 2), int), None, None, "prompts is empty"),
        ([1, 2, 3], None, None, "flat list of ids"),
        (np.array([1, 2]), None, None, r"shape \[B, S\].*write \[prompts\]"),
        (np.zeros((1, 2, 3), int), None, None, r"shape \[B, S\]"),
        (["a", [1]], None, None, "mixes text and token ids"),
        ([[1], "a"], None, None, "mixes text and token ids"),
        ([[1, "a"]], None, None, r"prompts\[0\] must hold integer"),
        ([[1.0, 2.0]], None, None, r"prompts\[0\] must hold integer"),
        ([[True]], None, None, r"prompts\[0\] must hold integer"),
        ([[[1]]], None, None, r"prompts\[0\] must be a list"),
        ([[1, [2]]], None, None, r"prompts\[0\] is not an array"),
        ([None], None, None, r"prompts\[0\]"),
        (None, None, None, "prompts"),
        (7, None, None, "prompts"),
        (b"ab", None, None, "prompts"),
        ([[1, 50]], None, None, r"prompts\[0, 1\] is 50.*\[0, 50\)"),
        ([[-1]], None, None, r"prompts\[0, 0\] is -1"),
        (np.array([[2**63]], np.uint64), None, None, r"prompts\[0, 0\]"),
        ([[1] * 9], None, None, "row 0 has 9 tokens.* 8 positions"),
        ([[1, 2]], [[1]], None, "attention_mask has shape"),
        ([[1, 2]], [[0, 0]], None, "attention_mask has no real token in row 0"),
        ([[1, 2]], [[2, 1]], None, "attention_mask must hold only 0"),
        ([[1, 2]], [[np.nan, 1]], None, "attention_mask must hold only 0"),
        ([[1, 2]], [[1], [1, 1]], None, "attention_mask is not an array"),
        ([[1, 2], [3]], [[1, 1], [1, 0]], None, "attention_mask needs prompts of equal length"),
        ("ab", [[1, 1]], None, "attention_mask needs prompts as token ids"),
        ("ab", None, [[1, 1]], "priority needs prompts as token ids"),
        ([[1, 2]], None, [[1]], "priority"),
        ([[1, 2]], None, [[1, 1], [1, 1]], "priority has 2 rows"),
        ([[1, 2]], None, 3, "priority must hold"),
        ([[1, 2]], None, [[1, 2**40]], "priority must fit"),
        ([[1, 2]], None, [[0.5, 1.0]], r"priority\[0\] must hold integer"),
    ],
)
def test_refused(prompts, mask, priority, message):
    with pytest.raises(InputError, match=message):
        read(prompts, mask, priority, tokenizer=byte_tokenizer())


def test_empty_rows_only_where_they_are_asked_for():
    ids, mask = np.zeros((2, 3), int), [[1, 1, 0], [0, 0, 0]]
    with pytest.raises(InputError, match="row 1"):
        read_batch(ids, mask, **LIMITS)
    assert read_batch(ids, mask, allow_empty_rows=True, **LIMITS).lengths.tolist() == [2, 0]


@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
)
def test_aligning_moves_tokens_and_nothing_else(mask, side):
    valid = np.array(mask)
    ids = np.arange(valid.size, dtype=np.int32).reshape(valid.shape) + 1
    batch = Batch(ids=np.where(valid, ids, 0), valid=valid)
    moved = batch.align(side)
    assert rows_of(moved) == rows_of(batch)
    assert moved.ids.shape == (len(mask), 16)
    for row in moved.valid:
        solid = np.flatnonzero(row)
        if len(solid):
            expected = np.arange(len(solid)) + (0 if side == "left" else 16 - len(solid))
            assert solid.tolist() == expected.tolist()
    if side == "left":
        assert batch.unalign(moved.ids).tolist() == batch.ids.tolist()


def test_bytes_that_are_no_character_are_refused():
    with pytest.raises(InputError, match=r"prompts\[1\] holds .* at position 1"):
        read(["ab", "a\udcffb"], tokenizer=byte_tokenizer())
