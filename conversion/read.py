"""Planned bytes into arrays: several threads, no intermediate copy, one check for NaN while hot."""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from cam_jax.conversion.arrays import (
    DTYPES,
    aligned_empty,
    as_bytes,
    count_nonfinite,
    has_nonfinite,
    load_dtype,
)
from cam_jax.conversion.plan import LoadPlan
from cam_jax.conversion.source import CheckpointSource
from cam_jax.conversion.tables import Piece
from cam_jax.errors import CheckpointError

CHUNK_BYTES = 8 << 20
"""Read, checked and cast at a time: fits a core's caches, and bounds the temporary of a cast."""

MAX_THREADS = 4
"""Copies out of the page cache saturate the memory of common hosts with a few cores."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total) by one thread at a time, done never falling."""


LOAD_NONFINITE = "Load them with allow_nonfinite=True (cam-jax convert --allow-nonfinite)."


class NonfiniteWarning(UserWarning):
    """A checkpoint with NaN or infinite weights was loaded on request."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A box of a leaf, and the array to read it into.

    leaf: its path. box: one slice with step 1 per axis of the leaf. out: of the box's shape; its
    type is what values are cast to.
    """

    leaf: str
    box: tuple[slice, ...]
    out: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    tensor: str
    slices: tuple[slice, ...]
    target: np.ndarray


def read_leaves(
    plan: LoadPlan,
    *,
    dtype: str | np.dtype | type | None = None,
    paths: Iterable[str] | None = None,
    out: Mapping[str, np.ndarray] | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[str, np.ndarray]:
    """Read leaves, each straight from the file into its array.

    Args:
        plan: from `make_plan`.
        dtype: None keeps the files' types, "bf16" or "f32" casts while reading.
        paths: the leaves to read, all when None.
        out: arrays to fill, by leaf path (rows of a stacked array, say), whose types win over
            `dtype`. Leaves without an entry get a new array, aligned for JAX.
        allow_nonfinite: load NaN and infinities, with a NonfiniteWarning that counts them.
        progress: called as bytes arrive.
        threads: readers, by default one per core up to MAX_THREADS.

    Returns leaf path -> array, of the shapes in plan. Raises CheckpointError for a file that
    changed or ended since its header was read, and for values that are not finite (naming every
    tensor).
    """
    wanted = list(plan.shapes) if paths is None else list(paths)
    keep = load_dtype(dtype)
    given = {} if out is None else out
    leaves = {}
    for path in wanted:
        leaf = given.get(path)
        if leaf is None:
            leaf = aligned_empty(plan.shapes[path], plan.load_type(path, keep))
        elif leaf.shape != plan.shapes[path]:
            raise ValueError(f"out[{path!r}] is {list(leaf.shape)}, not {list(plan.shapes[path])}")
        leaves[path] = leaf
    read_regions(
        plan,
        [Region(leaf=path, box=whole(leaf.shape), out=leaf) for path, leaf in leaves.items()],
        allow_nonfinite=allow_nonfinite,
        progress=progress,
        threads=threads,
    )
    return leaves


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The box that is all of an array."""
    return tuple(slice(0, size) for size in shape)


def read_regions(
    plan: LoadPlan,
    regions: Iterable[Region],
    *,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Fill the arrays of ``regions``, reading those bytes of the files and no others.

    Options and errors are those of `read_leaves`.
    """
    chunks = _chunks(plan, regions)
    bad = _read_all(plan.source, chunks, progress, threads or _default_threads())
    if bad:
        message = "; ".join(
            f"{name} in {plan.source.spec(name).path}: {nan} NaN, {inf} infinite"
            for name, (nan, inf) in sorted(bad.items())
        )
        if not allow_nonfinite:
            raise CheckpointError(f"weights that are not finite: {message}. {LOAD_NONFINITE}")
        warnings.warn(f"weights that are not finite: {message}", NonfiniteWarning, stacklevel=2)


def check_tied(plan: LoadPlan) -> None:
    """Compare tensors that the config says are the same one.

    Raises CheckpointError when they differ: the file then holds an output head that loading with
    tied embeddings would leave out without a word.
    """
    source = plan.source
    for name, twin in plan.tied:
        a, b = source.spec(name), source.spec(twin)
        same = a.shape == b.shape and all(
            _equal(source.read_slice(name, rows), source.read_slice(twin, rows))
            for rows in _row_ranges(a.shape, a.nbytes)
        )
        if not same:
            raise CheckpointError(
                f"config.json says tie_word_embeddings=true, but {name} ({a.path}, {a.dtype}"
                f"{list(a.shape)}) differs from {twin} ({b.path}, {b.dtype}{list(b.shape)}). "
                "Set tie_word_embeddings to false in config.json if the head is its own."
            )


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == b.dtype:
        return bool(np.array_equal(as_bytes(a), as_bytes(b)))
    return bool(np.array_equal(a.astype(np.float64), b.astype(np.float64)))


def _default_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _row_ranges(shape: tuple[int, ...], nbytes: int) -> Iterator[tuple[slice, ...]]:
    """Ranges over the first axis that cut an array of nbytes into parts of about CHUNK_BYTES."""
    if not shape or nbytes <= CHUNK_BYTES:
        yield ()
        return
    rows = max(1, shape[0] * CHUNK_BYTES // nbytes)
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])),)


