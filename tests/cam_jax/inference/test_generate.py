"""Generation: against the plain model, under padding, EOS, streaming, and what is compiled."""

import dataclasses

import jax
import numpy as np
import pytest

from cam_jax import CapacityPolicy
from cam_jax.errors import InputError
from cam_jax.inference import generate as generation
from tests.cam_jax.inference import tiny

ROWS = tiny.prompts(5, 1, 9)
TIGHT = CapacityPolicy(capacity_factor=0.5, group="batch")


def programs() -> int:
    """Compiled programs of both phases."""
    return generation.prefill._cache_size() + generation.decode._cache_size()


def test_greedy_equals_the_model_without_a_cache():
    lm = tiny.model()
    found = lm.generate(ROWS, max_new_tokens=6)
    assert found.tokens.shape == found.logprobs.shape == (3, 6)
    assert found.tokens.dtype == np.int32 and found.logprobs.dtype == np.float32
    assert found.texts is None and found.notes == ()
    rows = [list(row) for row in ROWS]
    for step in range(6):
        ids, mask = tiny.padded(rows, "right", extra=16 - max(map(len, rows)))
        logits = np.asarray(lm.logits(ids, mask))
        for i, row in enumerate(rows):
            values = logits[i, len(row) - 1].astype(np.float64)
            token = int(found.tokens[i, step])
            assert values[token] == values.max()
            expected = values[token] - np.log(np.exp(values).sum())
            np.testing.assert_allclose(found.logprobs[i, step], expected, atol=2e-5)
            row.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_and_the_form_of_prompts_change_nothing(temperature):
    lm = tiny.model().with_policy(TIGHT)
    base = lm.generate(ROWS, max_new_tokens=4, temperature=temperature)
    for side, extra in (("left", 0), ("right", 0), ("left", 13), ("right", 40)):
        ids, mask = tiny.padded(ROWS, side, extra)
        found = lm.generate(ids, mask, max_new_tokens=4, temperature=temperature)
        assert found.tokens.tolist() == base.tokens.tolist()
        assert found.logprobs.tolist() == base.logprobs.tolist()


def test_batch_mates_change_nothing_without_a_ceiling():
    lm = tiny.model()
    options = {"max_new_tokens": 5, "temperature": 0.9, "top_p": 0.9, "seed": 3}
    together = lm.generate(ROWS, **options)
    alone = lm.generate(ROWS[:1], **options)
    assert together.tokens[:1].tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(together.logprobs[:1], alone.logprobs, atol=1e-5)


def test_logprobs_are_those_of_score():
    lm = tiny.model()
    found = lm.generate(ROWS, max_new_tokens=5, temperature=1.2, top_k=9, seed=11)
    whole = [row + new.tolist() for row, new in zip(ROWS, found.tokens, strict=True)]
    ids, mask = tiny.padded(whole, "left")
    np.testing.assert_allclose(lm.score(ids, mask)[:, -5:], found.logprobs, atol=2e-5)


