"""The pickle inside a PyTorch file, read as data: nothing is imported, built or called.

A pickle is a program for a stack machine, and Python's own machine can be made to call anything.
The one here knows the instructions that `torch.save` writes for a state dict and a fixed list of
names; all else is refused before it has any effect. Tensors come out as descriptions
(`StoredTensor`) of where their bytes lie.
"""

import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cam_jax.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Storage:
    """One entry of the archive's data folder.

    key: the entry's name. dtype: safetensors type name of its elements, None for plain bytes.
    count: how many elements (bytes, without a type) it holds.
    """

    key: str
    dtype: str | None
    count: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A view of a storage: offset and strides count elements of dtype, as PyTorch's do."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """A name that the pickle asked for and that is allowed; it stands for itself only."""

    text: str


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_STORAGES: dict[str, str | None] = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.storage.UntypedStorage": None,
}
_TYPES = {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}
# Types of PyTorch that have no name in safetensors; refused, but they would not run code.
_OTHER_TYPE = re.compile(r"torch\.(\w+Storage|(complex|quint|qint|float|bits|u?int)\d\w*)")

_ORDERED_DICT = "collections.OrderedDict"
_TENSOR_2 = "torch._utils._rebuild_tensor_v2"
_TENSOR_3 = "torch._utils._rebuild_tensor_v3"
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_ALLOWED = {_ORDERED_DICT, _TENSOR_2, _TENSOR_3, *_PARAMETERS, *_STORAGES, *_TYPES}

_MOST_AXES = 64  # PyTorch's own limit

_Op = Callable[["_Machine", Any], None]


def read_state_dict(text: bytes, what: str) -> dict[str, StoredTensor]:
    """Name -> tensor of the state dict that a pickle describes.

    Args:
        text: the pickle (data.pkl of the archive).
        what: the file, for messages.

    Raises CheckpointError: a name outside the list above (it is given, and was not imported), an
    instruction that no state dict needs, a damaged pickle, entries that are no tensors.
    """
    machine = _Machine(what)
    try:
        found = machine.run(text)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{what} is damaged: its pickle does not describe a state dict ({str(error)[:200]})."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} holds a {_kind(found)}, not a state dict of tensors.")
    for key, value in found.items():
        if not isinstance(value, StoredTensor) or not isinstance(key, str):
            raise CheckpointError(_no_state_dict(what, key, value))
    return found


def _no_state_dict(what: str, key: Any, value: Any) -> str:
    if isinstance(value, dict):
        return (
            f"{what} is no plain state dict: its entry {_short(key)} is a dictionary, as in a "
            f"training checkpoint. If the weights are in there, save that entry alone: "
            f"torch.save(torch.load(path, weights_only=True)[{_short(key)}], path)."
        )
    return (
        f"{what} is no plain state dict: its entry {_short(key)} is a {_kind(value)}. "
        "Save a dictionary of tensors only (model.state_dict())."
    )


def _short(key: Any) -> str:
    """A key for a message: the file chose it, line breaks, escapes and length included."""
    return repr(key[:100] if isinstance(key, str) else key)


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return "tensor"
    return "name" if isinstance(value, _Name) else type(value).__name__


