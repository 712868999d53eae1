"""Reading Hugging Face configurations: each field asked for by name, checked, never guessed.

A field that the arithmetic depends on and that is absent, of the wrong type, contradictory or asks
for something that is not built raises a ConfigError with its name.
"""

import math
from collections.abc import Mapping
from typing import Any

from cam_jax.errors import ConfigError
from cam_jax.models.rope import RopeConfig, yarn_mscale

_NEEDED = object()

# Counts that become lists and names of tensors before any file can contradict them: far above every
# published model, and low enough that a corrupt config cannot fill the memory.
_MOST = {
    "num_hidden_layers": 1000,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "num_experts_per_tok": 4096,
}
_INT32_MAX = 2**31 - 1

# Keys of a rope dictionary, per type, besides the type itself and rope_theta.
_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


class Fields:
    """A configuration's fields, each read by a method that says what it must be.

    Several names are spellings of one field; where more than one is present they must agree. null
    counts as absent. Without a default an absent field is an error.
    """

    def __init__(self, values: Mapping[str, Any], *, place: str = "config") -> None:
        self._values = values
        self._place = place

    def raw(self, *names: str) -> Any:
        """The value under any of the names, None if absent.

        Raises:
            ConfigError: two names hold different values.
        """
        found = {name: self._values[name] for name in names if self._values.get(name) is not None}
        if not found:
            return None
        first_name, value = next(iter(found.items()))
        for name, other in found.items():
            if other != value:
                raise ConfigError(
                    f"{self._place}: {first_name}={value!r} and {name}={other!r} are the same "
                    "field and must agree"
                )
        return value

    def _get(self, names: tuple[str, ...], default: Any) -> tuple[Any, bool]:
        value = self.raw(*names)
        if value is not None:
            return value, True
        if default is _NEEDED:
            spellings = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ConfigError(f"{self._place}: field {names[0]}{spellings} is missing")
        return default, False

    def integer(self, *names: str, default: Any = _NEEDED, minimum: int = 1) -> Any:
        """A whole number of at least minimum, or the default."""
        value, present = self._get(names, default)
        if not present:
            return value
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < minimum:
            raise ConfigError(
                f"{self._place}: {names[0]} must be an integer of at least {minimum}, got {value!r}"
            )
        most = _MOST.get(names[0], _INT32_MAX)
        if value > most:
            raise ConfigError(
                f"{self._place}: {names[0]}={value!r} is beyond any model: at most {most} is read"
            )
        return int(value)

    def number(self, *names: str, default: Any = _NEEDED, positive: bool = True) -> Any:
        """A finite number, positive if asked, or the default."""
        value, present = self._get(names, default)
        if not present:
            return value
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or (positive and value <= 0):
            kind = "a positive number" if positive else "a number"
            raise ConfigError(f"{self._place}: {names[0]} must be {kind}, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: Any = _NEEDED) -> Any:
        """True or false, or the default."""
        value, present = self._get(names, default)
        if present and not isinstance(value, bool):
            raise ConfigError(f"{self._place}: {names[0]} must be true or false, got {value!r}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses a field whose value is present and not one of those that are built."""
        value = self.raw(name)
        if value is not None and value not in allowed:
            built = ", ".join(repr(item) for item in allowed) or "null"
            raise ConfigError(f"{self._place}: {name}={value!r} is not supported (only {built})")

    def given(self, name: str) -> bool:
        """Whether the field is there at all, null included."""
        return name in self._values

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0, empty if absent."""
        value = self.raw(name)
        value = [] if value is None else value
        whole = isinstance(value, list | tuple) and all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
        )
        if not whole:
            raise ConfigError(f"{self._place}: {name} must be a list of integers, got {value!r}")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A dictionary, empty if absent."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._place}: {name} must be a dictionary, got {value!r}")
        return value


def head_size(fields: Fields, *, hidden: int, heads: int) -> int:
    """D / H, refused where it is not whole."""
    if hidden % heads:
        raise ConfigError(
            f"config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def read_rope(
    fields: Fields, *, dim: int, max_positions: int, interleaved: bool = False
) -> RopeConfig:
    """The rotary embedding, from `rope_theta` + `rope_scaling` or from `rope_parameters`.

    Both spellings of the type (`type`, `rope_type`) are read. In transformers 5 the dictionary is
    always there; "default" then means plain RoPE.

    Args:
        fields: the configuration.
        dim: rotated features per head.
        max_positions: the model's positions, from which YaRN takes what it is not told.
        interleaved: the family's pairing of features.

    Raises:
        ConfigError: rope_theta is missing, the type or a key is unknown, or two places disagree.
    """
    if dim % 2:
        raise ConfigError(f"config: rotary embedding needs an even head size, got {dim}")
    merged = _merged_rope(fields)
    rope = Fields(merged, place="config: rope_parameters/rope_scaling")
    kind = rope.raw("rope_type", "type")
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(
            f"config: rope_type={kind!r} is not supported (only {', '.join(_ROPE_KEYS)})"
        )
    for key, value in merged.items():
        known = key in _ROPE_KEYS[kind] or key in {"rope_type", "type", "rope_theta"}
        if value is not None and not known:
            raise ConfigError(f"config: rope key {key!r} is not supported with rope_type={kind!r}")
    if merged.get("rope_theta") is None:
        raise ConfigError("config: field rope_theta is missing (at the top or in rope_parameters)")
    theta = rope.number("rope_theta")
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta, interleaved=interleaved)
    if kind == "linear":
        factor = rope.number("factor")
        return RopeConfig(
            dim=dim, theta=theta, kind="linear", factor=factor, interleaved=interleaved
        )
    return _read_yarn(rope, dim=dim, theta=theta, positions=max_positions, interleaved=interleaved)


def softmax_mscale(fields: Fields, rope: RopeConfig) -> float:
    """What DeepSeek multiplies the softmax scale by: YaRN's mscale_all_dim growth, squared.

    1 without YaRN or without mscale_all_dim. Without it, position 0 alone comes out right.
    """
    values = Fields(_merged_rope(fields), place="config: rope_parameters/rope_scaling")
    mscale_all = values.number("mscale_all_dim", default=0.0, positive=False)
    if rope.kind != "yarn" or not mscale_all:
        return 1.0
    return yarn_mscale(rope.factor, mscale_all) ** 2


def _merged_rope(fields: Fields) -> dict[str, Any]:
    """Both dictionaries and the fields at the top in one; contradictions are refused."""
    merged: dict[str, Any] = {}
    places: dict[str, str] = {}

    def add(key: str, value: Any, place: str) -> None:
        if value is None:
            return
        if key in merged and merged[key] != value:
            raise ConfigError(
                f"config: {key}={merged[key]!r} in {places[key]} and {value!r} in {place} disagree"
            )
        merged[key] = value
        places[key] = place

    for place in ("rope_parameters", "rope_scaling"):
        for key, value in fields.mapping(place).items():
            add(key, value, place)
    add("rope_theta", fields.raw("rope_theta"), "the top level")
    add("partial_rotary_factor", fields.raw("partial_rotary_factor"), "the top level")
    if merged.get("partial_rotary_factor") == 1:
        del merged["partial_rotary_factor"]
    return merged


def _read_yarn(
    rope: Fields, *, dim: int, theta: float, positions: int, interleaved: bool
) -> RopeConfig:
    """YaRN's figures with the defaults of transformers' `_compute_yarn_parameters`."""
    original = rope.integer("original_max_position_embeddings", default=positions)
    factor = rope.number("factor", default=positions / original)
    mscale = rope.number("mscale", default=0.0, positive=False)
    mscale_all = rope.number("mscale_all_dim", default=0.0, positive=False)
    if mscale and mscale_all:
        implied = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        implied = yarn_mscale(factor)
    return RopeConfig(
        dim=dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.number("attention_factor", default=implied),
        interleaved=interleaved,
    )
