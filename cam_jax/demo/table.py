"""The demo's figures, as data and as a table."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cam_jax.demo.compare import Comparison
from cam_jax.demo.measure import Measured
from cam_jax.inference.language_model import LanguageModel


def as_data(found: Comparison, model: LanguageModel, picture: Path) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    generated = found.generated
    return {
        "rows": [measured.row() for measured in found.results],
        "layers": [measured.layers() for measured in found.results],
        "moe_layers": list(model.config.moe_layers),
        "virtual_devices": model.virtual_devices,
        "batch": [found.rows, found.windows.ids.shape[1]],
        "tokens": found.windows.num_tokens,
        "bytes": found.windows.num_bytes,
        "compile_seconds": found.compile_seconds,
        "picture": str(picture),
        "generated": None if generated is None else {"prompt": generated[0], "text": generated[1]},
        "notes": list(found.results[0].notes),
    }


def show(found: Comparison, model: LanguageModel, picture: Path, console: Console) -> None:
    """Print the table, what its columns mean, and the generated text."""
    console.print(_table(found, model))
    console.print(
        "straggler: load of the busiest expert over the mean, per batch, mean of the layers; by "
        "device: the same of virtual devices. Without a ceiling a layer waits for it. slot use: "
        "kept assignments per slot. time: of this machine, which computes all devices.",
        style="dim",
        highlight=False,
    )
    for note in found.results[0].notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    console.print(
        f"\nExpert load before and after the ceiling: {picture}", markup=False, highlight=False
    )
    if found.generated is not None:
        prompt, text = found.generated
        console.print("\nGenerated without a ceiling:", style="dim")
        console.print(prompt, style="bold", end="", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)


def _table(found: Comparison, model: LanguageModel) -> Table:
    moe = model.config.moe
    assert moe is not None  # check_model has seen MoE layers
    devices = model.virtual_devices
    table = Table(
        title=f"{found.windows.num_bytes / 1000:.0f} KB of text, {found.windows.num_tokens} "
        f"tokens, {devices} virtual devices\n{model.config.num_moe_layers} MoE layers of "
        f"{moe.router.num_experts} experts, top-{moe.router.top_k}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Headings on two lines, so that the table fits into 80 columns.
    table.add_column("policy", no_wrap=True)
    for name in (
        "bits/\nbyte",
        "rise",
        "straggler",
        "by\ndevice",
        "dropped",
        "slot\nuse",
        "time",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    base = found.results[0].bits_per_byte
    for measured in found.results:
        table.add_row(*_cells(measured, base))
    return table


def _cells(measured: Measured, base: float) -> tuple[str, ...]:
    policy, by_device = measured.case.policy, measured.device_straggler
    return (
        measured.case.title,
        f"{measured.bits_per_byte:.3f}",
        "" if policy is None else f"{measured.bits_per_byte - base:+.3f}",
        f"{measured.straggler.mean():.2f}×",
        "-" if by_device is None else f"{by_device.mean():.2f}×",
        f"{measured.dropped.mean():.1%}",
        "-" if policy is None else f"{measured.slot_use.mean():.0%}",
        f"{measured.seconds:.3g} s",
    )
