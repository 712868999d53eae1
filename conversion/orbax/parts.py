"""One part of a checkpoint: a few leaves written by Orbax, read by slices through TensorStore.

Orbax's checkpoints are TensorStore arrays (zarr, in an OCDBT database). Its own loader reads these
too; it places whole arrays, and makes a second copy on the host while it does. Here a box of a leaf
goes straight into the array it is for.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp_v0
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from cam_jax.conversion.read import Region
from cam_jax.errors import CheckpointError

CHUNK_BYTES = 16 << 20
"""Read at a time at least: a device's share of an expert costs little more than itself."""

READERS = 4
"""Chunks in flight: each holds CHUNK_BYTES on its way from the file to its place."""

_MANIFEST = "manifest.ocdbt"


def write_part(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Save arrays as one Orbax checkpoint, in this process alone, whatever others there are.

    Raises CheckpointError when they cannot be written.
    """
    write = _write if jax.process_count() == 1 else _write_alone
    with _quiet():
        try:
            write(directory, arrays)
        # Orbax passes on what TensorStore raises: a ValueError, whatever was wrong with the disk.
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{directory.name} of the weights cannot be written: {_first_line(error)}"
            ) from error


def _write(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    held = {name: _as_jax(array) for name, array in arrays.items()}
    with _saving():
        response = ocp.save_async(directory, held)
        try:
            response.result()
        except BaseException:
            # Its threads write on after an interrupt, into a directory that is to be removed.
            with contextlib.suppress(Exception):
                response.result()
            raise


def _write_alone(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """The same through Orbax's older interface: the newer one compares notes with all processes,
    also when told that one is active. Both read what both write.
    """
    alone = ocp_v0.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp_v0.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=False, use_compression=False, multiprocessing_options=alone
    )
    options = {name: ocp_v0.SaveArgs(**_storage(array)) for name, array in arrays.items()}
    with ocp_v0.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(directory, args=ocp_v0.args.PyTreeSave(dict(arrays), save_args=options))


class PartReader:
    """Boxes of the leaves of one checkpoint; leaves stay open, no data is kept."""

    def __init__(self) -> None:
        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": READERS},
                "data_copy_concurrency": {"limit": READERS},
            }
        )
        self._open: dict[tuple[Path, str], Any] = {}

    def read(self, part: Path, region: Region) -> None:
        """Fill region.out, cast to its type, with that box of a leaf.

        Raises CheckpointError: the leaf is missing, damaged, or no longer of the shape it had.
        """
        try:
            stored = self._leaf(part, region.leaf)
            view = stored[region.box][ts.d[:].translate_to[0]]
            if view.dtype.numpy_dtype != region.out.dtype:
                view = ts.cast(view, region.out.dtype)
            ts.array(region.out, copy=False).write(view).result()
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"{part}: leaf {region.leaf!r} cannot be read, the checkpoint is damaged: "
                f"{_first_line(error)}"
            ) from error

    def stored(self, part: Path, leaf: str) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, type) as Orbax wrote them. Raises CheckpointError as `read`."""
        try:
            found = self._leaf(part, leaf)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{part}: leaf {leaf!r} cannot be opened, the checkpoint is damaged: "
                f"{_first_line(error)}"
            ) from error
        return tuple(found.shape), np.dtype(found.dtype.numpy_dtype)

    def _leaf(self, part: Path, leaf: str) -> Any:
        key = (part, leaf)
        if key not in self._open:
            base = _database(part)
            spec = {
                "driver": "zarr",
                # A chunk that is not there is an error, not zeros.
                "fill_missing_data_reads": False,
                "kvstore": {
                    "driver": "ocdbt",
                    "base": {"driver": "file", "path": f"{base}/"},
                    "path": f"{leaf}/",
                },
            }
            self._open[key] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._open[key]


def _database(part: Path) -> Path:
    """The folder of a part that holds the arrays: itself, or one whose name is up to Orbax."""
    if (part / _MANIFEST).is_file():
        return part
    found = sorted(path.parent for path in part.glob(f"*/{_MANIFEST}"))
    if len(found) != 1:
        raise CheckpointError(f"{part} is no Orbax checkpoint: {len(found)} folders with arrays.")
    return found[0]


def _as_jax(array: np.ndarray) -> Any:
    """array as JAX on CPU holds it, without a copy: Orbax copies NumPy arrays once more.

    Types that JAX does not have now (float64, outside of 64-bit mode) stay with NumPy.
    """
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jax.device_put(array, jax.local_devices(backend="cpu")[0], may_alias=True)


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """How Orbax is to write: chunks of one expert, uncompressed (weights hardly compress).

    zarr's second version stores a chunk as it is; the third one's sharding would assemble all
    chunks of an array in memory first.
    """
    context = ocp.Context()
    saving = context.array_options.saving
    saving.use_ocdbt = True
    saving.use_zarr3 = False
    saving.use_compression = False
    # A sharding on disk would be a promise about some mesh.
    saving.enable_write_sharding_file = False
    saving.array_metadata_store = None
    options = ocp.options.ArrayOptions.Saving.StorageOptions
    saving.scoped_storage_options_creator = lambda path, array: options(**_storage(array))
    with context:
        yield


def _storage(array: Any) -> dict[str, Any]:
    """How an array is cut into chunks."""
    if array.nbytes <= CHUNK_BYTES:
        return {}
    # Experts apart; tables where they are longest.
    return {"chunk_byte_size": CHUNK_BYTES, "shard_axes": (0,) if array.ndim == 3 else ()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a failure several times over, with tracebacks, before it raises it."""
    logger = logging.getLogger("absl")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def _first_line(error: BaseException) -> str:
    """What TensorStore says, without the specification that it repeats."""
    text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
    return text.splitlines()[0][:500] if text else type(error).__name__
