"""Prefill and decode as two compiled programs; the decode loop runs on the device.

Letters: B rows, S positions (padded), N new tokens (padded), V vocabulary.

Prompts arrive aligned to the right, so that every row's last token stands in the last column and
all rows write their new token into the same column. Finished rows are not valid any more: they take
no slot and no attention.

The phases differ by *program*, never by shape: `prefill` runs under the policy even for a prompt of
one token, `decode` under the policy's ``decode`` option.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32

from cam_jax.inference.policies import Policy, decode_policy
from cam_jax.inference.prompts import Batch
from cam_jax.inference.sampling import Sampling, sample
from cam_jax.models import decoder
from cam_jax.models.config import DecoderConfig
from cam_jax.models.partition import constrain, readable

OnToken = Callable[[int, np.ndarray], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: [B, N] int32, only the new tokens; the pad id after a row's EOS (which is included).
        logprobs: [B, N] float32, natural log-probability of each token under the model's own
            distribution: the softmax of its logits, before temperature, top_k and top_p. 0 after
                EOS.
        lengths: [B] int32, new tokens of each row, its EOS included.
        texts: the new tokens as text, EOS left out; None without a tokenizer.
        notes: what the caller should know about this call (groups that stay empty).
    """

    tokens: Int32[np.ndarray, "B N"]
    logprobs: Float32[np.ndarray, "B N"]
    lengths: Int32[np.ndarray, " B"]
    texts: list[str] | None = None
    notes: tuple[str, ...] = ()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "token", "done", "tokens", "logprobs", "cache"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What the decode loop carries.

    Attributes:
        step: [] int32, tokens drawn so far.
        token: [B] int32, the last ones.
        done: [B] bool, rows that have drawn EOS.
        tokens: [B, N] int32.
        logprobs: [B, N] float32.
        cache: keys and values of everything before ``token``.
    """

    step: Any
    token: Any
    done: Any
    tokens: Any
    logprobs: Any
    cache: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What both programs are compiled for: hashable, a static argument.

    Attributes:
        config: the decoder.
        policy: of the phase.
        mesh: a device mesh or None.
        virtual_devices: emulated expert-parallel devices, or (data, expert).
        pad_id: written after EOS.
    """

    config: DecoderConfig
    policy: Policy
    mesh: Any
    virtual_devices: int | tuple[int, int]
    pad_id: int


@functools.partial(jax.jit, static_argnames=("setting", "new_tokens"))
def prefill(
    params: Any,
    ids: Int32[Array, "B S"],
    valid: Bool[Array, "B S"],
    priority: Int32[Array, "B S"] | None,
    sampling: Sampling,
    eos_ids: Int32[Array, " n"],
    *,
    setting: Setting,
    new_tokens: int,
) -> State:
    """Reads the prompts and draws the first token.

    Args:
        params: of the decoder.
        ids, valid, priority: prompts, aligned to the right.
        sampling: how tokens are drawn.
        eos_ids: tokens that end a row; -1 never occurs.
        setting: static.
        new_tokens: N, room for new tokens; static.
    """
    rows, length = ids.shape
    dtype = params["embed"].dtype
    cache = decoder.init_cache(setting.config, rows, length + new_tokens, dtype, mesh=setting.mesh)
    hidden, filled, _ = decoder.forward(
        setting.config,
        params,
        ids,
        valid=valid,
        cache=cache,
        policy=setting.policy,
        mesh=setting.mesh,
        virtual_devices=setting.virtual_devices,
        priority=priority,
    )
    state = State(
        step=jnp.zeros((), jnp.int32),
        token=jnp.full(rows, setting.pad_id, jnp.int32),
        done=~jnp.any(valid, axis=1),  # empty rows fill a mesh and never hold anyone up
        tokens=jnp.full((rows, new_tokens), setting.pad_id, jnp.int32),
        logprobs=jnp.zeros((rows, new_tokens), jnp.float32),
        cache=filled,
    )
    return _draw(params, hidden[:, -1], state, sampling, eos_ids, setting)


