"""`cam-jax bench-transports`: memory and time of the one-device transports against T."""

import dataclasses
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cam_jax.benchmarks.transports import LayerShape, Measurement, growth, measure_transport
from cam_jax.capacity import CapacityPolicy
from cam_jax.cli.console import messages, write_json
from cam_jax.errors import InputError
from cam_jax.router import RouterConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax bench-transports`."""

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Sizes of the group to measure, at least two."""
    capacity_factor: float = 1.5
    """γ of the ceiling; dropless runs without."""
    einsum_up_to: int = 2048
    """Run the one-hot form up to this many tokens; above, its memory is only computed."""
    repeats: int = 5
    """Timed calls; the median counts."""
    layer: LayerShape = field(default_factory=LayerShape)
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Measures, then prints.

    Raises:
        InputError: no sizes, or one below 1.
    """
    if len(set(options.tokens)) < 2 or min(options.tokens) < 1 or options.repeats < 1:
        raise InputError("--tokens needs two different sizes of at least 1, --repeats at least 1")
    shape = options.layer
    if min(shape.num_experts, shape.top_k, shape.features, shape.hidden) < 1:
        raise InputError(f"--layer needs sizes of at least 1, got {shape}")
    RouterConfig(num_experts=shape.num_experts, top_k=shape.top_k)  # refuses what cannot be
    ceiling = CapacityPolicy(capacity_factor=options.capacity_factor)
    cases = [(name, t) for name in ("gather", "dropless", "einsum") for t in options.tokens]
    found: list[Measurement] = []
    for name, tokens in track(cases, description="measuring", console=messages()):
        timed = name != "einsum" or tokens <= options.einsum_up_to
        found.append(
            measure_transport(
                name,
                tokens,
                shape=options.layer,
                policy=None if name == "dropless" else ceiling,
                repeats=options.repeats if timed else 0,
            )
        )
    exponents = {
        name: growth([m for m in found if m.transport == name])
        for name in ("gather", "dropless", "einsum")
    }
    if options.json:
        rows = [dataclasses.asdict(m) for m in found]
        write_json({"rows": rows, "memory_exponent": exponents})
        return
    table = Table("transport", "tokens", "temporary MB", "ms", title="one MoE layer, one device")
    for m in found:
        ms = "-" if m.seconds is None else f"{m.seconds * 1e3:.1f}"
        table.add_row(m.transport, str(m.tokens), f"{m.temporary_bytes / 1e6:.1f}", ms)
    console = Console()
    console.print(table)
    for name, exponent in exponents.items():
        console.print(f"{name}: temporary memory ~ T^{exponent:.2f}")
