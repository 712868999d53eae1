"""Leaves -> a Hugging Face checkpoint: safetensors, index, config; complete or not there at all."""

import json
import os
import secrets
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import NAMES, WEIGHT_DTYPES, as_bytes
from cam_jax.conversion.files import CONFIG, describe
from cam_jax.conversion.plan import directory_of, leaf_view
from cam_jax.conversion.read import Progress
from cam_jax.conversion.source import INDEX, SINGLE
from cam_jax.conversion.tables import Piece
from cam_jax.errors import CheckpointError
from cam_jax.models.params import param_specs

SHARD_BYTES = 5_000_000_000
"""Size above which weights are split, that of transformers' save_pretrained up to version 4."""

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save_hf(
    path: str | Path,
    config_json: Mapping[str, Any],
    leaves: Mapping[str, Any],
    *,
    layout: str | None = None,
    companions: Iterable[Path] = (),
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint that transformers and `load_checkpoint` read.

    Args:
        path: the directory to make. Everything is written beside it and renamed into place at the
            end, config.json last: what an interrupted call leaves behind does not load.
        config_json: written as it is; only `dtype` (or `torch_dtype`) follows the leaves.
        leaves: path -> array of exactly the paths and shapes of `param_specs` (NumPy or JAX).
        Each is
            asked for twice, once for its type; a lazy mapping keeps one layer's experts in memory.
        layout: one of the family's table ("per_expert", "fused"); None is the table's first.
        companions: files to copy along (generation_config.json, tokenizer.json).
        max_shard_bytes: above this the weights are split into shards with an index.
        overwrite: replace a checkpoint directory that is there. Never anything else.

    Returns the directory. Raises CheckpointError: something is at `path` already, leaves that do
    not match the config, a type that safetensors weights do not have, disk full.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be positive.")
    target = directory_of(path)
    _refuse(target, overwrite)
    config, table = describe(config_json)
    shapes = {leaf: tuple(spec.shape) for leaf, spec in param_specs(config).items()}
    dtypes = _check_leaves(shapes, leaves)
    pieces = table.pieces(shapes, layout or next(iter(table.layouts)))
    tensors = _tensors(pieces, dtypes)
    shards = _shards(tensors, dtypes, max_shard_bytes)

    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        for file in companions:
            shutil.copyfile(file, temporary / Path(file).name)
        _write_weights(temporary, shards, tensors, dtypes, leaves, progress)
        _write_json(temporary / CONFIG, _config_with_dtype(config_json, dtypes))
        _into_place(temporary, target, overwrite)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{target} cannot be written: {reason}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _refuse(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another path or overwrite=True.")
    if not (target / CONFIG).is_file():
        raise CheckpointError(f"{target} is not a checkpoint (no {CONFIG}) and is left alone.")


def _check_leaves(
    shapes: Mapping[str, tuple[int, ...]], leaves: Mapping[str, Any]
) -> dict[str, np.dtype]:
    faults = [f"{leaf} is missing" for leaf in shapes if leaf not in leaves]
    faults += [f"{leaf} is left over" for leaf in leaves if leaf not in shapes]
    dtypes = {}
    for leaf, shape in shapes.items():
        if leaf not in leaves:
            continue
        array = leaves[leaf]
        dtypes[leaf] = np.dtype(array.dtype)
        if tuple(array.shape) != shape:
            faults.append(f"{leaf} is {list(array.shape)}, the config gives {list(shape)}")
        if NAMES.get(dtypes[leaf]) not in WEIGHT_DTYPES:
            faults.append(f"{leaf} is {dtypes[leaf]}, not a float type of safetensors")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"leaves do not fit the config: {'; '.join(faults[:8])}{more}.")
    return dtypes


def _tensors(pieces: Iterable[Piece], dtypes: Mapping[str, np.dtype]) -> dict[str, list[Piece]]:
    """Tensor name -> its pieces, in leaf order: a leaf is then needed for one stretch only."""
    tensors: dict[str, list[Piece]] = {}
    for piece in pieces:
        tensors.setdefault(piece.tensor, []).append(piece)
    for name, parts in tensors.items():
        types = {dtypes[piece.leaf] for piece in parts}
        if len(types) > 1:
            leaves = ", ".join(f"{piece.leaf} {dtypes[piece.leaf]}" for piece in parts)
            raise CheckpointError(f"tensor {name!r} would join leaves of several types: {leaves}.")
    return tensors


def _nbytes(parts: list[Piece], dtypes: Mapping[str, np.dtype]) -> int:
    return int(np.prod(parts[0].tensor_shape, dtype=object)) * dtypes[parts[0].leaf].itemsize


def _shards(
    tensors: Mapping[str, list[Piece]], dtypes: Mapping[str, np.dtype], limit: int
) -> list[list[str]]:
    """Names per file, none of which passes limit unless one tensor alone does."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in tensors.items():
        nbytes = _nbytes(parts, dtypes)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    # Wide types first: readers that view the data in place need tensors aligned to their type.
    return [
        sorted(names, key=lambda name: -dtypes[tensors[name][0].leaf].itemsize) for names in shards
    ]


def _write_weights(
    directory: Path,
    shards: list[list[str]],
    tensors: Mapping[str, list[Piece]],
    dtypes: Mapping[str, np.dtype],
    leaves: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    total = sum(_nbytes(parts, dtypes) for parts in tensors.values())
    done = 0
    uses = Counter(piece.leaf for parts in tensors.values() for piece in parts)
    held: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    if progress is not None:
        progress(0, total)
    for number, names in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(_header(names, tensors, dtypes))
            for tensor in names:
                data = _assemble(tensors[tensor], dtypes, leaves, held, uses)
                file.write(as_bytes(data))
                weight_map[tensor] = name
                done += data.nbytes
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX, index)


def _assemble(
    parts: list[Piece],
    dtypes: Mapping[str, np.dtype],
    leaves: Mapping[str, Any],
    held: dict[str, np.ndarray],
    uses: Counter[str],
) -> np.ndarray:
    """One tensor from its pieces. `held` keeps a leaf on the host until its last use."""

    def take(piece: Piece) -> np.ndarray:
        if piece.leaf not in held:
            held[piece.leaf] = np.asarray(leaves[piece.leaf])
        region = leaf_view(held, piece)
        uses[piece.leaf] -= 1
        if not uses[piece.leaf]:
            del held[piece.leaf]
        return region

    if len(parts) == 1:
        return np.ascontiguousarray(take(parts[0])).reshape(parts[0].tensor_shape)
    whole = np.empty(parts[0].tensor_shape, dtypes[parts[0].leaf])
    for piece in parts:
        whole[piece.slices] = take(piece)
    return whole


def _header(
    names: list[str], tensors: Mapping[str, list[Piece]], dtypes: Mapping[str, np.dtype]
) -> bytes:
    """Length and JSON; `format: pt` is what transformers asks for."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        parts = tensors[name]
        end = offset + _nbytes(parts, dtypes)
        entries[name] = {
            "dtype": NAMES[dtypes[parts[0].leaf]],
            "shape": list(parts[0].tensor_shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _config_with_dtype(
    config_json: Mapping[str, Any], dtypes: Mapping[str, np.dtype]
) -> dict[str, Any]:
    """config_json whose type field, if there is one, names the type that all leaves share."""
    config = dict(config_json)
    kinds = {NAMES[dtype] for dtype in dtypes.values()}
    if len(kinds) == 1:
        for field in ("dtype", "torch_dtype"):
            if config.get(field) is not None:
                config[field] = _TORCH_NAMES[kinds.pop()]
                break
    return config


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _into_place(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename; what was there moves aside first and comes back if the rename fails."""
    if not overwrite or not target.exists() or not any(target.iterdir()):
        temporary.rename(target)  # fails if something has appeared there in the meantime
        return
    aside = temporary.with_suffix(".old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
