"""Leaves -> a Hugging Face checkpoint: safetensors, index, config; complete or not there at all."""

import json
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import NAMES, as_bytes
from cam_jax.conversion.files import CONFIG, describe
from cam_jax.conversion.plan import directory_of, leaf_view
from cam_jax.conversion.read import Progress
from cam_jax.conversion.source import INDEX, SINGLE
from cam_jax.conversion.staging import refuse_existing, staged
from cam_jax.conversion.tables import Piece
from cam_jax.conversion.writing import check_leaves, write_json, written_config
from cam_jax.errors import CheckpointError
from cam_jax.models.params import param_specs

SHARD_BYTES = 5_000_000_000
"""Size above which weights are split, that of transformers' save_pretrained up to version 4."""


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
        config_json: written as it is; only `dtype` (or `torch_dtype`) follows the leaves, and
            `quantization_config` goes, since what is written are plain numbers.
        leaves: path -> array of exactly the paths and shapes of `param_specs` (NumPy or JAX).
        Each is
            asked for twice, once for its type; a lazy mapping keeps one layer's experts in memory.
        layout: one of the family's table ("per_expert", "fused"); None is the table's first.
        companions: files to copy along (generation_config.json, tokenizer.json); none may lie in
            a directory that is to be replaced.
        max_shard_bytes: above this the weights are split into shards with an index.
        overwrite: replace a checkpoint directory that is there. Never anything else.

    Returns the directory. Raises CheckpointError: something is at `path` already, leaves that do
    not match the config, a type that safetensors weights do not have, disk full.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be positive.")
    target = directory_of(path)
    companions = tuple(companions)
    refuse_existing(target, overwrite, companions)
    config, table = describe(config_json)
    shapes = {leaf: tuple(spec.shape) for leaf, spec in param_specs(config).items()}
    dtypes = check_leaves(shapes, leaves)
    pieces = table.pieces(shapes, layout or next(iter(table.layouts)))
    tensors = _tensors(pieces, dtypes)
    shards = _shards(tensors, dtypes, max_shard_bytes)

    with staged(target, overwrite=overwrite) as temporary:
        for file in companions:
            shutil.copyfile(file, temporary / Path(file).name)
        _write_weights(temporary, shards, tensors, dtypes, leaves, progress)
        write_json(temporary / CONFIG, written_config(config_json, dtypes))
    return target


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
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / INDEX, index)


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
