"""A plan as a table: policies side by side."""

from collections.abc import Callable, Iterator
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cam_jax.planning.compile import CompiledProgram
from cam_jax.planning.report import DECODE, PREFILL, Column, Plan, traffic_of
from cam_jax.planning.roofline import Roofline

_GB = 1e9


def show(plan: Plan, console: Console) -> None:
    """Print the table of each phase, then what the figures mean."""
    job, sizes, name = plan.job, plan.sizes, plan.topology.name
    console.print(
        f"{plan.model}, {job.config.num_layers} layers, {job.dtype}, on {name.name}: mesh "
        f"data={sizes.data} x expert={sizes.expert} x tensor={sizes.tensor}"
        + (f" ({sizes.chosen})" if sizes.chosen else "")
        + f"; {job.batch} sequences of {job.length} tokens, {job.new_tokens} new ones",
        highlight=False,
    )
    for phase, title in ((PREFILL, "prefill"), (DECODE, "decode, per token of every sequence")):
        if any(phase in column.programs for column in plan.columns):
            console.print(_table(plan, phase, title))
    for note in notes(plan):
        console.print(note, style="dim", highlight=False)


def _at_least(program: CompiledProgram) -> str:
    """A mark where loops whose trips follow the load were counted once."""
    return "≥ " if program.costs is not None and program.costs.unknown_loops else ""


def notes(plan: Plan) -> Iterator[str]:
    """What is assumed, with sources."""
    for column in plan.columns:
        for phase, program in column.programs.items():
            if program.refused is not None:
                yield f"{phase}, {column.title}: does not fit: {program.refused}"
            if program.unread is not None:
                yield (
                    f"{phase}, {column.title}: compiled, but libtpu's program is not readable for "
                    f'this jaxlib: pip install "cam-jax[tpu-plan]" takes the one that belongs to '
                    f"it ({program.unread})"
                )
    yield (
        "HBM as the compiler allocates it. FLOP: matrix products, grouped ones as if every row "
        "they are compiled for were real. Collectives: how many, and what one chip sends."
    )
    loops = {
        loop
        for column in plan.columns
        for program in column.programs.values()
        if program.costs is not None
        for loop in program.costs.unknown_loops
    }
    if loops:
        yield (
            "≥: without what is in loops whose trips depend on the load, which are counted once: "
            f"{', '.join(sorted(loops))}."
        )
    chip = plan.topology.name.chip
    if chip is None:
        yield "A CPU's memory and rates are not known: no limit, no times."
        return
    yield (
        f"Time: a lower bound, max(compute, HBM) + link at {chip.name} peaks: "
        f"{chip.flop_rate / 1e12:g} TFLOP/s bf16, HBM {chip.hbm_rate / 1e9:g} GB/s, {chip.links} "
        f"links of {chip.link_rate / 1e9:g} GB/s each way ({chip.source}). Load: tokens of the "
        "busiest device over the mean; only without a ceiling does the time follow it."
    )


def _table(plan: Plan, phase: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("per chip", no_wrap=True)
    for column in plan.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    chip = plan.topology.name.chip
    limit = "" if chip is None else f" of {chip.hbm_bytes / _GB:.1f} GB"

    def row(name: str, cell: Callable[[CompiledProgram], str], *, end: bool = False) -> None:
        programs = [column.programs.get(phase) for column in plan.columns]
        table.add_row(
            name,
            *("-" if p is None or p.memory is None else cell(p) for p in programs),
            end_section=end,
        )

    if phase == PREFILL:
        table.add_row("slots per expert and group", *(_capacity(c) for c in plan.columns))
    row("weights", lambda p: _gb(p.memory.weights if p.memory else 0))
    row("cache", lambda p: _gb(p.memory.cache if p.memory else 0))
    row("temporaries", lambda p: _gb(p.memory.temporaries if p.memory else 0))
    row("code, padding, other", lambda p: _gb(p.memory.other if p.memory else 0))
    row(f"HBM in all{limit}", lambda p: _fit(p, chip.hbm_bytes if chip else None), end=True)
    row("TFLOP", lambda p: f"{_at_least(p)}{p.costs.flops / 1e12:.3g}" if p.costs else "-")
    row("HBM traffic", lambda p: _gb(p.costs.hbm_bytes) if p.costs else "-")
    for key in _traffic_keys(plan, phase):
        row(_traffic_name(*key), partial(_traffic, plan, key))
    row("sent in all", lambda p: _bytes(p.costs.sent_bytes) if p.costs else "-", end=True)
    if chip is not None:
        _add_times(plan, row)
    # Shown even of a program that was refused.
    table.add_row("compile time", *(_seconds_of(column, phase) for column in plan.columns))
    return table


def _add_times(plan: Plan, row: Callable[..., None]) -> None:
    def at(load: float, cell: Callable[[Roofline], str]) -> Callable[[CompiledProgram], str]:
        def show(program: CompiledProgram) -> str:
            found = plan.roofline(program, load)
            return "-" if found is None else cell(found)

        return show

    for load in plan.loads:
        row(f"compute, load {load:g}x", at(load, lambda r: _time(r.compute)))
    row("HBM", at(plan.loads[0], lambda r: _time(r.hbm)))
    row("link", at(plan.loads[0], lambda r: _time(r.link)))
    for load in plan.loads:
        row(
            f"at least, load {load:g}x",
            at(load, lambda r: f"{_time(r.estimate)} ({r.bound})"),
            end=load == plan.loads[-1],
        )


def _traffic_keys(plan: Plan, phase: str) -> list[tuple[int, str]]:
    """(layers, kind) that any column has and that are not negligible, in order."""
    found: dict[tuple[int, str], float] = {}
    most = 0.0
    for column in plan.columns:
        program = column.programs.get(phase)
        if program is None or program.costs is None:
            continue
        most = max(most, program.costs.sent_bytes)
        for traffic in traffic_of(program.costs, plan.job.config):
            key = (traffic.layers, traffic.kind)
            sent = traffic.layers * traffic.sent_bytes
            found[key] = max(found.get(key, 0.0), sent)
    kept = [key for key, sent in found.items() if sent >= 1e-3 * most]
    return sorted(kept, key=lambda key: (-key[0], key[1]))


def _traffic_name(layers: int, kind: str) -> str:
    return f"{kind}, per layer x {layers}" if layers > 1 else f"{kind}, outside"


def _traffic(plan: Plan, key: tuple[int, str], program: CompiledProgram) -> str:
    if program.costs is None:
        return "-"
    for found in traffic_of(program.costs, plan.job.config):
        if (found.layers, found.kind) == key:
            return f"{found.number}: {_bytes(found.sent_bytes)}"
    return "none"


def _capacity(column: Column) -> str:
    return "-" if column.capacity is None else str(column.capacity)


def _fit(program: CompiledProgram, limit: int | None) -> str:
    if program.memory is None:
        return "-"
    total = program.memory.total
    return _gb(total) if limit is None or total <= limit else f"{_gb(total)} TOO MUCH"


def _seconds_of(column: Column, phase: str) -> str:
    program = column.programs.get(phase)
    return "-" if program is None else f"{program.seconds:.1f} s"


def _gb(value: float | int) -> str:
    return f"{value / _GB:.2f} GB" if value >= 5e6 else _bytes(value)


def _bytes(value: float | int) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
