"""Memory and time of loading and converting, on a made-up checkpoint with Mixtral's names.

Every case runs in a process of its own, so that its peak is its own. What counts is the peak above
the process's start, imports and JAX's own memory included in the start.
"""

import json
import math
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import ml_dtypes
import numpy as np

from cam_jax.benchmarks.memory import memory_bytes, peak_bytes, reset_peak
from cam_jax.conversion.either import load_any, open_any
from cam_jax.conversion.files import describe
from cam_jax.conversion.save import save_hf
from cam_jax.conversion.streaming import LazyLeaf, convert
from cam_jax.errors import CamError, InputError
from cam_jax.mesh import make_mesh
from cam_jax.models.params import map_params, param_specs, stacked_specs

Case = Literal["load", "load-mesh", "convert", "load-orbax", "load-orbax-mesh", "back", "torch"]
CASES: tuple[Case, ...] = get_args(Case)
DEVICES = 8
"""CPU devices of a process; the mesh has them all along "expert"."""

CONVERT_SLACK = 1_000_000_000
LOAD_SLACK = 512_000_000
"""What the bounds below grant beside leaves: buffers, chunks on their way, the allocator's rest."""

_EXPERTS, _LAYERS, _VOCAB = 8, 4, 32000


@dataclass(frozen=True, kw_only=True)
class LoadingResult:
    """What a case took.

    Attributes:
        case: its name.
        seconds: without imports.
        start, peak: resident bytes before, and at most.
        kept: bytes of the parameters that are there at the end; 0 for a conversion.
        bound: what peak - start - kept must not pass; None where nothing is promised.
    """

    case: Case
    seconds: float
    start: int
    peak: int
    kept: int
    bound: int | None

    @property
    def extra(self) -> int:
        """Peak above the start and the final parameters."""
        return self.peak - self.start - self.kept

    @property
    def holds(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or self.extra <= self.bound


def made_up_config(nbytes: int) -> dict[str, Any]:
    """config.json of a Mixtral of about so many bytes in bfloat16: few layers, so that one is much.

    Raises:
        InputError: less than 10 MB.
    """
    if nbytes < 10_000_000:
        raise InputError(f"{nbytes} bytes: expected at least 10 MB")
    hidden = 2048 if nbytes >= 1_000_000_000 else 256
    per_layer = (nbytes / 2 - 2 * _VOCAB * hidden) / _LAYERS - 3 * hidden * hidden
    width = max(64, round(per_layer / (3 * _EXPERTS * hidden) / 64) * 64)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": _VOCAB,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make_checkpoint(directory: Path, nbytes: int) -> Path:
    """Write it in shards of 1 GB; the same numbers every time."""
    config_json = made_up_config(nbytes)
    dtype = np.dtype(ml_dtypes.bfloat16)
    noise = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(dtype)
    leaves = {
        path: LazyLeaf(shape=spec.shape, dtype=dtype, read=_repeated(path, spec.shape, noise))
        for path, spec in param_specs(describe(config_json)[0]).items()
    }
    return save_hf(directory, config_json, leaves, max_shard_bytes=1_000_000_000)


def _repeated(path: str, shape: tuple[int, ...], noise: np.ndarray) -> Callable[[], np.ndarray]:
    # Leaves begin at different places, so that none can stand in for another.
    return lambda: np.resize(np.roll(noise, zlib.crc32(path.encode()) % noise.size), shape)


def measure_loading(case: Case, directory: Path) -> LoadingResult:
    """Run one case in a process of its own.

    Args:
        directory: with "hf", made by `make_checkpoint`; "convert" adds "orbax", which the cases
            with orbax in their name and "back" need.
    """
    command = [sys.executable, "-m", __name__, case, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CamError(f"case {case} failed: {done.stderr.strip()[-2000:]}")
    return LoadingResult(**json.loads(done.stdout.splitlines()[-1]))


def _run(case: Case, directory: Path) -> LoadingResult:
    hf, orbax = directory / "hf", directory / "orbax"
    if case == "torch":
        from transformers import AutoModelForCausalLM

        return _measured(
            case,
            lambda: AutoModelForCausalLM.from_pretrained(hf, dtype="bfloat16"),
            kept=lambda model: sum(p.numel() * p.element_size() for p in model.parameters()),
        )
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = make_mesh(expert=DEVICES) if case.endswith("mesh") else None
    if case in ("convert", "back"):
        specs = param_specs(describe(made_up_config_of(hf))[0])
        experts = sum(
            math.prod(spec.shape) * 2
            for path, spec in specs.items()
            if path.startswith("layers.0.moe.experts.")
        )
        work: Callable[[], Any] = (
            (lambda: convert(hf, orbax))
            if case == "convert"
            else lambda: convert(orbax, directory / "back", to="hf")
        )
        return _measured(case, work, kept=lambda _: 0, bound=2 * experts + CONVERT_SLACK)
    opened = open_any(orbax if "orbax" in case else hf)
    sizes: list[int] = []
    map_params(
        lambda _, leaf: sizes.append(math.prod(leaf.shape) * 2), stacked_specs(opened.config)
    )
    share = max(sizes) // (1 if mesh is None else DEVICES)
    return _measured(
        case,
        lambda: jax.block_until_ready(load_any(opened, mesh=mesh)),
        # Copies on every device of the mesh are part of the final parameters.
        kept=lambda params: sum(
            shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in _distinct(leaf)
        ),
        bound=share + LOAD_SLACK,
    )


def _distinct(leaf: jax.Array) -> list[Any]:
    """One shard for each buffer: on CPU devices share the buffers of copies."""
    return list(
        {shard.data.unsafe_buffer_pointer(): shard for shard in leaf.addressable_shards}.values()
    )


def made_up_config_of(directory: Path) -> dict[str, Any]:
    """config.json of a directory."""
    return dict(json.loads((directory / "config.json").read_text("utf-8")))


def _measured(
    case: Case, work: Callable[[], Any], *, kept: Callable[[Any], int], bound: int | None = None
) -> LoadingResult:
    jax.devices()
    reset_peak()
    start = memory_bytes() or 0
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    peak = peak_bytes() or 0
    return LoadingResult(
        case=case, seconds=seconds, start=start, peak=peak, kept=kept(result), bound=bound
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_run(sys.argv[1], Path(sys.argv[2])))))  # type: ignore[arg-type]