def test_seeds_steps_and_temperature_matter():
    lm = tiny.model()
    draws = [
        lm.generate(ROWS, max_new_tokens=6, temperature=2.0, seed=seed).tokens.tolist()
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    likeliest = lm.generate(ROWS, max_new_tokens=6, temperature=5.0, top_k=1, seed=2)
    assert likeliest.tokens.tolist() == lm.generate(ROWS, max_new_tokens=6).tokens.tolist()


def test_rows_end_at_any_eos_and_are_padded():
    free = tiny.model().generate(ROWS, max_new_tokens=8)
    # Two ids: one that the first row draws third, one that the second row draws first.
    ends = (int(free.tokens[0, 2]), int(free.tokens[1, 0]))
    lm = tiny.with_special(eos_ids=ends, pad_id=49)
    found = lm.generate(ROWS, max_new_tokens=8)
    for i in range(3):
        drawn = free.tokens[i].tolist()
        stop = min((drawn.index(end) + 1 for end in ends if end in drawn), default=8)
        assert found.lengths[i] == stop
        assert found.tokens[i].tolist() == drawn[:stop] + [49] * (8 - stop)
        np.testing.assert_allclose(found.logprobs[i, :stop], free.logprobs[i, :stop], atol=1e-5)
        assert not found.logprobs[i, stop:].any()
    assert found.lengths[1] == 1
    unstopped = lm.generate(ROWS, max_new_tokens=8, stop_at_eos=False)
    assert unstopped.tokens.tolist() == free.tokens.tolist()
    assert unstopped.lengths.tolist() == [8, 8, 8]


def test_streaming_is_the_same_stops_early_and_compiles_nothing():
    free = tiny.model().generate(ROWS[:1], max_new_tokens=8)
    lm = tiny.with_special(eos_ids=(int(free.tokens[0, 3]),), pad_id=49)
    whole = lm.generate(ROWS[:1], max_new_tokens=8)
    before = programs()
    seen = []
    streamed = lm.generate(
        ROWS[:1], max_new_tokens=8, on_token=lambda step, tokens: seen.append((step, tokens))
    )
    assert programs() == before
    assert streamed.tokens.tolist() == whole.tokens.tolist()
    assert streamed.logprobs.tolist() == whole.logprobs.tolist()
    length = int(whole.lengths[0])
    assert [step for step, _ in seen] == list(range(length))
    assert [tokens.tolist() for _, tokens in seen] == whole.tokens[:, :length].T.tolist()


def test_an_error_in_the_callback_comes_through():
    def stop(step, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.model().generate(ROWS[:1], max_new_tokens=8, on_token=stop)


def test_new_lengths_and_options_compile_nothing():
    lm = tiny.model()
    lm.generate(tiny.prompts(3), max_new_tokens=2)
    before = programs()
    for length, new in ((1, 1), (7, 5), (16, 32), (12, 17)):
        lm.generate(tiny.prompts(length), max_new_tokens=new, temperature=0.5, seed=length)
        lm.generate(tiny.prompts(length), max_new_tokens=new, top_k=length, top_p=0.5)
    lm.with_policy(CapacityPolicy()).with_policy(None).generate(
        ROWS[:1], max_new_tokens=32, stop_at_eos=False
    )
    assert programs() == before


def test_the_state_is_donated_and_weights_are_arguments():
    lm = tiny.model()
    batch = generation.Batch(ids=np.ones((1, 16), np.int32), valid=np.ones((1, 16), np.bool_))
    setting = generation.Setting(
        config=lm.config, policy=None, mesh=None, virtual_devices=1, pad_id=0
    )
    sampling = generation.Sampling(
        temperature=np.float32(0), top_k=np.int32(50), top_p=np.float32(1), seed=np.uint32(0)
    )
    eos = np.array([-1], np.int32)
    state = generation.prefill(
        lm.params, batch.ids, batch.valid, None, sampling, eos, setting=setting, new_tokens=32
    )
    after = generation.decode(lm.params, state, np.int32(2), sampling, eos, setting=setting)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache.entries))
    traced = generation.decode.trace(lm.params, after, np.int32(2), sampling, eos, setting=setting)
    assert sum(np.size(constant) for constant in traced.jaxpr.consts) < 100


@pytest.fixture
def phases(monkeypatch):
    """(positions, policy) of every forward pass that is traced."""
    seen = []
    forward = generation.decoder.forward

    def spy(config, params, ids, **options):
        seen.append((ids.shape[1], options["policy"]))
        return forward(config, params, ids, **options)

    monkeypatch.setattr(generation.decoder, "forward", spy)
    return seen


# The second of two layers has one slot per expert for the whole batch.
ONE_SLOT = CapacityPolicy(capacity=1, group="batch")
CAPPED = dataclasses.replace(ONE_SLOT, decode="capped")


def test_decode_is_exempt_by_phase_not_by_shape(phases):
    rows, found = [[7]] * 5, {}
    for policy in ((None, ONE_SLOT), (None, CAPPED)):
        phases.clear()
        lm = tiny.model().with_policy(policy)
        found[policy] = lm.generate(rows, max_new_tokens=3)
        step_policy = None if policy[1] is ONE_SLOT else policy
        assert phases == [(16, policy), (1, step_policy)]
    exempt, capped = found.values()
    # A prompt of one token is prefill: of five equal tokens the experts keep the first.
    first = np.asarray(jax.nn.log_softmax(lm.logits(rows)[:, 0]))
    assert abs(first[0] - first[1]).max() > 1e-3
    np.testing.assert_allclose(first[1], first[4], atol=1e-5)
    chosen = np.take_along_axis(first, exempt.tokens[:, :1], 1)
    np.testing.assert_allclose(exempt.logprobs[:, :1], chosen, atol=2e-5)
    np.testing.assert_allclose(capped.logprobs[:, :1], chosen, atol=2e-5)
    # Rows 1 to 4 are equal after that; only a ceiling of the steps can tell them apart.
    np.testing.assert_allclose(exempt.logprobs[1], exempt.logprobs[4], atol=1e-5)
    assert abs(capped.logprobs[1:] - exempt.logprobs[1:]).max() > 1e-3


