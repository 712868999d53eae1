"""Types, alignment and the bit-pattern test for NaN and infinity."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from cam_jax.conversion.arrays import (
    ALIGNMENT,
    DTYPES,
    aligned_empty,
    as_bytes,
    has_nonfinite,
    load_dtype,
)
from cam_jax.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")


@pytest.mark.parametrize("name", FLOATS)
@hypothesis.given(data=st.data())
def test_nonfinite_agrees_with_isfinite_for_any_bits(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    raw = data.draw(st.binary(min_size=8, max_size=64).filter(lambda b: len(b) % 8 == 0))
    values = np.frombuffer(raw, dtype)
    expected = not np.isfinite(values.astype(np.float64)).all()
    assert has_nonfinite(values) == expected


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_finds_one_value(name: str, value: float) -> None:
    values = np.zeros((3, 5), DTYPES[name])
    limits = ml_dtypes.finfo(DTYPES[name])
    values[0, 0], values[2, 4] = limits.max, limits.min
    assert not has_nonfinite(values)
    values[1, 2] = value
    assert has_nonfinite(values)


def test_integers_and_empty_arrays_are_finite() -> None:
    assert not has_nonfinite(np.full(3, -1, np.int32))
    assert not has_nonfinite(np.zeros((0, 4), np.float32))


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 2)])
@pytest.mark.parametrize("name", ["BF16", "F32", "U8"])
def test_aligned_empty(shape: tuple[int, ...], name: str) -> None:
    array = aligned_empty(shape, DTYPES[name])
    assert array.shape == shape and array.dtype == DTYPES[name]
    assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
    assert array.flags.c_contiguous and array.flags.writeable
    assert as_bytes(array).nbytes == array.nbytes


def test_as_bytes_shares_memory_and_refuses_gaps() -> None:
    array = np.zeros((4, 4), ml_dtypes.bfloat16)
    as_bytes(array)[:] = b"\xff" * array.nbytes
    assert np.isnan(array.astype(np.float32)).all()
    with pytest.raises(ValueError, match="C-contiguous"):
        as_bytes(array[:, :2])


def test_load_dtype() -> None:
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert load_dtype(None) is None
    assert load_dtype("bf16") == load_dtype("bfloat16") == load_dtype(ml_dtypes.bfloat16) == bf16
    assert load_dtype("f32") == load_dtype(np.float32) == np.dtype(np.float32)
    for wrong in ("fp8", "float16", np.float16):
        with pytest.raises(ConfigError, match="dtype="):
            load_dtype(wrong)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [3, object(), ["f32"], b"bf16", (), {"a": 1}])
def test_load_dtype_of_no_type_at_all(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="dtype="):
        load_dtype(wrong)
