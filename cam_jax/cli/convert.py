"""`cam-jax convert SRC DST`: from one checkpoint format to another, tensor by tensor."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from cam_jax.cli.console import messages, write_json


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `cam-jax convert`."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A Hugging Face directory, a hub id, or an Orbax directory of cam_jax."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The directory to make; complete or not there at all."""
    to: Literal["orbax", "hf"] = "orbax"
    """The format of DST."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Cast the weights. Default: every tensor keeps its type."""
    layout: Literal["per_expert", "fused"] | None = None
    """With --to hf: how experts are stored. Default: as the model came."""
    overwrite: bool = False
    """Replace a checkpoint that is at DST."""
    allow_nonfinite: bool = False
    """Convert weights that are NaN or infinite."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    json: bool = False
    """Print JSON: what was done, bytes, seconds, peak memory."""


def run(options: Options) -> None:
    """Converts.

    Raises:
        CheckpointError: SRC is no checkpoint or damaged, DST exists or cannot be written.
        ConfigError: SRC is of no known family.
    """
    # Here, so that --help waits for none of it.
    from cam_jax.benchmarks.memory import memory_bytes, peak_bytes
    from cam_jax.cli.progress import byte_bar
    from cam_jax.conversion.streaming import convert

    before = memory_bytes()
    with byte_bar("converting") as progress:
        done = convert(
            options.src,
            options.dst,
            to=options.to,
            dtype=options.dtype,
            layout=options.layout,
            overwrite=options.overwrite,
            allow_nonfinite=options.allow_nonfinite,
            revision=options.revision,
            progress=progress,
        )
    peak = peak_bytes()
    if options.json:
        write_json(
            {
                "source": str(done.source),
                "target": str(done.target),
                "from": done.source_format,
                "to": done.target_format,
                "family": done.family,
                "layout": done.layout,
                "leaves": done.leaves,
                "bytes": done.nbytes,
                "seconds": done.seconds,
                "start_rss_bytes": before,
                "peak_rss_bytes": peak,
            }
        )
        return
    memory = "" if peak is None else f", {peak / 1e9:.2f} GB of memory at most"
    messages().print(
        f"{done.target}: {done.family}, {done.nbytes / 1e9:.2f} GB in {done.seconds:.1f} s{memory}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