@functools.partial(jax.jit, static_argnames=("setting",), donate_argnames=("state",))
def decode(
    params: Any,
    state: State,
    limit: Int32[Array, ""],
    sampling: Sampling,
    eos_ids: Int32[Array, " n"],
    *,
    setting: Setting,
) -> State:
    """Draws tokens until there are ``limit`` of them or every row is done. ``state`` is donated.

    ``limit`` is traced: one program serves the whole loop and, token by token, a caller who
    streams.
    """

    def unfinished(state: State) -> Bool[Array, ""]:
        return (state.step < limit) & ~jnp.all(state.done)

    def step(state: State) -> State:
        hidden, cache, _ = decoder.forward(
            setting.config,
            params,
            state.token[:, None],
            valid=~state.done[:, None],
            cache=state.cache,
            policy=setting.policy,
            mesh=setting.mesh,
            virtual_devices=setting.virtual_devices,
        )
        state = dataclasses.replace(state, cache=cache)
        return _draw(params, hidden[:, -1], state, sampling, eos_ids, setting)

    # Where a loop's state lies is settled for all steps together, so say it behind the loop too.
    return _readable(jax.lax.while_loop(unfinished, step, state), setting.mesh)


def _draw(
    params: Any,
    hidden: Array,
    state: State,
    sampling: Sampling,
    eos_ids: Int32[Array, " n"],
    setting: Setting,
) -> State:
    """Draws the token of column ``state.step`` from the hidden state of the one before it."""
    logits = decoder.logits(setting.config, params, hidden, mesh=setting.mesh)
    logits = constrain(logits, setting.mesh)  # whole rows: drawing sorts them
    choice = sample(logits, sampling, state.step)
    chosen = jnp.take_along_axis(logits, choice[:, None], axis=-1)[:, 0]
    logprob = chosen - jax.nn.logsumexp(logits, axis=-1)
    token = jnp.where(state.done, setting.pad_id, choice).astype(jnp.int32)
    logprob = jnp.where(state.done, 0.0, logprob).astype(jnp.float32)
    column = (jnp.zeros((), jnp.int32), state.step)
    drawn = State(
        step=state.step + 1,
        token=token,
        done=state.done | jnp.isin(token, eos_ids),
        tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], column),
        logprobs=jax.lax.dynamic_update_slice(state.logprobs, logprob[:, None], column),
        cache=state.cache,
    )
    return _readable(drawn, setting.mesh)


def _readable(state: State, mesh: Mesh | None) -> State:
    """The state, of which all but the cache can be read by every process."""
    small = (state.step, state.token, state.done, state.tokens, state.logprobs)
    step, token, done, tokens, logprobs = readable(small, mesh)
    return State(
        step=step, token=token, done=done, tokens=tokens, logprobs=logprobs, cache=state.cache
    )


def run(
    params: Any,
    batch: Batch,
    sampling: Sampling,
    *,
    setting: Setting,
    eos_ids: np.ndarray,
    max_new_tokens: int,
    room: int,
    on_token: OnToken | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prefill, then decode; everything is checked already.

    Args:
        params: of the decoder.
        batch: prompts, aligned to the right in a bucket of positions; on a mesh with empty rows at
            the end that make them divide.
        sampling: how tokens are drawn.
        setting: of the prefill; the decode phase takes its policy's ``decode`` option.
        eos_ids: [n] int32, -1 where there is none.
        max_new_tokens: tokens to draw, at most.
        room: N, columns that are reserved for them.
        on_token: called with (step, tokens [B]) after each token.

    Returns:
        tokens [B, max_new_tokens] int32, logprobs alike float32, done [B] bool.
    """
    state = prefill(
        params,
        batch.ids,
        batch.valid,
        batch.priority,
        sampling,
        eos_ids,
        setting=setting,
        new_tokens=room,
    )
    setting = dataclasses.replace(setting, policy=decode_policy(setting.policy))
    advance = functools.partial(decode, params, sampling=sampling, eos_ids=eos_ids, setting=setting)
    if on_token is None:
        if max_new_tokens > 1:  # the prefill has drawn one: no program for no step
            state = advance(state, limit=np.int32(max_new_tokens))
    else:
        for step in range(max_new_tokens):
            if step:
                state = advance(state, limit=np.int32(step + 1))
            # A copy: the state's own buffers are donated to the next step.
            on_token(step, np.array(state.token))
            if bool(np.all(np.asarray(state.done))):
                break
    tokens = np.array(state.tokens)[:, :max_new_tokens]
    return tokens, np.array(state.logprobs)[:, :max_new_tokens], np.array(state.done)
