"""Expanding weight tables: every leaf once, both layouts, both directions."""

import dataclasses

import pytest

from cam_jax.conversion.tables import TABLES, Ignored, Rule, WeightTable, table_for
from cam_jax.conversion.tables.table import pattern
from cam_jax.errors import ConfigError

TABLE = WeightTable(
    family="toy",
    rules=(Rule(leaf="embed", tensor="tok.weight"), Rule(leaf="l.{l}.x", tensor="h.{l}.x.weight")),
    layouts={
        "apart": (Rule(leaf="l.{l}.gate", tensor="h.{l}.e.{e}.gate"),),
        "joined": (Rule(leaf="l.{l}.gate", tensor="h.{l}.gate_up", axis=1, part=1, parts=3),),
    },
    ignored=(Ignored(tensor="h.{l}.freq", reason="computed"),),
)
SHAPES = {"embed": (7, 4), "l.0.x": (4,), "l.11.x": (4,), "l.11.gate": (2, 5, 4)}


def test_pattern_takes_numbers_without_leading_zeros() -> None:
    name = pattern("h.{l}.e.{e}.w")
    match = name.fullmatch("h.10.e.0.w")
    assert match is not None and (match["l"], match["e"]) == ("10", "0")
    for wrong in (
        "h.01.e.0.w",
        "h.1.e..w",
        "hx1.e.0.w",
        "h.1.e.0.w.x",
        "h.-1.e.0.w",
        "h.\u0661.e.0.w",
    ):
        assert name.fullmatch(wrong) is None


def test_pieces_one_by_one() -> None:
    pieces = TABLE.pieces(SHAPES, "apart")
    assert [(p.leaf, p.row, p.tensor, p.tensor_shape) for p in pieces] == [
        ("embed", None, "tok.weight", (7, 4)),
        ("l.0.x", None, "h.0.x.weight", (4,)),
        ("l.11.x", None, "h.11.x.weight", (4,)),
        ("l.11.gate", 0, "h.11.e.0.gate", (5, 4)),
        ("l.11.gate", 1, "h.11.e.1.gate", (5, 4)),
    ]
    assert all(piece.slices == () for piece in pieces)


def test_pieces_joined_along_an_axis() -> None:
    piece = TABLE.pieces(SHAPES, "joined")[-1]
    assert piece.tensor_shape == (2, 15, 4)
    assert piece.slices == (slice(0, 2), slice(5, 10))
    assert piece.shape == (2, 5, 4)


def test_layout_follows_the_names() -> None:
    assert TABLE.layout_of(["tok.weight"]) == "apart"
    assert TABLE.layout_of(["h.0.gate_up", "h.1.gate_up", "h.0.e.0.gate"]) == "joined"
    with pytest.raises(ConfigError, match=r"'x' is unknown for toy; known: apart, joined"):
        TABLE.rules_of("x")


def test_leaf_without_a_rule_or_with_two() -> None:
    with pytest.raises(ConfigError, match=r"0 rules for the parameter 'other'"):
        TABLE.pieces({"other": (1,)}, "apart")
    twice = dataclasses.replace(TABLE, rules=TABLE.rules * 2)
    with pytest.raises(ConfigError, match=r"2 rules for the parameter 'embed'"):
        twice.pieces({"embed": (1,)}, "apart")


def test_ignored_reason() -> None:
    assert TABLE.ignored_reason("h.3.freq", {}) == "computed"
    assert TABLE.ignored_reason("h.3.frequency", {}) is None


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'nope'; known: .*olmoe"):
        table_for("nope")


@pytest.mark.parametrize("family", sorted(TABLES))
def test_tables_are_consistent(family: str) -> None:
    table = table_for(family)
    assert table.family == family
    for layout in table.layouts:
        rules = table.rules_of(layout)
        leaves = [rule.leaf for rule in rules]
        assert len(set(leaves)) == len(leaves)
        joined: dict[str, list[Rule]] = {}
        for rule in rules:
            assert ("{l}" in rule.leaf) == ("{l}" in rule.tensor)
            assert rule.tied_to is None or rule.tied_to in leaves
            joined.setdefault(rule.tensor, []).append(rule)
        for parts in joined.values():  # blocks side by side, each leaf one of them, none left out
            assert [rule.part for rule in parts] == list(range(parts[0].parts))
            assert len({(rule.axis, rule.parts) for rule in parts}) == 1


def test_extra_layers_are_ignored_as_far_as_the_config_counts_them() -> None:
    table = table_for("deepseek_v3")
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 2}
    for name in (
        "model.layers.3.eh_proj.weight",
        "model.layers.4.mlp.experts.0.up_proj.weight",
        "model.layers.3.embed_tokens.weight",
    ):
        assert "multi-token" in (table.ignored_reason(name, config) or "")
        assert table.ignored_reason(name, {"text_config": config}) is not None
        assert table.ignored_reason(name, {"num_hidden_layers": 3}) is None
    assert table.ignored_reason("model.layers.5.eh_proj.weight", config) is None
    assert table.ignored_reason("model.layers.2.eh_proj.weight", config) is None
    assert table.ignored_reason("model.layers.30.eh_proj.weight", config) is None
