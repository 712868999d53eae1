"""Element types of safetensors files, aligned host buffers, a fast test for NaN and infinity."""

import contextlib
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from cam_jax.errors import ConfigError

ALIGNMENT = 64
"""Bytes. JAX on CPU takes a host buffer over without a copy only when it is aligned like this."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Name in a safetensors header -> NumPy type (bf16 and fp8 through ml_dtypes)."""

NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

WEIGHT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types whose numbers are the weights themselves; fp8 and integers mean nothing without scales."""

# Smallest bit pattern, sign removed, of a value that is not finite: exponent all ones.
_NONFINITE_FROM: dict[np.dtype, int] = {
    DTYPES["F64"]: 0x7FF0_0000_0000_0000,
    DTYPES["F32"]: 0x7F80_0000,
    DTYPES["F16"]: 0x7C00,
    DTYPES["BF16"]: 0x7F80,
}

_LOAD_DTYPES = {
    "bf16": "BF16",
    "bfloat16": "BF16",
    "f32": "F32",
    "float32": "F32",
}


def load_dtype(dtype: str | np.dtype | type | None) -> np.dtype | None:
    """The NumPy type asked for on load: None (keep), "bf16"/"bfloat16", "f32"/"float32", or a type.

    Raises ConfigError for anything else.
    """
    if dtype is None:
        return None
    if isinstance(dtype, str):
        if dtype in _LOAD_DTYPES:
            return DTYPES[_LOAD_DTYPES[dtype]]
    else:
        with contextlib.suppress(TypeError, ValueError):  # not a type of any kind
            wanted = np.dtype(dtype)
            if wanted in (DTYPES["BF16"], DTYPES["F32"]):
                return wanted
    raise ConfigError(
        f"dtype={dtype!r} cannot be loaded to; use None (keep what the file has), 'bf16' or 'f32'."
    )


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose first byte is aligned to ALIGNMENT."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(tuple(shape))


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array as flat bytes (never a copy).

    ml_dtypes arrays have no buffer protocol of their own, their bytes do.
    """
    if not array.flags.c_contiguous:
        raise ValueError("only C-contiguous arrays have a flat view of their bytes")
    return array.reshape(-1).view(np.uint8).data


def has_nonfinite(array: np.ndarray) -> bool:
    """Whether a floating array holds NaN or an infinity.

    Two integer maxima over the bit patterns: a value that is not finite is the largest of its sign,
    read as a signed integer for positive values and as an unsigned one for negative values. No
    temporary, and several times faster than `isfinite`, which ml_dtypes types run element-wise.
    Types without an entry (integers) hold neither.
    """
    limit = _NONFINITE_FROM.get(array.dtype)
    if limit is None or array.size == 0:
        return False
    bits = 8 * array.dtype.itemsize
    signed = array.view(np.dtype(f"i{bits // 8}"))
    unsigned = array.view(np.dtype(f"u{bits // 8}"))
    return int(signed.max()) >= limit or int(unsigned.max()) >= limit + (1 << (bits - 1))


def count_nonfinite(array: np.ndarray) -> tuple[int, int]:
    """(NaN, infinite) values of a floating array; slow, for messages."""
    return int(np.isnan(array).sum()), int(np.isinf(array).sum())
