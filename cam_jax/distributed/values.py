"""Values that live on several hosts: fetched to all of them, and compared between them."""

import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cam_jax.errors import DistributedError, InputError, MeshError

# Bytes of a value that the others are told, and characters of their message around the place where
# two differ.
_SHOWN, _AROUND = 4000, 60


def is_main() -> bool:
    """Whether this is process 0: the one that prints and writes files."""
    return jax.process_index() == 0


def fetch(tree: Any) -> Any:
    """Every `jax.Array` as a NumPy array, whole, in every process; other leaves stay.

    All processes have to call it with the same arrays. Those that are divided over hosts are
    gathered, one after the other.

    Raises:
        MeshError: an array of whose mesh this process holds no device.
    """
    return jax.tree.map(_fetch, tree)


def _fetch(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    if not leaf.addressable_shards:
        raise MeshError(
            f"fetch: process {jax.process_index()} holds no device of an array {leaf.shape}: "
            "make the mesh of devices of every process"
        )
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def agree(value: Any, what: str) -> None:
    """Refuses in every process what is not the same in all of them.

    Call it before what compiles: programs that differ in a shape would wait for each other.

    Args:
        value: anything whose ``repr`` says all of it (numbers, strings, dataclasses), NumPy arrays,
            of which every byte counts, `jax.Array`, of which shape and dtype count, and pytrees.
        what: what it is called in the message.

    Raises:
        DistributedError: which processes differ from process 0, and in what.
        InputError: a value whose ``repr`` holds an address in memory.
    """
    text = describe(value)
    if jax.process_count() == 1:
        return
    mine = np.zeros(64 + _SHOWN, np.uint8)
    mine[:32] = _digest(what)
    mine[32:64] = _digest(text)
    shown = np.frombuffer(f"{what} {text}".encode()[:_SHOWN], np.uint8)
    mine[64 : 64 + shown.size] = shown
    table = np.asarray(multihost_utils.process_allgather(mine))
    differ = [i for i, row in enumerate(table) if not np.array_equal(row[:64], table[0, :64])]
    if not differ:
        return
    ours, theirs = (_text(table[i, 64:].tobytes()) for i in (0, differ[0]))
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    raise DistributedError(
        f"the processes disagree about {what}: {differ} "
        f"{'differs' if len(differ) == 1 else 'differ'} from process 0; process 0 has "
        f"{_around(ours, place)}, process {differ[0]} has {_around(theirs, place)}"
    )


def describe(value: Any) -> str:
    """A text that is equal where values are the same for `agree`."""
    leaves, structure = jax.tree.flatten(value)
    text = f"{', '.join(map(_describe_leaf, leaves))}"
    if not jax.tree_util.treedef_is_leaf(structure):
        text += f" in {structure}"
    if re.search(r" at 0x[0-9a-f]+>", text):
        raise InputError(f"agree: {text[:_SHOWN]} differs in every process by its address")
    return text


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
        raise InputError("agree: an array of Python objects, whose bytes are addresses in memory")
    if isinstance(leaf, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()[:16]
        return f"{leaf.dtype}{list(leaf.shape)}#{digest}"
    return repr(leaf)


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)


def _around(text: str, place: int) -> str:
    """The part of a text around a place, with marks where something is left out."""
    start, stop = max(0, place - _AROUND), place + _AROUND
    return f"{'...' if start else ''}{text[start:stop]}{'...' if stop < len(text) else ''}"


def _text(shown: bytes) -> str:
    return shown.rstrip(b"\0").decode(errors="replace")