class _Machine:
    """The stack machine. Its values are plain Python ones, Storage, StoredTensor and _Name."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each open mark
        self.memo: dict[int, Any] = {}

    def run(self, text: bytes) -> Any:
        for op, argument, _ in pickletools.genops(text):
            if op.name == "STOP":
                break
            if op.name not in _OPS:
                raise CheckpointError(
                    f"{self.what}: its pickle uses {op.name}, which no plain state dict needs. "
                    "Nothing was run; get the weights as safetensors from a source that you trust."
                )
            _OPS[op.name](self, argument)
        if len(self.stack) != 1 or self.outer:
            raise ValueError("it ends with something left on the stack, or with nothing")
        return self.stack[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self, _: Any) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a tuple takes more than the stack holds")
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.push(items)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"it appends to a {_kind(target)}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"it sets entries of a {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a nested tuple can be made to take for ever.
            if not isinstance(key, str | int):
                raise ValueError(f"a dictionary has a {_kind(key)} as key")
            if key in target:
                raise ValueError(f"the key {_short(key)} is given twice")
            target[key] = value

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def name(self, text: str) -> None:
        """A global, written "module name" by GLOBAL and in two strings by STACK_GLOBAL."""
        text = text.replace(" ", ".", 1)
        if text not in _ALLOWED:
            if _OTHER_TYPE.fullmatch(text):
                raise CheckpointError(
                    f"{self.what} holds tensors of {text[:100]!r}, a type that weights are not "
                    "read in; convert them to a float type first."
                )
            raise CheckpointError(
                f"{self.what} asks for {text[:100]!r}, which is not part of a plain state dict: "
                "loading it as a pickle would have run code. Nothing was run; get the weights as "
                "safetensors from a source that you trust."
            )
        self.push(_Name(text))

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global's name is no string")
        self.name(f"{module} {name}")

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise ValueError(f"it calls a {_kind(function)}")
        if function.text == _ORDERED_DICT and not arguments:
            self.push({})
        elif function.text == _TENSOR_2 and len(arguments) in (6, 7):
            self.push(_tensor(*arguments[:4], dtype=None))
        elif function.text == _TENSOR_3 and len(arguments) in (7, 8):
            self.push(_tensor(*arguments[:4], dtype=arguments[6]))
        elif function.text in _PARAMETERS and arguments:
            if not isinstance(arguments[0], StoredTensor):
                raise ValueError(f"a parameter is made of a {_kind(arguments[0])}")
            self.push(arguments[0])
        else:
            raise ValueError(f"{function.text} is called with {len(arguments)} arguments")

    def build(self, _: Any) -> None:
        """Attributes of an OrderedDict (`_metadata`, versions of modules) say nothing needed."""
        self.pop()
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"it sets attributes of a {_kind(self.stack[-1])}")

    def persistent(self, _: Any) -> None:
        """("storage", type, key, device, number of elements)."""
        given = self.pop()
        if not isinstance(given, tuple) or len(given) != 5 or given[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        _, kind, key, _, count = given
        if not isinstance(kind, _Name) or kind.text not in _STORAGES:
            raise ValueError(f"a storage has a {_kind(kind)} as type")
        if not isinstance(key, str) or not _is_count(count):
            raise ValueError("a storage has no key or no size")
        self.push(Storage(key=key, dtype=_STORAGES[kind.text], count=count))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *, dtype: Any) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor is made of a {_kind(storage)}")
    if storage.dtype is not None:
        kind: str | None = storage.dtype
    else:
        kind = _TYPES.get(dtype.text) if isinstance(dtype, _Name) else None
    if kind is None:
        raise ValueError("a tensor has no type")
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides):
        raise ValueError("a tensor has an impossible offset, shape or stride")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} axes and {len(strides)} strides")
    return StoredTensor(storage=storage, dtype=kind, offset=offset, shape=shape, strides=strides)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= _MOST_AXES
        and all(_is_count(item) for item in value)
    )


_CONSTANTS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
_OPS: dict[str, _Op] = {
    "PROTO": lambda m, x: None,
    "FRAME": lambda m, x: None,
    **{name: lambda m, x: m.push(x) for name in _CONSTANTS},
    "NONE": lambda m, x: m.push(None),
    "NEWTRUE": lambda m, x: m.push(True),
    "NEWFALSE": lambda m, x: m.push(False),
    "EMPTY_DICT": lambda m, x: m.push({}),
    "EMPTY_LIST": lambda m, x: m.push([]),
    "EMPTY_TUPLE": lambda m, x: m.push(()),
    "MARK": _Machine.mark,
    "TUPLE": lambda m, x: m.push(tuple(m.pop_mark())),
    "TUPLE1": lambda m, x: m.tuple_of(1),
    "TUPLE2": lambda m, x: m.tuple_of(2),
    "TUPLE3": lambda m, x: m.tuple_of(3),
    "APPEND": lambda m, x: m.append([m.pop()]),
    "APPENDS": lambda m, x: m.append(m.pop_mark()),
    "SETITEM": lambda m, x: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, x: m.set_items(m.pop_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, x: m.put(len(m.memo)),
    "BINGET": lambda m, x: m.push(m.memo[x]),
    "LONG_BINGET": lambda m, x: m.push(m.memo[x]),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
