"""`cam-jax demo`: read real text under several capacity ceilings and compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cam_jax.cli.console import messages, write_json
from cam_jax.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

    from cam_jax.demo.measure import Measured
    from cam_jax.inference.language_model import LanguageModel

PROMPT = "The ``try`` statement specifies exception handlers and/or cleanup code for"


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str | None = None
    """Directory or hub id of a checkpoint with a tokenizer. Default: the model that is shipped."""
    text: Path | None = None
    """A text file, or a folder of .txt files. Default: the held-out text that is shipped."""
    virtual_devices: int = 8
    """Expert-parallel devices that are emulated; the ceiling holds for each one's tokens."""
    rows: int = 16
    """Sequences of a batch; a multiple of the virtual devices loads them evenly."""
    length: int = 256
    """Tokens of a sequence."""
    out: Path = Path("cam_jax_demo.png")
    """Where to write the picture of expert load before and after the ceiling."""
    prompt: str = PROMPT
    """What the generated text continues."""
    no_generate: bool = False
    """Generate no text."""
    json: bool = False
    """Write the figures as JSON to standard output."""


def run(options: Options) -> None:
    # Here, so that --help waits for none of it.
    import cam_jax.inference
    from cam_jax.demo.cases import CASES, TIGHT, UNLIMITED
    from cam_jax.demo.measure import measure
    from cam_jax.demo.picture import check_picture_path, draw
    from cam_jax.demo.text import cut, read_texts

    if options.rows < 1:
        raise InputError(f"rows={options.rows}: expected at least 1")
    out = check_picture_path(options.out)
    texts = read_texts(options.text)
    # Float32: bfloat16 is emulated on most CPUs, and slow.
    model = cam_jax.inference.load(
        options.model or str(shipped_model()),
        virtual_devices=options.virtual_devices,
        dtype="float32",
    )
    tokenizer = _check_model(model, options)
    eos = model.special.eos_ids
    windows = cut(texts, tokenizer, separator=eos[0] if eos else None, length=options.length)

    console = messages()
    results: list[Measured] = []
    batches = -(-len(windows.ids) // options.rows)
    with _progress(console) as progress:
        task = progress.add_task("", total=batches * len(CASES))
        for case in CASES:
            progress.update(task, description=_title(case.name, case.policy))
            results.append(
                measure(
                    model,
                    case,
                    windows,
                    rows=options.rows,
                    advance=lambda: progress.advance(task),
                )
            )
    by_case = {measured.case: measured for measured in results}
    devices = options.virtual_devices
    what = (
        f"{windows.num_bytes / 1000:.0f} KB of held-out text"
        if options.text is None
        else (f"{windows.num_bytes / 1000:.0f} KB of text")
    )
    draw(
        out,
        by_case[UNLIMITED],
        by_case[TIGHT],
        layers=model.config.moe_layers,
        subtitle=f"{what} on {devices} virtual devices",
    )
    generated = None if options.no_generate else _generate(model, options.prompt)
    if options.json:
        write_json(_as_data(results, model, options, windows, out, generated))
    else:
        _print(results, model, options, windows, out, generated)


def shipped_model() -> Path:
    """Where the package keeps the demo's model."""
    from importlib import resources

    return Path(str(resources.files("cam_jax"))) / "assets" / "demo_model"


def _check_model(model: "LanguageModel", options: Options) -> "Tokenizer":
    """Refuses what would fail after minutes of work; the tokenizer that the text is read with."""
    if model.tokenizer is None:
        raise InputError(f"model {options.model} has no tokenizer.json, which reading text needs")
    if not model.config.num_moe_layers:
        raise InputError(f"model {options.model} has no MoE layer: there is no expert to limit")
    longest = model.config.max_positions
    if not 2 <= options.length <= longest:
        raise InputError(
            f"length={options.length}: expected at least 2 and at most the model's {longest} "
            "positions"
        )
    if not options.no_generate:
        tokens = len(model.tokenizer.encode(options.prompt).ids)
        if not tokens or tokens + _NEW_TOKENS > longest:
            raise InputError(
                f"prompt has {tokens} tokens: expected at least 1 and, with {_NEW_TOKENS} new "
                f"ones, at most the model's {longest} positions"
            )
    return model.tokenizer


_NEW_TOKENS = 64


def _generate(model: "LanguageModel", prompt: str) -> dict[str, Any]:
    result = model.generate(prompt, max_new_tokens=_NEW_TOKENS, temperature=0.7, top_p=0.9, seed=1)
    assert result.texts is not None  # _check_model has seen a tokenizer
    return {"prompt": prompt, "text": result.texts[0]}


def _as_data(
    results: "list[Measured]",
    model: "LanguageModel",
    options: Options,
    windows: Any,
    out: Path,
    generated: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "rows": [measured.row() for measured in results],
        "layers": [measured.layers() for measured in results],
        "moe_layers": list(model.config.moe_layers),
        "virtual_devices": options.virtual_devices,
        "batch": [options.rows, options.length],
        "tokens": windows.num_tokens,
        "bytes": windows.num_bytes,
        "compile_seconds": sum(measured.compile_seconds for measured in results),
        "picture": str(out),
        "generated": generated,
        "notes": list(results[0].notes),
    }


def _print(
    results: "list[Measured]",
    model: "LanguageModel",
    options: Options,
    windows: Any,
    out: Path,
    generated: dict[str, Any] | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    moe = model.config.moe
    assert moe is not None  # _check_model has seen MoE layers
    table = Table(
        title=f"{windows.num_bytes / 1000:.0f} KB of text, {windows.num_tokens} tokens, "
        f"{options.virtual_devices} virtual devices, {model.config.num_moe_layers} MoE layers of "
        f"{moe.router.num_experts} experts, top-{moe.router.top_k}",
        title_justify="left",
    )
    table.add_column("policy")
    for name in ("γ", "bits/byte", "rise", "straggler", "by device", "dropped", "slot use", "time"):
        table.add_column(name, justify="right")
    base = results[0].bits_per_byte
    for measured in results:
        policy, by_device = measured.case.policy, measured.device_straggler
        table.add_row(
            measured.case.name,
            "-" if policy is None else f"{policy.capacity_factor:g}",
            f"{measured.bits_per_byte:.3f}",
            "" if policy is None else f"{measured.bits_per_byte - base:+.3f}",
            f"{measured.straggler.mean():.2f}×",
            "-" if by_device is None else f"{by_device.mean():.2f}×",
            f"{measured.dropped.mean():.1%}",
            "-" if policy is None else f"{measured.slot_use.mean():.0%}",
            f"{measured.seconds:.1f} s",
        )
    console.print(table)
    console.print(
        "straggler: load of the busiest expert over the mean, per batch, mean over layers; by "
        "device: the same of virtual devices. Without a ceiling a layer waits for it. Times are "
        "of this machine, which computes all devices, without compilation.",
        style="dim",
        highlight=False,
    )
    for note in results[0].notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    console.print(f"Picture of the expert load: {out}", markup=False, highlight=False)
    if generated is not None:
        console.print("\nGenerated without a ceiling (the prompt is in bold):", style="dim")
        console.print(generated["prompt"], style="bold", end="", markup=False, highlight=False)
        console.print(generated["text"], markup=False, highlight=False)


def _title(name: str, policy: Any) -> str:
    return name if policy is None else f"{name} γ = {policy.capacity_factor:g}"


def _progress(console: "Console") -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} batches"),
        TimeElapsedColumn(),
        console=console,
    )
