"""Sizes that lengths are rounded up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cam_jax.inference.buckets import bucket


@pytest.mark.parametrize(
    ("length", "size"),
    [(0, 16), (1, 16), (16, 16), (17, 24), (24, 24), (25, 32), (33, 48), (49, 64), (257, 384)],
)
def test_sizes(length, size):
    assert bucket(length) == size


@given(st.integers(1, 100_000))
def test_a_size_holds_the_length_and_wastes_at_most_half_of_it(length):
    size = bucket(length)
    assert length <= size <= max(16, length * 3 // 2)
    assert bucket(size) == size


def test_few_sizes_serve_all_lengths():
    assert len({bucket(length) for length in range(1, 4097)}) == 17


def test_no_size_beyond_the_largest_unless_the_length_is():
    assert bucket(400, largest=500) == 500
    assert bucket(100, largest=500) == 128
    assert bucket(600, largest=500) == 600
    assert bucket(3, smallest=32) == 32
