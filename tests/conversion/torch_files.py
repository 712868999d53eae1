"""Files as `torch.save` writes them, made without PyTorch: a pickle by hand in a zip archive."""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


@dataclass(frozen=True)
class Raw:
    """Opcodes that push one value."""

    code: bytes


def pickled(value: Any) -> bytes:
    """The opcodes that push a value."""
    match value:
        case Raw():
            return value.code
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if 0 <= value < 256:
            return b"K" + bytes([value])
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(pickled, value)) + b"t"
        case list():
            return b"](" + b"".join(map(pickled, value)) + b"e"
        case dict():
            items = b"".join(pickled(k) + pickled(v) for k, v in value.items())
            return b"}(" + items + b"u"
    raise TypeError(type(value))


def name(module: str, attribute: str) -> Raw:
    return Raw(b"c" + module.encode() + b"\n" + attribute.encode() + b"\n")


def call(function: Raw, *arguments: Any) -> Raw:
    return Raw(pickled(function) + pickled(arguments) + b"R")


ORDERED_DICT = call(name("collections", "OrderedDict"))


def storage(key: Any, count: Any, kind: Any = "FloatStorage") -> Raw:
    kind = name("torch", kind) if isinstance(kind, str) else kind
    return Raw(pickled(("storage", kind, key, "cpu", count)) + b"Q")


def tensor(held: Raw, offset: Any, shape: Any, strides: Any) -> Raw:
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, held, offset, shape, strides, False, ORDERED_DICT)


def tensor_3(held: Raw, offset: Any, shape: Any, strides: Any, dtype: Any) -> Raw:
    """The form for types that have no storage class of their own."""
    rebuild = name("torch._utils", "_rebuild_tensor_v3")
    return call(rebuild, held, offset, shape, strides, False, ORDERED_DICT, dtype)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return tuple(strides)


def program(value: Any) -> bytes:
    return b"\x80\x02" + pickled(value) + b"."


def write_archive(
    path: Path,
    pickle: bytes,
    data: Mapping[str, bytes],
    *,
    order: bytes | None = b"little",
    folder: str = "archive",
    padding: int = 0,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """The zip archive. padding: bytes of an extra field that the directory does not know of."""
    extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding if padding else b""
    entries = {f"{folder}/data.pkl": pickle}
    if order is not None:
        entries[f"{folder}/byteorder"] = order
    entries |= {f"{folder}/data/{key}": content for key, content in data.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for entry, content in {**entries, f"{folder}/version": b"3\n"}.items():
            info = zipfile.ZipInfo(entry)
            info.compress_type, info.extra = compression, extra
            archive.writestr(info, content)
            info.extra = b""
    return path


def write_torch(path: Path, tensors: Mapping[str, np.ndarray], **options: Any) -> Path:
    """A state dict, one storage per tensor, with the `_metadata` that modules leave on theirs."""
    items, data = {}, {}
    for number, (key, array) in enumerate(tensors.items()):
        kind = STORAGES[array.dtype.name]
        held = storage(str(number), array.size, kind)
        items[key] = tensor(held, 0, array.shape, c_strides(array.shape))
        data[str(number)] = array.tobytes()
    filled = b"".join(pickled(key) + pickled(value) for key, value in items.items())
    attributes = {"_metadata": {"": {"version": 1}}}
    state = Raw(pickled(ORDERED_DICT) + b"(" + filled + b"u" + pickled(attributes) + b"b")
    return write_archive(path, program(state), data, **options)
