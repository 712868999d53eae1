"""The decoder as a whole: padding, cache, policies per layer, gradients, compile size."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cam_jax.capacity import CapacityPolicy
from cam_jax.errors import InputError, PolicyError
from cam_jax.models import decoder
from cam_jax.models.config import LayerKind
from tests.models.tiny import olmoe, params_of, run, step, tokens

CONFIG = olmoe()
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG)


@pytest.fixture(scope="module")
def drawn():
    return decoder.init_params(CONFIG, jax.random.key(4))


@pytest.fixture(scope="module", autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def padded(ids, left, right, seed=9):
    """The rows with left and right positions of padding that holds arbitrary token ids."""
    rng = np.random.default_rng(seed)
    rows, length = ids.shape
    whole = rng.integers(-100, 1000, (rows, left + length + right))
    whole[:, left : left + length] = ids
    valid = np.zeros(whole.shape, bool)
    valid[:, left : left + length] = True
    return jnp.asarray(whole, jnp.int32), jnp.asarray(valid)


def logits_of(params, ids, valid=None):
    """Logits without a policy; most tests give it [2, 8], so that it compiles once."""
    valid = jnp.ones(ids.shape, bool) if valid is None else valid
    return run(CONFIG, params, ids, valid)[0]


def test_shapes_and_dtypes(params):
    logits, load = run(CONFIG, params, tokens(2, 8), jnp.ones((2, 8), bool))
    assert logits.shape == (2, 8, 50)
    assert logits.dtype == jnp.float32
    assert load.demand.shape == (3, 6)
    np.testing.assert_array_equal(np.asarray(load.demand).sum(1), [32, 32, 32])


@pytest.mark.parametrize(("left", "right"), [(0, 8), (8, 0), (3, 5), (24, 0), (0, 24)])
def test_padding_on_either_side_changes_nothing(params, left, right):
    ids = tokens(2, 8)
    plain, load = run(CONFIG, params, ids, jnp.ones((2, 8), bool))
    logits, padded_load = run(CONFIG, params, *padded(ids, left, right))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:, left : left + 8], plain, atol=TOLERANCE)
    np.testing.assert_array_equal(load.demand, padded_load.demand)


def test_a_row_of_nothing_but_padding_disturbs_no_other(params):
    ids = tokens(2, 8)
    logits = logits_of(params, ids, jnp.asarray([[True] * 8, [False] * 8]))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[0], logits_of(params, ids)[0], atol=TOLERANCE)


def test_no_position_sees_a_later_one(params):
    ids = tokens(2, 8)
    one, two = logits_of(params, ids), logits_of(params, ids.at[0, 4].add(1))
    np.testing.assert_allclose(one[:, :4], two[:, :4], atol=TOLERANCE)
    assert np.abs(one[0, 4:] - two[0, 4:]).max() > 1e-2
    np.testing.assert_allclose(one[1], two[1], atol=TOLERANCE)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 1)])
def test_decoding_with_the_cache_equals_the_full_pass(params, left, right):
    ids = tokens(2, 8)
    full = logits_of(params, ids)
    prompt, valid = padded(ids[:, :5], left, right)
    logits, cache = step(CONFIG, params, prompt, decoder.init_cache(CONFIG, 2, 16), valid)
    np.testing.assert_allclose(logits[:, left : left + 5], full[:, :5], atol=TOLERANCE)
    for position in range(5, 8):
        logits, cache = step(CONFIG, params, ids[:, position : position + 1], cache)
        np.testing.assert_allclose(logits[:, 0], full[:, position], atol=TOLERANCE)
    np.testing.assert_array_equal(cache.counts, [8, 8])
    assert int(cache.length) == 11
    np.testing.assert_array_equal(np.asarray(cache.mask).sum(1), [8, 8])


def test_rows_of_different_length_decode_from_their_own_positions(params):
    ids = tokens(2, 8)
    new = tokens(2, 1, seed=1)
    valid = jnp.asarray([[False] * 4 + [True] * 4, [True] * 6 + [False] * 2])
    _, cache = step(CONFIG, params, ids, decoder.init_cache(CONFIG, 2, 16), valid)
    logits, _ = step(CONFIG, params, new, cache)
    whole = np.zeros((2, 8), np.int32)
    whole[0, :5] = [*ids[0, 4:], new[0, 0]]
    whole[1, :7] = [*ids[1, :6], new[1, 0]]
    full = logits_of(params, jnp.asarray(whole), jnp.arange(8) < jnp.asarray([[5], [7]]))
    np.testing.assert_allclose(logits[0, 0], full[0, 4], atol=TOLERANCE)
    np.testing.assert_allclose(logits[1, 0], full[1, 6], atol=TOLERANCE)


def test_a_prompt_in_two_calls_equals_one(params):
    ids = tokens(2, 8)
    _, cache = step(CONFIG, params, ids[:, :4], decoder.init_cache(CONFIG, 2, 16))
    logits, _ = step(CONFIG, params, ids[:, 4:], cache)
    np.testing.assert_allclose(logits, logits_of(params, ids)[:, 4:], atol=TOLERANCE)


def test_a_cache_too_short_is_refused_or_poisons_the_result(params):
    empty = decoder.init_cache(CONFIG, 2, 16)
    with pytest.raises(InputError, match="17 positions do not fit"):
        decoder.forward(CONFIG, params, tokens(2, 17), cache=empty)
    full, nearly = (
        dataclasses.replace(empty, length=jnp.asarray(used, jnp.int32), empty=False)
        for used in (16, 15)
    )
    with pytest.raises(InputError, match="16 of its 16 columns"):
        decoder.forward(CONFIG, params, tokens(2, 1), cache=full)
    # Inside jit the length is not known, and nothing can be raised.
    assert np.isnan(step(CONFIG, params, tokens(2, 1), full)[0]).all()
    assert np.isfinite(step(CONFIG, params, tokens(2, 1), nearly)[0]).all()


def test_the_cache_is_updated_in_place(params):
    cache = dataclasses.replace(decoder.init_cache(CONFIG, 2, 4096), empty=False)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    donating = jax.jit(
        lambda params, ids, cache: decoder.forward(CONFIG, params, ids, cache=cache),
        donate_argnames="cache",
    )
    compiled = donating.lower(params, tokens(2, 1), cache).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    # One layer's keys and values are read out at a time, the whole cache never.
    assert memory.temp_size_in_bytes < size


def test_the_program_does_not_grow_with_depth(params):
    def lines(layers: int) -> int:
        config = olmoe(num_hidden_layers=layers)
        shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
        ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        lowered = jax.jit(partial(decoder.forward, config)).lower(shapes, ids)
        return lowered.as_text().count("\n")

    assert lines(9) == lines(3)


def test_tied_embeddings_are_the_output_projection():
    tied = olmoe(tie_word_embeddings=True)
    params = params_of(tied)
    assert "lm_head" not in params
    ids = tokens(2, 8)
    free = params | {"lm_head": params["embed"]}
    tied_logits = run(tied, params, ids, jnp.ones((2, 8), bool))[0]
    np.testing.assert_allclose(tied_logits, logits_of(free, ids), atol=TOLERANCE)


MIXED = dataclasses.replace(
    CONFIG,
    layers=(LayerKind(moe=False), LayerKind(), LayerKind(), LayerKind(window=3)),
    mlp_size=12,
)


def test_segments_of_several_kinds_run_in_order():
    params = params_of(MIXED)
    assert len(params["segments"]) == 3
    ids = tokens(2, 8)
    logits, load = run(MIXED, params, ids)
    assert load.demand.shape == (3, 6)
    _, cache = step(MIXED, params, ids[:, :4], decoder.init_cache(MIXED, 2, 8))
    last, _ = step(MIXED, params, ids[:, 4:], cache)
    np.testing.assert_allclose(last, logits[:, 4:], atol=TOLERANCE)


def test_a_window_hides_what_is_far():
    dense = LayerKind(moe=False, window=2)
    near = dataclasses.replace(CONFIG, layers=(dense,), moe=None, mlp_size=12)
    params = params_of(near)
    ids = tokens(1, 6)
    one = run(near, params, ids)[0]
    two = run(near, params, ids.at[0, 0].add(1))[0]
    assert np.abs(one[:, 1] - two[:, 1]).max() > 1e-3
    np.testing.assert_allclose(one[:, 2:], two[:, 2:], atol=TOLERANCE)


def test_a_model_without_experts_has_no_statistics():
    dense = dataclasses.replace(CONFIG, layers=(LayerKind(moe=False),) * 2, moe=None, mlp_size=12)
    logits, load = run(dense, params_of(dense), tokens(1, 4))
    assert load is None
    assert np.isfinite(logits).all()


def test_one_policy_per_layer_acts_on_that_layer(params):
    tight = CapacityPolicy(capacity=2)
    load = run(CONFIG, params, tokens(2, 8), policy=(None, tight, None))[1]
    dropped = np.asarray(load.dropped)
    assert dropped[0] == dropped[2] == 0
    assert dropped[1] > 0


def test_a_tuple_of_equal_policies_is_the_same_program(params):
    tight = CapacityPolicy(capacity=2)
    one = run.lower(CONFIG, params, tokens(2, 8), policy=tight).as_text()
    several = run.lower(CONFIG, params, tokens(2, 8), policy=(tight,) * 3).as_text()
    assert one == several


def test_runs_of_policies_index_the_stack_and_count_layers_through(params):
    # The two policies mean the same without being equal, so the layers are scanned in two runs.
    # Random keys are folded from the layer: a count that restarted would drop other tokens.
    ids = tokens(2, 8)
    policy = CapacityPolicy(capacity=2, metric="random")
    other = CapacityPolicy(capacity=2, metric="random", min_capacity=2)
    one = run(CONFIG, params, ids, policy=policy)
    several = run(CONFIG, params, ids, policy=(policy, other, other))
    np.testing.assert_allclose(one[0], several[0], atol=TOLERANCE)
    np.testing.assert_array_equal(one[1].load, several[1].load)
    assert (np.asarray(one[1].dropped) > 0).all()


def test_the_wrong_number_of_policies_is_refused(params):
    with pytest.raises(PolicyError, match="tuple of 2, but the model has 3"):
        decoder.forward(CONFIG, params, tokens(1, 4), policy=(None, None))


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_empty_batches_are_refused(params, shape):
    with pytest.raises(InputError, match="at least one"):
        decoder.forward(CONFIG, params, jnp.zeros(shape, jnp.int32))


def test_a_cache_for_another_batch_is_refused(params):
    with pytest.raises(InputError, match="3 rows"):
        decoder.forward(CONFIG, params, tokens(2, 4), cache=decoder.init_cache(CONFIG, 3, 8))
    with pytest.raises(InputError, match="at least one"):
        decoder.init_cache(CONFIG, 0, 8)


def test_gradients_reach_every_parameter(params):
    ids = tokens(2, 8)

    def loss(params):
        hidden, _, _ = decoder.forward(CONFIG, params, ids)
        picked = jax.nn.log_softmax(decoder.logits(CONFIG, params, hidden))[:, :-1]
        return -jnp.take_along_axis(picked, ids[:, 1:, None], -1).mean()

    grads = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
    # Along a random direction the derivative is the difference quotient.
    keys = jax.random.split(jax.random.key(5), len(jax.tree.leaves(params)))
    direction = jax.tree.unflatten(
        jax.tree.structure(params),
        [jax.random.normal(k, x.shape) for k, x in zip(keys, jax.tree.leaves(params), strict=True)],
    )
    size = 1e-3
    loss = jax.jit(loss)
    ahead = loss(jax.tree.map(lambda x, d: x + size * d, params, direction))
    behind = loss(jax.tree.map(lambda x, d: x - size * d, params, direction))
    slope = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose((ahead - behind) / (2 * size), slope, rtol=0.05, atol=0.02)


def test_bfloat16_parameters_give_bfloat16_hidden_states_and_float32_logits():
    def call(ids):
        params = decoder.init_params(CONFIG, jax.random.key(0), jnp.bfloat16)
        cache = decoder.init_cache(CONFIG, 1, 8, jnp.bfloat16)
        hidden, cache, _ = decoder.forward(CONFIG, params, ids, cache=cache)
        return params, hidden, cache.entries, decoder.logits(CONFIG, params, hidden)

    params, hidden, entries, logits = jax.eval_shape(call, tokens(1, 4))
    kept = jax.tree.leaves((params, hidden, entries))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32


def test_the_nnx_module_is_the_same_model(drawn):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: decoder.Decoder(CONFIG, rngs=nnx.Rngs(0))))
    pure = drawn | {"segments": dict(enumerate(drawn["segments"]))}
    assert jax.tree.structure(pure) == jax.tree.structure(nnx.to_pure_dict(state))

    @jax.jit
    def through_module(pure, ids):
        module = nnx.merge(graphdef, pure)
        return module.logits(module(ids)[0])

    ids = tokens(2, 8)
    expected = logits_of(drawn, ids)
    np.testing.assert_allclose(through_module(pure, ids), expected, atol=TOLERANCE)


def test_fresh_parameters_have_the_configured_spread_and_differ_between_layers(drawn):
    layer = drawn["segments"][0]
    gate = np.asarray(layer["moe"]["experts"]["gate"])
    assert np.std(gate) == pytest.approx(0.3, rel=0.1)
    assert np.abs(gate[0] - gate[1]).max() > 0.1
    np.testing.assert_array_equal(layer["attn"]["q_norm"], np.ones((3, 16)))
