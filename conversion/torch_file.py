"""A PyTorch weights file (`pytorch_model.bin`) as named byte ranges, without PyTorch.

`torch.save` writes a zip archive: NAME/data.pkl describes the tensors, NAME/data/KEY holds the
bytes of one storage each, not compressed, so that slices are read from the file as from
safetensors. The pickle is only looked at (`torch_pickle`): no code in it can run.
"""

import io
import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cam_jax.conversion.arrays import DTYPES
from cam_jax.conversion.header import MAX_HEADER_BYTES, TensorSpec
from cam_jax.conversion.torch_pickle import Storage, StoredTensor, read_state_dict
from cam_jax.errors import CheckpointError

_PICKLE = re.compile(r"[^/]+/data\.pkl")
_LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The number that files of PyTorch before 1.6 begin with, as pickle writes it (after two bytes)."""

_LOCAL_HEADER_BYTES = 30
_SAVE_AGAIN = "Load it with PyTorch and save it again (as safetensors, if you can)."


class _BoundedFile(io.FileIO):
    """A file of which no one call reads an amount that only a damaged archive asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.path = path
        self.size = self.seek(0, 2)
        self.seek(0)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path} has a directory or pickle of {wanted} bytes; this is not a weights "
                "file of PyTorch, or it is damaged."
            )
        return super().read(wanted) or b""


@dataclass(frozen=True)
class _Archive:
    """The entries of the zip file and the folder that all of torch.save's lie in."""

    file: _BoundedFile
    entries: dict[str, zipfile.ZipInfo]
    folder: str

    @property
    def path(self) -> Path:
        return self.file.path

    def range(self, name: str) -> tuple[int, int]:
        """Absolute bytes [begin, end) of an entry's data.

        The directory at the end does not tell: the header in front of the data is padded.
        """
        entry = self.entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{self.path}: the entry {name!r} is compressed or encrypted, which PyTorch never "
                f"does. {_SAVE_AGAIN}"
            )
        if entry.compress_size != entry.file_size:
            raise CheckpointError(f"{self.path}: the entry {name!r} has two sizes.")
        self.file.seek(entry.header_offset)
        header = self.file.read(_LOCAL_HEADER_BYTES)
        if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path} is damaged: no entry where {name!r} should be.")
        name_bytes = int.from_bytes(header[26:28], "little")
        extra_bytes = int.from_bytes(header[28:30], "little")
        begin = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        end = begin + entry.file_size
        if end > self.file.size:
            raise CheckpointError(
                f"{self.path} is truncated: its entry {name!r} ends at byte {end}, the file has "
                f"{self.file.size}."
            )
        return begin, end

    def read(self, name: str) -> bytes:
        begin, end = self.range(name)
        self.file.seek(begin)
        return self.file.read(end - begin)


def read_torch_file(path: Path) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor of a state dict, in the order of their data.

    Tensors may share bytes (tied embeddings do). Raises CheckpointError naming the file, and the
    tensor where there is one: unreadable or truncated file, the format from before PyTorch 1.6,
    a pickle that would run code, anything but a plain dictionary of tensors, compressed entries,
    big-endian data, tensors that are not contiguous or leave their storage.
    """
    try:
        with _BoundedFile(path) as file:
            archive = _open_archive(file)
            order = f"{archive.folder}/byteorder"
            if order in archive.entries and archive.read(order) != b"little":
                raise CheckpointError(
                    f"{path} was written on a machine of another byte order (its entry byteorder "
                    f"is not 'little'). {_SAVE_AGAIN}"
                )
            tensors = read_state_dict(archive.read(f"{archive.folder}/data.pkl"), str(path))
            ranges: dict[str, tuple[int, int]] = {}
            specs = [_spec(name, tensor, archive, ranges) for name, tensor in tensors.items()]
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    return {spec.name: spec for spec in specs}


def _open_archive(file: _BoundedFile) -> _Archive:
    path = file.path
    start = file.read(2 + len(_LEGACY_MAGIC))
    if start[2:] == _LEGACY_MAGIC:
        raise CheckpointError(
            f"{path} is in the format of PyTorch before 1.6, which only PyTorch reads. "
            f"{_SAVE_AGAIN}"
        )
    if start[:4] != b"PK\x03\x04":
        raise CheckpointError(
            f"{path} is no weights file of PyTorch (it does not begin as a zip archive)."
        )
    try:
        # Reads the directory at the end, in both of its sizes; entries are read by us.
        with zipfile.ZipFile(file) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: the directory at its end cannot be read ({error})."
        ) from error
    entries = {entry.filename: entry for entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError(f"{path} is damaged: it holds two entries of one name.")
    found = [name for name in entries if _PICKLE.fullmatch(name)]
    if len(found) != 1:
        raise CheckpointError(
            f"{path} is a zip archive, but no weights file of PyTorch: it holds {len(found)} "
            "entries NAME/data.pkl."
        )
    return _Archive(file, entries, found[0].removesuffix("/data.pkl"))


def _spec(
    name: str, tensor: StoredTensor, archive: _Archive, ranges: dict[str, tuple[int, int]]
) -> TensorSpec:
    where = f"{archive.path}: tensor {name!r}"
    begin, end = _storage_range(where, tensor.storage, archive, ranges)
    if not _is_contiguous(tensor):
        raise CheckpointError(
            f"{where} of shape {list(tensor.shape)} is stored with strides "
            f"{list(tensor.strides)} (transposed, expanded, or a view with gaps). Save "
            "tensor.contiguous() instead."
        )
    itemsize = DTYPES[tensor.dtype].itemsize
    first = begin + tensor.offset * itemsize
    last = first + math.prod(tensor.shape) * itemsize
    if last > end:
        raise CheckpointError(
            f"{where}: shape {list(tensor.shape)} of {tensor.dtype} from element {tensor.offset} "
            f"on ends at byte {last - begin} of its storage, which has {end - begin}."
        )
    return TensorSpec(
        name=name,
        path=archive.path,
        dtype=tensor.dtype,
        shape=tensor.shape,
        begin=first,
        end=last,
    )


def _storage_range(
    where: str, storage: Storage, archive: _Archive, ranges: dict[str, tuple[int, int]]
) -> tuple[int, int]:
    """Where the storage's bytes lie; ranges remembers those that are known."""
    entry = f"{archive.folder}/data/{storage.key}"
    if entry not in archive.entries:
        raise CheckpointError(f"{where}: its data, the entry {entry!r}, is not in the archive.")
    if entry not in ranges:
        ranges[entry] = archive.range(entry)
    begin, end = ranges[entry]
    nbytes = storage.count * (1 if storage.dtype is None else DTYPES[storage.dtype].itemsize)
    if nbytes > end - begin:
        raise CheckpointError(
            f"{where}: its storage should take {nbytes} bytes, the entry {entry!r} has "
            f"{end - begin}."
        )
    return begin, begin + nbytes


def _is_contiguous(tensor: StoredTensor) -> bool:
    """Whether elements lie in C order without gaps; strides of axes of length 1 mean nothing."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(tensor.shape) == 0
        expected *= size
    return True
