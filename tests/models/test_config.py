"""The decoder's description: segments, MoE layers, refusals."""

import dataclasses

import pytest

from cam_jax.errors import ConfigError
from cam_jax.models.config import LayerKind, Segment
from tests.models.tiny import olmoe

DENSE, SPARSE = LayerKind(moe=False), LayerKind(moe=True)
WINDOWED = LayerKind(moe=True, window=8)


def with_layers(*layers: LayerKind):
    return dataclasses.replace(olmoe(), layers=layers, mlp_size=8)


def test_equal_layers_are_one_segment():
    assert olmoe(num_hidden_layers=5).segments == (
        Segment(start=0, length=5, moe_start=0, kind=SPARSE),
    )


def test_a_segment_is_a_run_of_equal_layers_and_counts_its_moe_layers():
    config = with_layers(DENSE, SPARSE, SPARSE, DENSE, WINDOWED)
    assert config.segments == (
        Segment(start=0, length=1, moe_start=0, kind=DENSE),
        Segment(start=1, length=2, moe_start=0, kind=SPARSE),
        Segment(start=3, length=1, moe_start=2, kind=DENSE),
        Segment(start=4, length=1, moe_start=2, kind=WINDOWED),
    )
    assert config.moe_layers == (1, 2, 4)
    assert config.num_layers == 5
    assert config.num_moe_layers == 3


def test_a_configuration_is_hashable_and_compares_by_value():
    assert hash(olmoe()) == hash(olmoe())
    assert olmoe() == olmoe()
    assert olmoe() != olmoe(vocab_size=51)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": ()}, "num_hidden_layers"),
        ({"moe": None}, "moe"),
        ({"layers": (DENSE,)}, "mlp_size"),
    ],
)
def test_contradictions_are_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        dataclasses.replace(olmoe(), **changes)


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ConfigError, match="num_key_value_heads=3"):
        dataclasses.replace(olmoe().attention, num_kv_heads=3)
