"""From headers alone: which bytes of a checkpoint become which leaf, and all that is wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.conversion.arrays import DTYPES, WEIGHT_DTYPES
from cam_jax.conversion.paths import real_path
from cam_jax.conversion.source import CheckpointSource
from cam_jax.conversion.tables import Piece, WeightTable
from cam_jax.errors import CheckpointError

SHOWN = 8
"""Names listed per kind of fault; the rest is a number."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What will be read. Building one read headers only.

    shapes, dtypes: leaf path -> shape and type in the files. pieces: in leaf order.
    layout: how the checkpoint stores experts. ignored: tensor -> reason.
    tied: (tensor, the tensor it must equal) when embeddings are tied and the head is stored all
    the same.
    """

    source: CheckpointSource
    table: WeightTable
    layout: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype]
    pieces: tuple[Piece, ...]
    ignored: Mapping[str, str]
    tied: tuple[tuple[str, str], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves in the types of the files."""
        return sum(math.prod(self.shapes[leaf]) * t.itemsize for leaf, t in self.dtypes.items())

    def load_type(self, leaf: str, wanted: np.dtype | None) -> np.dtype:
        """The type that a leaf is read as when `wanted` is asked for, None being the files' own."""
        wide = any(p.rule.wide for p in self.pieces_of.get(leaf, ()))
        if wanted is None or (wide and wanted.itemsize < 4):
            return self.dtypes[leaf]
        return wanted

    @cached_property
    def pieces_of(self) -> Mapping[str, tuple[Piece, ...]]:
        """Leaf path -> its pieces."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.leaf, []).append(piece)
        return {leaf: tuple(pieces) for leaf, pieces in found.items()}


def make_plan(
    source: CheckpointSource,
    table: WeightTable,
    shapes: Mapping[str, tuple[int, ...]],
    config_json: Mapping[str, Any],
) -> LoadPlan:
    """Fit the tensors of source to the leaves of a model.

    Args:
        source: the opened checkpoint.
        table: the family's names.
        shapes: leaf path -> shape, all that the model needs.
        config_json: to quote the fields behind a shape, and for what the table ignores.

    Raises one CheckpointError that lists all of: missing tensors, left-over tensors, shapes that
    differ from what the config says, types that hold no plain numbers, leaves of mixed type.
    """
    layout = table.layout_of(source.names())
    pieces = table.pieces(shapes, layout)
    wanted: dict[str, list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault(piece.tensor, []).append(piece)

    tied = _tied(source, table, layout, shapes)
    accounted = {*wanted, *(tensor for tensor, _ in tied)}
    rest = {
        name: table.ignored_reason(name, config_json)
        for name in source.names()
        if name not in accounted
    }
    ignored = {name: reason for name, reason in rest.items() if reason is not None}

    faults = _missing(source, wanted, config_json)
    left_over = [f"{n} ({source.spec(n).path.name})" for n, reason in rest.items() if not reason]
    if left_over:
        faults.append(_listed("left over (no parameter of the model takes them)", left_over))
    wrong = []
    for name, users in wanted.items():
        if name in source:
            wrong.extend(_misfit(source, name, users, config_json))
    if wrong:
        faults.append(_listed("do not fit", wrong, separator="; "))
    dtypes, mixed = _leaf_dtypes(source, pieces)
    if mixed:
        faults.append(_listed("of more than one type within a parameter", mixed))
    if faults:
        raise CheckpointError(
            f"{source.directory} does not fit its config "
            f"({table.family}, experts stored {layout}). Tensors " + ". Tensors ".join(faults) + "."
        )
    return LoadPlan(
        source=source,
        table=table,
        layout=layout,
        shapes=dict(shapes),
        dtypes=dtypes,
        pieces=tuple(pieces),
        ignored=ignored,
        tied=tied,
    )


def _tied(
    source: CheckpointSource, table: WeightTable, layout: str, shapes: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    rules = {rule.leaf: rule for rule in table.rules_of(layout)}
    return tuple(
        (rule.tensor, rules[rule.tied_to].tensor)
        for rule in rules.values()
        if rule.tied_to is not None and rule.leaf not in shapes and rule.tensor in source
    )


def _missing(
    source: CheckpointSource, wanted: Mapping[str, list[Piece]], config_json: Mapping[str, Any]
) -> list[str]:
    absent = []
    for name, users in wanted.items():
        if name in source:
            continue
        tied_to = users[0].rule.tied_to
        absent.append(
            name
            if tied_to is None
            else f"{name} (tie_word_embeddings={config_json.get('tie_word_embeddings')!r}, so it "
            f"is not the same as {tied_to})"
        )
    return [_listed("missing", absent)] if absent else []


def _misfit(
    source: CheckpointSource, name: str, users: list[Piece], config_json: Mapping[str, Any]
) -> list[str]:
    spec = source.spec(name)
    where = f"{name} in {spec.path.name}"
    faults = []
    if spec.dtype not in WEIGHT_DTYPES:
        remedy = f"read are {', '.join(sorted(WEIGHT_DTYPES))}"
        if spec.dtype == "F8_E4M3":
            remedy = f"it needs {name}_scale_inv, and a quantization_config in the config"
        faults.append(
            f"{where} is {spec.dtype}, whose numbers mean nothing without scales ({remedy})"
        )
    expected = users[0].tensor_shape
    if spec.shape != expected:
        fields = ", ".join(f"{f}={_field(config_json, f)!r}" for f in users[0].rule.fields)
        faults.append(
            f"{where} has shape {list(spec.shape)}, the config ({fields}) gives {list(expected)}"
        )
    elif sum(math.prod(piece.shape) for piece in users) != math.prod(expected):
        faults.append(f"{where} is used in part only")
    return faults


def _leaf_dtypes(
    source: CheckpointSource, pieces: list[Piece]
) -> tuple[dict[str, np.dtype], list[str]]:
    """Leaf -> type, and a line for each leaf whose tensors differ in it."""
    names: dict[str, dict[str, str]] = {}
    for piece in pieces:
        if piece.tensor in source:
            seen = names.setdefault(piece.leaf, {})
            seen.setdefault(source.spec(piece.tensor).dtype, piece.tensor)
    mixed = [
        f"{leaf}: " + ", ".join(f"{tensor} is {dtype}" for dtype, tensor in seen.items())
        for leaf, seen in names.items()
        if len(seen) > 1
    ]
    return {leaf: DTYPES[next(iter(seen))] for leaf, seen in names.items()}, mixed


def _field(config_json: Mapping[str, Any], name: str) -> Any:
    nested = config_json.get("text_config")
    if name not in config_json and isinstance(nested, Mapping):
        return nested.get(name)
    return config_json.get(name)


def _listed(kind: str, names: list[str], *, separator: str = ", ") -> str:
    more = len(names) - SHOWN
    tail = f" and {more} more" if more > 0 else ""
    return f"{kind} ({len(names)}): {separator.join(names[:SHOWN])}{tail}"


def leaf_view(arrays: Mapping[str, np.ndarray], piece: Piece) -> np.ndarray:
    """The part of a leaf that a piece fills or is taken from."""
    leaf = arrays[piece.leaf]
    return leaf if piece.row is None else leaf[piece.row]


def directory_of(path: str | Path) -> Path:
    """path with `~` expanded and links followed.

    Raises CheckpointError for what no directory can be called (`paths.local_path`).
    """
    return real_path(path)