def test_finished_rows_take_no_slot():
    rows = [[1], [2], [3], [4], [5]]
    free = tiny.model().with_policy((None, CAPPED)).generate(rows, max_new_tokens=2)
    ends = free.tokens[:, 0] == free.tokens[0, 0]
    assert not ends.all()
    ending = tiny.with_special(eos_ids=(int(free.tokens[0, 0]),)).with_policy((None, CAPPED))
    found = ending.generate(rows, max_new_tokens=2)
    assert (found.lengths == np.where(ends, 1, found.lengths)).all()
    # Those that go on have the slots of those that ended.
    assert abs(found.logprobs[~ends, 1] - free.logprobs[~ends, 1]).max() > 1e-3


def test_priority_decides_who_keeps_the_slots():
    rows = [[7, 7, 8], [7, 7, 8]]
    lm = tiny.model().with_policy((None, ONE_SLOT))
    found = [
        lm.generate(rows, max_new_tokens=1, priority=priority).logprobs
        for priority in (None, [[5, 5, 5], [5, 5, 5]], [[0, 0, 0], [0, 0, 9]], [[0, 0, 9], [0] * 3])
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    # Two equal rows: the one whose last token comes first has the experts, the other does not.
    np.testing.assert_allclose(found[2], found[3][::-1], atol=1e-5)
    assert abs(found[2][0] - found[2][1]) > 1e-3


def test_a_prompt_that_fills_one_group_of_several_is_told(monkeypatch):
    lm = tiny.model()
    many = type(lm)(config=lm.config, params=lm.params, policy=TIGHT, virtual_devices=4)
    nothing = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), np.zeros(1, bool)
    monkeypatch.setattr(generation, "run", lambda *args, **options: nothing)
    found = many.generate([[1, 2]], max_new_tokens=1)
    assert len(found.notes) == 1 and "1 of the 4 groups" in found.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": tiny.POSITIONS}, "max_new_tokens=64 more exceed.* 64 positions"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"on_token": 5}, "on_token"),
        ({"prompts": [[tiny.VOCABULARY]]}, "prompts"),
        ({"prompts": "text"}, "tokenizer"),
        ({"attention_mask": [[0, 0]]}, "attention_mask"),
        ({"priority": [[1]]}, "priority"),
    ],
)
def test_refused_before_any_work(options, message, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the model was run")

    monkeypatch.setattr(generation, "run", never)
    with pytest.raises(InputError, match=message):
        tiny.model().generate(**({"prompts": [[1, 2]]} | options))


def test_text_in_and_text_out():
    lm = tiny.model()
    tokenizer = tiny.byte_tokenizer()
    spoken = type(lm)(config=lm.config, params=lm.params, tokenizer=tokenizer)
    found = spoken.generate("ab", max_new_tokens=4)
    assert found.tokens.tolist() == lm.generate([[1, 2]], max_new_tokens=4).tokens.tolist()
    assert found.texts == [tokenizer.decode(found.tokens[0].tolist())]
    ended = type(lm)(
        config=lm.config,
        params=lm.params,
        tokenizer=tokenizer,
        special=tiny.SpecialTokens(eos_ids=(int(found.tokens[0, 1]),)),
    ).generate("ab", max_new_tokens=4)
    assert ended.texts == [tokenizer.decode(found.tokens[0, : ended.lengths[0] - 1].tolist())]


def test_64_bit_mode_changes_nothing():
    lm = tiny.model()
    options = {"max_new_tokens": 3, "temperature": 1.0, "seed": 5}
    base = lm.generate(ROWS[:1], **options)
    with jax.enable_x64(True):
        found = lm.generate(ROWS[:1], **options)
    assert found.tokens.tolist() == base.tokens.tolist()
    assert found.tokens.dtype == np.int32 and found.logprobs.dtype == np.float32
