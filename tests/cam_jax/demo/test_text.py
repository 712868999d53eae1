"""Text as windows: every token once, bytes counted, faults named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.demo.text import beginnings, cut, read_texts
from cam_jax.errors import InputError
from cam_jax.training.tokenizer import train_tokenizer
from tests.cam_jax.demo.checkpoint import TEXT

TOKENIZER = train_tokenizer([TEXT], vocab_size=270)


@given(
    st.lists(st.text("abü ", min_size=1, max_size=40), min_size=1, max_size=4), st.integers(2, 9)
)
def test_every_token_but_the_first_is_predicted_once(texts, length):
    windows = cut(texts, TOKENIZER, separator=0, length=length)
    stream = [0]
    for text in texts:
        stream += [*TOKENIZER.encode(text).ids, 0]
    predicted = windows.ids[:, 1:][windows.valid[:, 1:]]
    assert predicted.tolist() == stream[1:]
    assert windows.num_tokens == len(stream) - 1
    assert windows.num_bytes == sum(len(text.encode()) for text in texts)
    # Each window begins where the one before ended, and only the last has padding.
    assert (windows.ids[1:, 0] == windows.ids[:-1, -1]).all()
    assert windows.valid[:-1].all() and windows.valid[-1].any()


def test_batches_have_one_shape():
    windows = cut([TEXT], TOKENIZER, separator=None, length=8)
    batches = list(windows.batches(4))
    assert {ids.shape for ids, _ in batches} == {(4, 8)}
    assert sum(int(valid[:, 1:].sum()) for _, valid in batches) == windows.num_tokens
    joined = np.concatenate([ids for ids, _ in batches])[: len(windows.ids)]
    assert joined.tolist() == windows.ids.tolist()


def test_nothing_to_predict():
    with pytest.raises(InputError, match="fewer than two tokens"):
        cut(["a"], TOKENIZER, separator=None, length=8)


def test_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "sub" / "a.txt").write_text("one")
    (tmp_path / "c.md").write_text("three")
    (tmp_path / "blank.txt").write_text(" \n")
    assert sorted(read_texts(tmp_path)) == ["one", "two"]
    assert read_texts(tmp_path / "c.md") == ["three"]


def test_the_shipped_text_is_about_200_kilobytes():
    assert 150_000 < sum(len(text.encode()) for text in read_texts(None)) < 300_000


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b" ", "is empty"), (b"\xff\xfe", "UTF-8")]
)
def test_text_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_texts(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"no \.txt file"):
        read_texts(tmp_path / "folder")


def test_beginnings_are_whole_lines():
    assert beginnings(["ab\ncd\nef\n", "one line"], 0.5) == ["ab\ncd\n", "one line"]
    assert beginnings(["ab\ncd\n"], 1.0) == ["ab\ncd\n"]
    with pytest.raises(InputError, match=r"share=0\.0"):
        beginnings(["ab"], 0.0)
