"""Predicted and measured speed-up of every ceiling, as a PNG."""

from pathlib import Path

from cam_jax.benchmarks.straggler import DROPLESS, SkewedLayer
from cam_jax.benchmarks.straggler_run import Figures

_INK, _MUTED, _RULE = "#1f2933", "#6b7785", "#d5dbe1"
_PREDICTED, _MEASURED = "#d5dbe1", "#1b7f79"


def draw(path: Path, found: list[Figures], layer: SkewedLayer) -> None:
    """Write the picture; it appears by rename."""
    # Here, so that no other command waits for matplotlib; without pyplot, so that no window opens.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    shown = [f for f in found if f.capacity is not None]
    figure = Figure(figsize=(2.1 * len(shown) + 1.2, 4.6), dpi=160, facecolor="white")
    axis = figure.add_axes((0.09, 0.13, 0.88, 0.62))
    for i, f in enumerate(shown):
        for offset, value, colour in (
            (-0.2, f.predicted, _PREDICTED),
            (0.2, f.measured, _MEASURED),
        ):
            axis.bar(
                i + offset,
                value,
                width=0.38,
                color=colour,
                label=None if i else ("predicted", "measured")[offset > 0],
            )
            axis.text(
                i + offset,
                value,
                f"{value:.2f}×",
                ha="center",
                va="bottom",
                fontsize=10,
                color=_INK,
            )
    axis.axhline(1, color=_INK, linewidth=1, linestyle=(0, (5, 2.5)))
    axis.set_xticks(range(len(shown)), [f"{f.name}\n{f.dropped_share:.0%} dropped" for f in shown])
    axis.yaxis.set_major_locator(MultipleLocator(0.5))
    axis.set_ylim(0, 1.12 * max(max(f.predicted, f.measured) for f in shown))
    axis.set_ylabel("speed-up over dropless", fontsize=10, color=_MUTED)
    axis.tick_params(length=0, labelsize=10, labelcolor=_INK)
    axis.grid(axis="y", color=_RULE, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_RULE)
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
    )
    dropless = next(f for f in found if f.name == DROPLESS.name)
    figure.text(
        0.03,
        0.92,
        "What a ceiling saves where one device is the straggler",
        fontsize=14,
        weight="bold",
        color=_INK,
    )
    figure.text(
        0.03,
        0.85,
        f"Two processes, a core each; the busiest device has {dropless.straggler_before:.2f}× the "
        f"mean load\n{layer.top_k} of {layer.num_experts} experts, T = {layer.tokens} per device, "
        f"D = {layer.features}, F = {layer.hidden}; predicted from rows",
        fontsize=10,
        color=_MUTED,
        va="center",
    )
    temporary = path.with_name(f".{path.name}.{id(figure)}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
