"""Declarative weight tables: which Hugging Face tensor is which leaf, read in both directions.

A rule pairs a leaf path with a tensor name. `{l}` in both stands for the layer, `{e}` in the
tensor name for an expert: such tensors are the rows of the leaf's first axis. A rule with `parts`
says that the tensor is several leaves side by side along `axis` (transformers 5 stores an
expert's gate and up projections as one). Expanding a table over the leaves of a model gives
`Piece`s; a piece says that one region of a tensor and one region of a leaf are the same numbers.
Loading copies pieces one way, saving the other.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.registry import text_config


@dataclass(frozen=True, kw_only=True)
class Rule:
    """leaf: path of the parameter, with `{l}`. tensor: name on disk, with `{l}` and `{e}`.

    axis, part, parts: the leaf is the part-th of `parts` equal blocks of the tensor along `axis`.
    fields: config fields that give the shape, for messages. tied_to: the leaf that this one
    equals, and is absent for, when the model ties its embeddings. wide: a cast on load leaves it
    as it is stored, unless to four bytes or more.
    """

    leaf: str
    tensor: str
    axis: int = 0
    part: int = 0
    parts: int = 1
    fields: tuple[str, ...] = ()
    tied_to: str | None = None
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """Tensors (name with `{l}` and, for anything at all, `{rest}`) that the model does not need.

    extra_layers: spellings of the config field that counts layers behind the decoder's; the entry
    then holds for these layers alone.
    """

    tensor: str
    reason: str
    extra_layers: tuple[str, ...] = ()

    def covers(self, tensor: str, config_json: Mapping[str, Any]) -> bool:
        """Whether the entry is about this tensor of a checkpoint with this config.json."""
        match = pattern(self.tensor).fullmatch(tensor)
        if match is None or not self.extra_layers:
            return match is not None
        values = text_config(config_json)
        own = int(values["num_hidden_layers"])
        count = max(int(values.get(name) or 0) for name in self.extra_layers)
        return own <= int(match["l"]) < own + count


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The region `slices` of tensor (its whole shape: tensor_shape) is leaf[row], or the leaf."""

    leaf: str
    row: int | None
    tensor: str
    tensor_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    rule: Rule

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the region, which is also that of leaf[row]."""
        shape = list(self.tensor_shape)
        for axis, part in enumerate(self.slices):
            shape[axis] = part.stop - part.start
        return tuple(shape)


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """The tensors of one family.

    rules hold for every checkpoint, `layouts` names alternatives of which a checkpoint follows one
    (experts one by one, or fused); the first is what saving uses when nothing else is asked for.
    """

    family: str
    rules: tuple[Rule, ...]
    layouts: Mapping[str, tuple[Rule, ...]]
    ignored: tuple[Ignored, ...] = ()

    def layout_of(self, tensors: Iterable[str]) -> str:
        """The layout with the most tensors among the given names (the first when none is)."""
        names = list(tensors)
        hits = {}
        for layout, rules in self.layouts.items():
            patterns = [pattern(rule.tensor) for rule in rules]
            hits[layout] = sum(any(p.fullmatch(name) for p in patterns) for name in names)
        return max(hits, key=lambda layout: hits[layout])

    def rules_of(self, layout: str) -> tuple[Rule, ...]:
        """All rules of a checkpoint in this layout. Raises ConfigError for an unknown layout."""
        if layout not in self.layouts:
            raise ConfigError(
                f"layout {layout!r} is unknown for {self.family}; known: {', '.join(self.layouts)}."
            )
        return self.rules + self.layouts[layout]

    def pieces(self, shapes: Mapping[str, tuple[int, ...]], layout: str) -> list[Piece]:
        """The pieces of all leaves, leaf by leaf in the order given.

        shapes: leaf path -> shape. Raises ConfigError when no rule, or more than one, fills a leaf.
        """
        rules = [(pattern(rule.leaf), rule) for rule in self.rules_of(layout)]
        found: list[Piece] = []
        for leaf, shape in shapes.items():
            matches = [(m, rule) for p, rule in rules if (m := p.fullmatch(leaf))]
            if len(matches) != 1:
                raise ConfigError(
                    f"the {self.family} weight table has {len(matches)} rules for the parameter "
                    f"{leaf!r} in layout {layout!r}; one is needed."
                )
            match, rule = matches[0]
            name = rule.tensor.replace("{l}", match.groupdict().get("l", ""))
            found.extend(_leaf_pieces(leaf, shape, name, rule))
        return found

    def ignored_reason(self, tensor: str, config_json: Mapping[str, Any]) -> str | None:
        """Why a tensor is not needed, None when nothing says that it is not."""
        for entry in self.ignored:
            if entry.covers(tensor, config_json):
                return entry.reason
        return None


@lru_cache(maxsize=1024)
def pattern(text: str) -> re.Pattern[str]:
    """A name with `{l}`, `{e}`, `{rest}` as a regular expression; numbers have no leading zeros."""
    escaped = re.escape(text)
    for letter in ("l", "e"):
        escaped = escaped.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>0|[1-9][0-9]*)")
    return re.compile(escaped.replace(r"\{rest\}", ".+"))


def _leaf_pieces(leaf: str, shape: tuple[int, ...], name: str, rule: Rule) -> list[Piece]:
    per_expert = "{e}" in name
    inner = shape[1:] if per_expert else shape
    whole = list(inner)
    slices: tuple[slice, ...] = ()
    if rule.parts > 1:
        size = inner[rule.axis]
        whole[rule.axis] = size * rule.parts
        slices = tuple(slice(0, n) for n in inner[: rule.axis])
        slices += (slice(rule.part * size, (rule.part + 1) * size),)
    return [
        Piece(
            leaf=leaf,
            row=row,
            tensor=name if row is None else name.replace("{e}", str(row)),
            tensor_shape=tuple(whole),
            slices=slices,
            rule=rule,
        )
        for row in (range(shape[0]) if per_expert else (None,))
    ]
