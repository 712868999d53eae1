"""`cam-jax inspect MODEL`: what a checkpoint is and what it takes, without loading it."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cam_jax.cli.console import write_json

if TYPE_CHECKING:
    from cam_jax.conversion.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax inspect`."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face directory, a hub id, or an Orbax directory of cam_jax."""
    data: int = 1
    """Copies of the experts on the mesh that memory is told for."""
    expert: int = 1
    """Devices that share the experts out."""
    tensor: int = 1
    """Devices that share each expert, the attention heads and the vocabulary."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """The type it would be loaded in. Default: the checkpoint's."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    json: bool = False
    """Print JSON instead of tables."""


def run(options: Options) -> None:
    """Describes.

    Raises:
        CheckpointError, ConfigError: no checkpoint, damaged, or of no known family.
        MeshError: a mesh that the model cannot be divided over.
    """
    # Here, so that --help waits for none of it.
    from cam_jax.conversion.footprint import MeshSizes
    from cam_jax.conversion.summary import inspect

    mesh = MeshSizes(data=options.data, expert=options.expert, tensor=options.tensor)
    found = inspect(options.path, mesh=mesh, dtype=options.dtype, revision=options.revision)
    if options.json:
        write_json(_as_data(found))
    else:
        _show(found)


def _as_data(found: "Summary") -> dict[str, Any]:
    config, memory = found.config, found.memory
    moe = config.moe
    return {
        "path": str(found.directory),
        "format": found.format,
        "layout": found.layout,
        "family": config.family,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "tied_embeddings": config.tie_embeddings,
        "layers": config.num_layers,
        "moe_layers": config.num_moe_layers,
        "dense_layers": config.num_layers - config.num_moe_layers,
        "dense_hidden": config.mlp_size,
        "experts": None if moe is None else moe.router.num_experts,
        "top_k": None if moe is None else moe.router.top_k,
        "expert_hidden": None if moe is None else moe.expert_size,
        "shared_hidden": None if moe is None else moe.shared_size,
        "attention": found.attention,
        "parameters": found.parameters,
        "active_parameters": found.active,
        "dtypes": dict(found.dtypes),
        "weight_bytes": found.weight_bytes,
        "disk_bytes": found.disk_bytes,
        "ignored": dict(found.ignored),
        "companions": list(found.companions),
        "mesh": asdict(memory.mesh),
        "per_device": {
            "weights": dict(memory.weights),
            "weight_bytes": memory.weight_bytes,
            "dead_experts_per_layer": memory.dead_experts,
            "replicated": list(memory.replicated),
            "cache_bytes_per_token": memory.cache_per_token,
            "cache_bytes_per_sequence": memory.cache_per_token * config.max_positions,
        },
    }


def _show(found: "Summary") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    config, memory = found.config, found.memory
    moe = config.moe
    table = Table(show_header=False, title=escape(str(found.directory)), title_justify="left")

    def row(name: str, text: Any) -> None:
        table.add_row(name, escape(str(text)))

    row("family", f"{config.family} ({found.format}, experts stored {found.layout})")
    row("layers", f"{config.num_layers}: {config.num_moe_layers} with experts")
    row("features", f"{config.hidden_size}, dense layers {config.mlp_size or '-'} hidden")
    if moe is not None:
        shared = f", shared expert {moe.shared_size} hidden" if moe.shared_size else ""
        row(
            "experts",
            f"{moe.router.num_experts}, top {moe.router.top_k}, {moe.expert_size} hidden{shared}",
        )
    row("attention", found.attention)
    tied = "tied" if config.tie_embeddings else "not tied"
    row("vocabulary", f"{config.vocab_size}, embeddings {tied}")
    row("positions", config.max_positions)
    row("parameters", f"{_count(found.parameters)}, {_count(found.active)} active per token")
    row("stored as", ", ".join(f"{kind} ({_count(n)})" for kind, n in found.dtypes.items()))
    row("on disk", f"{_size(found.disk_bytes)}, weights {_size(found.weight_bytes)}")
    row("travels along", ", ".join(found.companions) or "nothing")
    for name, reason in list(found.ignored.items())[:8]:
        row("ignored", f"{name}: {reason}")
    if len(found.ignored) > 8:
        row("ignored", f"and {len(found.ignored) - 8} more")

    sizes = memory.mesh
    parts = Table(
        "per device",
        "memory",
        title=f"data={sizes.data} expert={sizes.expert} tensor={sizes.tensor}",
        title_justify="left",
    )
    for kind, size in memory.weights.items():
        parts.add_row(kind, _size(size))
    parts.add_row("all weights", _size(memory.weight_bytes), style="bold")
    parts.add_row("keys and values of a token", _size(memory.cache_per_token))
    parts.add_row(
        f"... of {config.max_positions} tokens",
        _size(memory.cache_per_token * config.max_positions),
    )
    console = Console()
    console.print(table)
    console.print(parts)
    if memory.dead_experts:
        console.print(
            f"{memory.dead_experts} dead experts per layer, of zeros, make the experts divide over "
            f"expert={sizes.expert}."
        )
    for line in memory.replicated:
        console.print(f"{line}: every device holds them all.", highlight=False)


def _count(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def _size(number: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number} B"
