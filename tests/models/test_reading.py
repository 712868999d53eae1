"""Reading fields and the rotary embedding out of Hugging Face configurations."""

import math

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.reading import Fields, head_size, read_rope
from cam_jax.models.rope import RopeConfig


def rope(**values):
    return read_rope(Fields(values), dim=8, max_positions=512)


def test_spellings_of_one_field_must_agree():
    assert Fields({"a": 3, "b": 3}).integer("a", "b") == 3
    assert Fields({"b": 4}).integer("a", "b") == 4
    with pytest.raises(ConfigError, match="a=3 and b=4"):
        Fields({"a": 3, "b": 4}).integer("a", "b")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (True, Fields.integer),
        (1.5, Fields.integer),
        (0, Fields.integer),
        ("3", Fields.integer),
        (True, Fields.number),
        (float("nan"), Fields.number),
        (0, Fields.number),
        ("1", Fields.number),
        (1, Fields.flag),
        ("true", Fields.flag),
    ],
)
def test_wrong_values_are_refused_by_name(value, read):
    with pytest.raises(ConfigError, match="some_field"):
        read(Fields({"some_field": value}), "some_field")


@pytest.mark.parametrize("read", [Fields.integer, Fields.number, Fields.flag])
@pytest.mark.parametrize("values", [{}, {"some_field": None}])
def test_a_missing_field_is_named_unless_there_is_a_default(read, values):
    with pytest.raises(ConfigError, match=r"some_field \(or other\) is missing"):
        read(Fields(values), "some_field", "other")
    assert read(Fields(values), "some_field", default=None) is None


def test_only_refuses_what_is_not_built():
    Fields({}).only("hidden_act", "silu")
    Fields({"hidden_act": "silu"}).only("hidden_act", "silu")
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        Fields({"hidden_act": "gelu"}).only("hidden_act", "silu")


def test_mapping_must_be_a_dictionary():
    with pytest.raises(ConfigError, match="rope_scaling"):
        Fields({"rope_scaling": "yarn"}).mapping("rope_scaling")


def test_head_size_must_be_whole():
    assert head_size(Fields({}), hidden=12, heads=3) == 4
    with pytest.raises(ConfigError, match="hidden_size=12"):
        head_size(Fields({}), hidden=12, heads=5)


PLAIN = RopeConfig(dim=8, theta=500.0)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 500},
        {"rope_theta": 500, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ],
)
def test_every_spelling_of_plain_rope_is_the_same(values):
    assert rope(**values) == PLAIN


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_every_spelling_of_linear_scaling_is_the_same(name, place):
    expected = RopeConfig(dim=8, theta=500.0, kind="linear", factor=4.0)
    assert rope(rope_theta=500.0, **{place: {name: "linear", "factor": 4}}) == expected
    assert rope(**{place: {name: "linear", "factor": 4, "rope_theta": 500}}) == expected


def test_yarn_takes_its_attention_factor_from_the_most_explicit_field():
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    plain = 0.1 * math.log(8.0) + 1.0
    assert rope(rope_theta=500, rope_scaling=scaling).attention_factor == pytest.approx(plain)
    both = scaling | {"mscale": 1.0, "mscale_all_dim": 0.5}
    ratio = plain / (0.05 * math.log(8.0) + 1.0)
    assert rope(rope_theta=500, rope_scaling=both).attention_factor == pytest.approx(ratio)
    told = both | {"attention_factor": 1.25}
    assert rope(rope_theta=500, rope_scaling=told).attention_factor == 1.25


def test_yarn_without_factor_stretches_to_the_models_positions():
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    read = rope(rope_theta=500, rope_scaling=scaling)
    assert (read.factor, read.original_positions) == (4.0, 128)
    assert (read.beta_fast, read.beta_slow, read.truncate) == (32.0, 1.0, True)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "type"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_theta": 1.0, "rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "new_key": 2.0}}, "new_key"),
        ({"rope_theta": 1.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 1.0, "rope_scaling": [1.0]}, "rope_scaling"),
        (
            {
                "rope_theta": 1.0,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"factor": 3.0},
            },
            "factor",
        ),
    ],
)
def test_what_is_missing_unknown_or_contradictory_is_named(values, word):
    with pytest.raises(ConfigError, match=word):
        rope(**values)


def test_an_odd_head_cannot_be_rotated():
    with pytest.raises(ConfigError, match="even"):
        read_rope(Fields({"rope_theta": 1.0}), dim=7, max_positions=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**12), ("num_experts", 10**9), ("hidden_size", 2**31)],
)
def test_absurd_counts_are_refused_before_anything_is_made_of_them(field, value):
    with pytest.raises(ConfigError, match=rf"{field}={value} is beyond any model"):
        Fields({field: value}).integer(field)
