"""`cam-jax generate`: continue prompts under a ceiling, on one device, a mesh, or many hosts."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cam_jax.cli.choices import MeshOptions, PolicyOptions
from cam_jax.cli.clean_output import only_ours
from cam_jax.cli.console import messages, write_json
from cam_jax.distributed import Processes, agree, is_main, start
from cam_jax.errors import InputError

_flat = tyro.conf.arg(name="")


@dataclass(frozen=True, kw_only=True)
class Options:
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Directory or hub id of a checkpoint with a tokenizer."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; on a mesh at least one for each data x expert device."""
    prompts: Path | None = None
    """A file with one prompt per line, after those of --prompt."""
    max_new_tokens: int = 64
    """Tokens to draw for each prompt, at most."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int | None = None
    """Draw among so many of the most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together reach this probability."""
    seed: int = 0
    """Of drawing."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the weights; default: the checkpoint's."""
    virtual_devices: int = 1
    """Without a mesh: expert-parallel devices whose groups this device emulates."""
    ceiling: Annotated[PolicyOptions, _flat] = field(default_factory=PolicyOptions)
    devices: Annotated[MeshOptions, _flat] = field(default_factory=MeshOptions)
    processes: Annotated[Processes, _flat] = field(default_factory=Processes)
    json: bool = False
    """Write texts, tokens and routing as JSON to standard output."""


def run(options: Options) -> None:
    """Loads the model where its parts belong, continues the prompts, and reports the routing.

    The same command line serves one process and many: each is told which one it is, and the first
    one prints.
    """
    prompts = _prompts(options)
    policy = options.ceiling.policy()
    quiet = only_ours() if options.processes.several else contextlib.nullcontext()
    with quiet, start(options.processes):
        found, report = _generate(options, prompts, policy)
        main = is_main()
    if main:
        _show(options, prompts, found, report)


def _generate(options: Options, prompts: list[str], policy: Any) -> tuple[Any, Any]:
    """What the model makes of the prompts, and what its routing did with them."""
    # Here, so that --help waits for none of it.
    from cam_jax.expert_parallel import check_batch
    from cam_jax.inference import load

    mesh = options.devices.mesh()
    if mesh is not None:
        check_batch(len(prompts), mesh)
    # Whatever differs between hosts is found here, not by waiting for each other.
    agree((options.model, policy, prompts, mesh and dict(mesh.shape)), "the command line")
    with messages().status("loading"):
        model = load(
            options.model,
            policy=policy,
            mesh=mesh,
            virtual_devices=options.virtual_devices,
            dtype=options.dtype,
        )
    if model.tokenizer is None:
        raise InputError(f"{options.model} has no tokenizer.json, so it reads no text")
    with messages().status("generating"):
        found = model.generate(
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
        return found, _routing(model, prompts)


def _prompts(options: Options) -> list[str]:
    """All prompts.

    Raises:
        InputError: there is none, or the file cannot be read.
    """
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            text = options.prompts.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompts {options.prompts} cannot be read: {error}") from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT [TEXT ...] or --prompts FILE")
    return prompts


def _routing(model: Any, prompts: list[str]) -> Any:
    """What routing does with the prompts, None for a model without experts."""
    from cam_jax.inference.prompts import read_prompts

    if not model.config.num_moe_layers:
        return None
    batch = read_prompts(
        prompts,
        tokenizer=model.tokenizer,
        bos_id=model.special.bos_id,
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_positions,
    )
    return model.routing(batch.ids, batch.valid.astype(int))


def _show(options: Options, prompts: list[str], found: Any, report: Any) -> None:
    if options.json:
        write_json(
            {
                "prompts": prompts,
                "texts": found.texts,
                "tokens": found.tokens.tolist(),
                "lengths": found.lengths.tolist(),
                "notes": list(found.notes),
                "routing": None if report is None else report.as_data(),
            }
        )
        return
    for number, (prompt, text) in enumerate(zip(prompts, found.texts, strict=True), start=1):
        print(f"--- {number}: {prompt}\n{text}\n")
    for note in found.notes:
        messages().print(note, style="yellow", highlight=False)
    if report is not None:
        mean = report.mean
        print(
            f"prompts: straggler factor {mean.straggler_factor:.2f} (asked for "
            f"{mean.demand_straggler_factor:.2f}), {mean.dropped_share:.1%} of assignments dropped,"
            f" {mean.slot_use:.0%} of slots used"
        )
