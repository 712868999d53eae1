"""A training keeps its text: what the machine has may change while it is interrupted."""

import dataclasses

import numpy as np
import pytest

from cam_jax.training import text
from cam_jax.training.corpus import Document
from cam_jax.training.settings import TrainDemo

HELDOUT = [Document(domain="source", name="h.py", text="x = 1\n")]


@pytest.fixture
def settings(tmp_path):
    return TrainDemo(checkpoints=tmp_path / "checkpoints", vocab_size=270)


def _machine(monkeypatch, content):
    documents = [Document(domain="source", name="a.py", text=content)]
    monkeypatch.setattr(text, "gather", lambda: documents)


def test_the_written_text_is_used_again(settings, monkeypatch):
    _machine(monkeypatch, "first = 1\n" * 50)
    first, _ = text.prepare(settings, heldout=HELDOUT)
    text.write(settings, first)
    _machine(monkeypatch, "second = 2\n" * 50)
    again, heldout = text.prepare(settings, heldout=HELDOUT)
    assert np.array_equal(again.stream, first.stream)
    assert again.tokenizer.to_str() == first.tokenizer.to_str()
    assert (again.corpus, again.size) == (first.corpus, first.size) and first.size == 500
    assert heldout.sizes.shape == (again.tokenizer.get_vocab_size(),)


def test_another_vocabulary_or_given_documents_ignore_it(settings, monkeypatch):
    _machine(monkeypatch, "first = 1\n" * 50)
    first, _ = text.prepare(settings, heldout=HELDOUT)
    text.write(settings, first)
    _machine(monkeypatch, "second = 2\n" * 50)
    other = dataclasses.replace(settings, vocab_size=271)
    assert text.prepare(other, heldout=HELDOUT)[0].corpus != first.corpus
    given = [Document(domain="source", name="b.py", text="third = 3\n" * 50)]
    assert text.prepare(settings, training=given, heldout=HELDOUT)[0].corpus != first.corpus
