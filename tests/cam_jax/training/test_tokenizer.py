"""Every text survives encoding, and the bytes of its tokens add up to its own."""

import numpy as np
import pytest

from cam_jax.errors import ConfigError
from cam_jax.training.heldout import shipped_heldout
from cam_jax.training.tokenizer import EOS, PAD, encode_documents, token_bytes, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x\n" * 20], vocab_size=300)


def _encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "text", ["", " ", "\r\n\t\f\x00", "naïve — 漢字 🎲", "    def f():\n\n\n", "trailing  "]
)
def test_round_trip(tokenizer, text):
    ids = _encode(tokenizer, text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert token_bytes(tokenizer)[ids].sum() == len(text.encode())


def test_round_trip_of_the_held_out_text(tokenizer):
    sizes = token_bytes(tokenizer)
    for document in shipped_heldout():
        ids = _encode(tokenizer, document.text)
        assert tokenizer.decode(ids) == document.text
        assert sizes[ids].sum() == len(document.text.encode())


def test_specials_come_first_and_have_no_bytes(tokenizer):
    assert (tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)) == (0, 1)
    sizes = token_bytes(tokenizer)
    assert sizes[:2].tolist() == [0, 0] and (sizes[2:] > 0).all()


def test_stream_separates_documents(tokenizer):
    stream = encode_documents(tokenizer, ["def", "return"])
    assert np.flatnonzero(stream == 0).tolist()[0] == 0
    assert (stream == 0).sum() == 3 and stream[-1] == 0
    assert token_bytes(tokenizer)[stream].sum() == len("defreturn")


def test_training_is_deterministic():
    texts = ["some text, some more text\n", "and other text\n"]
    assert train_tokenizer(texts, vocab_size=280).to_str() == (
        train_tokenizer(texts, vocab_size=280).to_str()
    )


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="258"):
        train_tokenizer(["x"], vocab_size=257)
