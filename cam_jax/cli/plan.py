"""`cam-jax plan`: will a model fit a TPU pod, and what does a ceiling buy there?"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cam_jax.cli.choices import read_expand
from cam_jax.cli.console import messages, write_json
from cam_jax.errors import ConfigError, InputError

# Sizes beyond are typing errors: an int32 could not number their tokens.
_LARGEST = 10**7


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax plan`."""

    topology: str
    """A slice of a TPU pod, for example v5e:4x4, v5p:4x4x4, v6e:8x8 or v4:2x2x4; cpu:8 takes the
    CPU devices of this process."""
    preset: str | None = None
    """A published model's shape: mixtral-8x7b, mixtral-8x22b, olmoe-1b-7b, deepseek-v2-lite,
    deepseek-v3, qwen1.5-moe-a2.7b or qwen3-30b-a3b."""
    config: Path | None = None
    """A Hugging Face config.json, or its folder, instead of a preset."""
    capacity_factor: tuple[float, ...] = (1.5,)
    """Values of γ, each a column beside the one without a ceiling."""
    batch: int | None = None
    """Sequences. Default: one for each chip that holds tokens of its own (data x expert)."""
    length: int = 2048
    """Tokens of a prompt."""
    new_tokens: int = 256
    """Room for generated tokens."""
    data: int | None = None
    """Copies of the experts."""
    expert: int | None = None
    """Chips that share the experts out."""
    tensor: int | None = None
    """Chips that share each expert, the attention heads and the vocabulary."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and cache."""
    layers: int | None = None
    """Plan for the first so many layers only."""
    expand: str | None = None
    """Expanded Drop: "local", or the number m of best local experts."""
    scope: Literal["expert", "device"] = "expert"
    """What the ceiling holds for."""
    group: Literal["device", "sequence", "batch"] = "device"
    """Which tokens compete."""
    overflow: Literal["drop", "reroute", "fallback"] = "drop"
    """What becomes of what does not fit."""
    decode: Literal["exempt", "capped"] = "exempt"
    """Whether the ceiling holds in decode steps too."""
    load: tuple[float, ...] = (1.0, 4.0)
    """Estimate times for these loads of the busiest device, in means; at least 1."""
    prefill_only: bool = False
    """Leave the decode program out."""
    json: bool = False
    """Write JSON instead of tables."""


def run(options: Options) -> None:
    """Checks everything, compiles, prints.

    Raises:
        ConfigError: an unknown topology or preset, or a configuration that cannot be read.
        InputError: a size out of its range.
        PolicyError: a policy that cannot hold.
        MeshError: a mesh that does not fit the chips, the model or the batch.
        DependencyError: libtpu is not installed.
    """
    _check_sizes(options)
    # Here, so that --help waits for none of it.
    from cam_jax.planning.presets import read_config_file, read_preset
    from cam_jax.planning.topology import open_topology, read_topology

    name = read_topology(options.topology)
    if (options.preset is None) == (options.config is None):
        raise ConfigError("give either --preset or --config")
    if options.preset is not None:
        model, values = options.preset, read_preset(options.preset)
    else:
        assert options.config is not None
        model, values = str(options.config), read_config_file(options.config)

    import dataclasses

    from rich.console import Console

    from cam_jax.capacity import CapacityPolicy
    from cam_jax.models.registry import read_config
    from cam_jax.planning.compile import Job
    from cam_jax.planning.layout import build_mesh, choose_sizes
    from cam_jax.planning.report import as_data, make_plan
    from cam_jax.planning.table import show

    try:
        config = read_config(values)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error
    if options.layers is not None:
        if options.layers > config.num_layers:
            raise InputError(f"--layers {options.layers}: the model has {config.num_layers}")
        config = dataclasses.replace(config, layers=config.layers[: options.layers])
    columns = options.length + options.new_tokens
    if columns > config.max_positions:
        raise InputError(
            f"--length {options.length} and --new-tokens {options.new_tokens} exceed the model's "
            f"{config.max_positions} positions"
        )
    policies = [
        CapacityPolicy(
            capacity_factor=gamma,
            expand=read_expand(options.expand),
            scope=options.scope,
            group=options.group,
            overflow=options.overflow,
            decode=options.decode,
        )
        for gamma in options.capacity_factor
    ]
    _prepare_jax(name.kind, name.chips)
    topology = open_topology(name)
    sizes = choose_sizes(
        config,
        topology,
        batch=options.batch,
        columns=columns,
        dtype=options.dtype,
        data=options.data,
        expert=options.expert,
        tensor=options.tensor,
    )
    # As on a mesh that runs: rows that do not divide are filled up with empty ones.
    batch = options.batch or sizes.token_devices
    batch += -batch % sizes.token_devices
    if options.batch not in (None, batch):
        messages().print(f"--batch {options.batch} is filled up to {batch} sequences")
    job = Job(
        config=config,
        mesh=build_mesh(sizes, topology),
        batch=batch,
        length=options.length,
        new_tokens=options.new_tokens,
        dtype=options.dtype,
    )
    with messages().status("compiling") as status:
        plan = make_plan(
            model,
            job,
            topology,
            sizes,
            (None, *policies),
            loads=options.load,
            with_decode=not options.prefill_only,
            say=status.update,
        )
    if options.json:
        write_json(as_data(plan))
    else:
        show(plan, Console())


def _check_sizes(options: Options) -> None:
    for flag, value in (
        ("--batch", options.batch),
        ("--length", options.length),
        ("--new-tokens", options.new_tokens),
        ("--layers", options.layers),
        ("--data", options.data),
        ("--expert", options.expert),
        ("--tensor", options.tensor),
    ):
        if value is not None and not 1 <= value <= _LARGEST:
            raise InputError(f"{flag} {value}: expected 1 to {_LARGEST}")
    if len(set(options.capacity_factor)) < len(options.capacity_factor):
        raise InputError("--capacity-factor: a value is given twice")
    if not options.load or not all(math.isfinite(load) and load >= 1 for load in options.load):
        raise InputError(
            f"--load {' '.join(map(str, options.load))}: expected numbers of at least 1, which is "
            "a balanced load"
        )


def _prepare_jax(kind: str, chips: int) -> None:
    """Nothing runs here: JAX must neither look for accelerators nor take them from others."""
    import jax

    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        # Too late in a process that has used JAX already; then the devices there are count.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", chips)
