"""`cam-jax demo`: read real text under several capacity ceilings and compare."""

from dataclasses import dataclass
from pathlib import Path

from cam_jax.cli.console import messages, write_json


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str | None = None
    """Directory or hub id of a checkpoint with a tokenizer. Default: the model that is shipped."""
    text: Path | None = None
    """A text file, or a folder of .txt files. Default: the held-out text that is shipped."""
    share: float = 0.5
    """How much of every document is read, from its beginning; 1 reads all, in twice the time."""
    virtual_devices: int = 8
    """Expert-parallel devices that are emulated; the ceiling holds for each one's tokens."""
    rows: int = 16
    """Sequences of a batch; a multiple of the virtual devices loads them evenly."""
    length: int = 256
    """Tokens of a sequence."""
    out: Path = Path("cam_jax_demo.png")
    """Where to write the picture of expert load before and after the ceiling."""
    prompt: str = 'The "with" statement is used to'
    """What the generated text continues."""
    no_generate: bool = False
    """Generate no text."""
    json: bool = False
    """Write the figures as JSON to standard output."""


def run(options: Options) -> None:
    # Here, so that --help waits for none of it.
    from rich.console import Console

    from cam_jax.demo.cases import CASES, TIGHT, UNLIMITED
    from cam_jax.demo.compare import compare
    from cam_jax.demo.picture import check_picture_path, draw
    from cam_jax.demo.table import as_data, show
    from cam_jax.demo.text import beginnings, read_texts
    from cam_jax.inference import load

    out = check_picture_path(options.out)
    texts = beginnings(read_texts(options.text), options.share)
    # Float32: bfloat16 is emulated on most CPUs, and slow.
    model = load(
        str(shipped_model()) if options.model is None else options.model,
        virtual_devices=options.virtual_devices,
        dtype="float32",
    )
    found = compare(
        model,
        texts,
        CASES,
        rows=options.rows,
        length=options.length,
        prompt=None if options.no_generate else options.prompt,
        console=messages(),
    )
    read = "held-out text" if options.text is None else "text"
    draw(
        out,
        found.of(UNLIMITED),
        found.of(TIGHT),
        layers=model.config.moe_layers,
        subtitle=f"{found.windows.num_bytes / 1000:.0f} KB of {read} on "
        f"{options.virtual_devices} virtual devices",
    )
    if options.json:
        write_json(as_data(found, model, out))
    else:
        show(found, model, out, Console())


def shipped_model() -> Path:
    """Where the package keeps the demo's model."""
    from importlib import resources

    return Path(str(resources.files("cam_jax"))) / "assets" / "demo_model"
