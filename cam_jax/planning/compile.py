"""Compiles the real prefill and decode programs for a mesh, without weights and without running.

The programs are those of `cam_jax.inference.generate`; their arguments are shapes, dtypes and
shardings. What comes back is read off the compiled programs.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from cam_jax.capacity import CapacityPolicy
from cam_jax.inference.generate import Setting, State, decode, prefill
from cam_jax.inference.policies import decode_policy
from cam_jax.inference.sampling import Sampling
from cam_jax.mesh import TOKENS
from cam_jax.models.config import DecoderConfig
from cam_jax.models.sharding import abstract_params
from cam_jax.planning.costs import Costs, loop_costs, program_costs
from cam_jax.planning.hlo import Program, parse
from cam_jax.planning.layout import shard_bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be compiled.

    Attributes:
        config: the model.
        mesh: of the topology's devices.
        batch: sequences.
        length: positions of a prompt.
        new_tokens: room for what is generated.
        dtype: of weights and cache.
    """

    config: DecoderConfig
    mesh: Mesh
    batch: int
    length: int
    new_tokens: int
    dtype: DTypeLike


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM on one chip while a program runs.

    Attributes:
        weights: parameters.
        cache: keys and values.
        temporaries: what the program allocates while it runs.
        other: code, small inputs and outputs, padding of arrays to the chip's tiles.
    """

    weights: int
    cache: int
    temporaries: int
    other: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.cache + self.temporaries + self.other


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """What was read off one program, or why there is none.

    Attributes:
        memory: of one chip; None if it was refused.
        costs: of one chip, in one run (prefill) or for one token of every sequence (decode).
        tokens: of each sequence that the costs are for.
        seconds: to compile, tracing left out.
        refused: what the compiler said about too little HBM, None if it compiled.
        unread: why the compiled program's text could not be had; costs are None then. Seen with a
            libtpu that is not the one this jaxlib belongs to.
        text: the optimised HLO, for tests and for those who want to look.
    """

    memory: Memory | None
    costs: Costs | None
    tokens: int
    seconds: float
    refused: str | None = None
    unread: str | None = None
    text: str = dataclasses.field(default="", repr=False)


def compile_prefill(
    job: Job, policy: CapacityPolicy | None
) -> tuple[CompiledProgram, State | None]:
    """The prefill under a policy, and the state it leaves (shapes and shardings)."""
    params, setting = _params(job), _setting(job, policy)
    arguments = (
        params,
        _array(job, (job.batch, job.length), np.int32, rows=True),
        _array(job, (job.batch, job.length), np.bool_, rows=True),
        _sampling(job),
        _eos(job),
    )
    options = {"setting": setting, "new_tokens": job.new_tokens}
    compiled, seconds, refused = _compile(_prefill.lower(*arguments, **options))
    if compiled is None:
        failed = CompiledProgram(
            memory=None, costs=None, tokens=job.length, seconds=seconds, refused=refused
        )
        return failed, None
    shapes = jax.eval_shape(lambda *given: _prefill(*given, **options), *arguments)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        compiled.output_shardings,
    )
    return _read(compiled, params, state, seconds, tokens=job.length), state


def compile_decode(job: Job, policy: CapacityPolicy | None, state: State) -> CompiledProgram:
    """The decode loop that follows a prefill under ``policy``."""
    params, setting = _params(job), _setting(job, policy)
    setting = dataclasses.replace(setting, policy=decode_policy(policy))
    limit = _array(job, (), np.int32)
    compiled, seconds, refused = _compile(
        _decode.lower(params, state, limit, _sampling(job), _eos(job), setting=setting)
    )
    if compiled is None:
        return CompiledProgram(memory=None, costs=None, tokens=1, seconds=seconds, refused=refused)
    return _read(compiled, params, state, seconds, tokens=1, adder=loop_costs)


# The library's own programs. `Sampling` holds arrays and nothing that stands for them, so it is
# put together inside.


@functools.partial(jax.jit, static_argnames=("setting", "new_tokens"))
def _prefill(
    params: Any, ids: Any, valid: Any, sampling: dict[str, Any], eos_ids: Any, **options: Any
) -> State:
    return prefill(params, ids, valid, None, Sampling(**sampling), eos_ids, **options)


@functools.partial(jax.jit, static_argnames=("setting",), donate_argnames=("state",))
def _decode(
    params: Any, state: Any, limit: Any, sampling: dict[str, Any], eos_ids: Any, *, setting: Setting
) -> State:
    return decode(params, state, limit, Sampling(**sampling), eos_ids, setting=setting)


def _compile(lowered: Any) -> tuple[Any, float, str | None]:
    """The compiled program, or what was said about memory instead."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A TPU program that needs more HBM than there is does not compile.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, time.perf_counter() - start, _reason(str(error))
    return compiled, time.perf_counter() - start, None


def _reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if "Used" in line or "hbm" in line]
    return (lines or message.splitlines())[0][:300]


def _read(
    compiled: Any,
    params: Any,
    state: State,
    seconds: float,
    *,
    tokens: int,
    adder: Callable[[Program], Costs] = program_costs,
) -> CompiledProgram:
    analysis = compiled.memory_analysis()
    weights, cache = shard_bytes(params), shard_bytes(state.cache)
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    held += analysis.generated_code_size_in_bytes - analysis.alias_size_in_bytes
    text, unread = _text(compiled)
    return CompiledProgram(
        memory=Memory(
            weights=weights,
            cache=cache,
            temporaries=analysis.temp_size_in_bytes,
            other=max(0, held - weights - cache),
        ),
        costs=adder(parse(text)) if unread is None else None,
        unread=unread,
        tokens=tokens,
        seconds=seconds,
        text=text,
    )


def _text(compiled: Any) -> tuple[str, str | None]:
    """The optimised HLO, or why it cannot be had."""
    try:
        return compiled.as_text(), None
    except jax.errors.JaxRuntimeError as error:
        return "", str(error).splitlines()[0]


def _params(job: Job) -> Any:
    return abstract_params(job.config, job.mesh, dtype=jnp.dtype(job.dtype))


def _setting(job: Job, policy: CapacityPolicy | None) -> Setting:
    return Setting(config=job.config, policy=policy, mesh=job.mesh, virtual_devices=1, pad_id=0)


def _sampling(job: Job) -> dict[str, Any]:
    """Traced, so that one program serves greedy decoding and every kind of sampling."""
    return {
        "temperature": _array(job, (), np.float32),
        "top_k": _array(job, (), np.int32),
        "top_p": _array(job, (), np.float32),
        "seed": _array(job, (), np.uint32),
    }


def _eos(job: Job) -> jax.ShapeDtypeStruct:
    return _array(job, (1,), np.int32)


def _array(
    job: Job, shape: tuple[int, ...], dtype: Any, *, rows: bool = False
) -> jax.ShapeDtypeStruct:
    """On every device whole, or with its rows divided over the chips that hold tokens."""
    spec = PartitionSpec(TOKENS) if rows else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(job.mesh, spec))
