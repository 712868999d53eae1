"""The gather path's memory is linear in T, the one-hot form's is not: read from the programs."""

from cam_jax import CapacityPolicy
from cam_jax.benchmarks.transports import LayerShape, Measurement, growth, measure_transport

SMALL = LayerShape(num_experts=16, top_k=4, features=32, hidden=16)


def exponent(transport, policy):
    return growth(
        [
            measure_transport(transport, tokens, shape=SMALL, policy=policy, repeats=0)
            for tokens in (512, 2048)
        ]
    )


def test_temporary_memory_of_gather_is_linear_and_of_one_hot_is_quadratic():
    ceiling = CapacityPolicy(capacity_factor=1.0)
    assert exponent("gather", ceiling) < 1.15
    assert exponent("einsum", ceiling) > 1.6


def test_temporary_memory_of_dropless_is_linear():
    assert exponent("dropless", None) < 1.15


def test_growth_is_the_exponent():
    cubes = [
        Measurement(transport="gather", tokens=t, temporary_bytes=7 * t**3, seconds=None)
        for t in (10, 20, 80)
    ]
    assert abs(growth(cubes) - 3) < 1e-3


def test_a_measurement_is_timed_if_asked_for():
    timed = measure_transport("gather", 8, shape=SMALL, repeats=1)
    assert timed.seconds is not None and timed.seconds > 0
    assert timed.temporary_bytes > 0