def _chunks(plan: LoadPlan, regions: Iterable[Region]) -> list[_Chunk]:
    """All that is to be read, in the order of the files."""
    chunks = [
        chunk
        for region in regions
        for piece in plan.pieces_of[region.leaf]
        for chunk in _piece_chunks(plan, piece, region)
    ]

    def place(chunk: _Chunk) -> tuple[str, int, int]:
        spec = plan.source.spec(chunk.tensor)
        return str(spec.path), spec.begin, chunk.slices[0].start if chunk.slices else 0

    return sorted(chunks, key=place)


def _piece_chunks(plan: LoadPlan, piece: Piece, region: Region) -> Iterator[_Chunk]:
    """What a region takes from one piece."""
    box, target = region.box, region.out
    if piece.row is not None:
        row = piece.row - box[0].start
        if not 0 <= row < target.shape[0]:
            return
        box, target = box[1:], target[row]
    itemsize = DTYPES[plan.source.spec(piece.tensor).dtype].itemsize
    origins = [part.start for part in piece.slices] + [0] * (len(box) - len(piece.slices))
    for part in _row_ranges(target.shape, target.size * itemsize):
        # Rows of the box, then the box's place in the leaf, then the leaf's in the tensor.
        inner = part + tuple(slice(0, n) for n in target.shape[len(part) :])
        yield _Chunk(
            tensor=piece.tensor,
            slices=tuple(
                slice(origin + side.start + cut.start, origin + side.start + cut.stop)
                for origin, side, cut in zip(origins, box, inner, strict=True)
            ),
            target=target[part[0]] if part else target,
        )


def _read_all(
    source: CheckpointSource, chunks: list[_Chunk], progress: Progress | None, threads: int
) -> dict[str, tuple[int, int]]:
    """Fill all targets; returns tensor -> (NaN, infinite) where there are any."""
    sizes = [c.target.size * DTYPES[source.spec(c.tensor).dtype].itemsize for c in chunks]
    total = sum(sizes)
    done = 0
    bad: dict[str, tuple[int, int]] = {}
    lock = threading.Lock()
    if progress is not None:
        progress(0, total)

    def work(chunk: _Chunk, size: int) -> None:
        nonlocal done
        nan, inf = _read_chunk(source, chunk)
        with lock:
            if nan or inf:
                before = bad.get(chunk.tensor, (0, 0))
                bad[chunk.tensor] = (before[0] + nan, before[1] + inf)
            done += size
            if progress is not None:
                progress(done, total)

    if threads == 1:
        for chunk, size in zip(chunks, sizes, strict=True):
            work(chunk, size)
        return bad
    with ThreadPoolExecutor(threads, thread_name_prefix="cam_jax-read") as pool:
        futures = [pool.submit(work, c, s) for c, s in zip(chunks, sizes, strict=True)]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        failed = [future for future in finished if future.exception() is not None]
        if failed:
            pool.shutdown(cancel_futures=True)
            failed[0].result()
    return bad


def _read_chunk(source: CheckpointSource, chunk: _Chunk) -> tuple[int, int]:
    """Fill one target; returns how many of its values are (NaN, infinite)."""
    target = chunk.target
    stored = DTYPES[source.spec(chunk.tensor).dtype]
    if target.dtype == stored:
        source.read_slice(chunk.tensor, chunk.slices, out=target)
    else:
        # A value too large for the new type becomes infinite, which the check below then counts.
        with np.errstate(over="ignore"):
            target[...] = source.read_slice(chunk.tensor, chunk.slices)
    if not has_nonfinite(target):
        return 0, 0
    return count_nonfinite(target)
