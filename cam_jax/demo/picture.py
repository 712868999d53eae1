"""Expert load before and after the ceiling, one panel per MoE layer, as a PNG."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cam_jax.demo.measure import Measured
from cam_jax.errors import InputError

# A model with more layers than this is shown by as many of them, evenly spread.
_MOST_PANELS = 12
_INK, _MUTED, _RULE = "#1f2933", "#6b7785", "#d5dbe1"
_KEPT, _CUT = "#1b7f79", "#f2a07b"


def check_picture_path(path: Path) -> Path:
    """The absolute path of a picture that can be written later.

    Raises:
        InputError: its folder is not there or is not writable, or the path is a folder.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        raise InputError(f"out {path} is a folder: give the name of a PNG file")
    if not path.parent.is_dir():
        raise InputError(f"out {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"out {path}: the folder {path.parent} is not writable")
    return path


def draw(
    path: Path, before: Measured, after: Measured, *, layers: tuple[int, ...], subtitle: str
) -> None:
    """Write the picture; it appears by rename.

    Args:
        path: of the PNG.
        before: the unlimited model.
        after: the same model under a ceiling.
        layers: the MoE layers' indices in the decoder.
        subtitle: what was read, on how many devices.
    """
    # Here, so that no other command waits for matplotlib; without pyplot, so that no window opens.
    from matplotlib.figure import Figure

    shown = _spread(len(layers))
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(4.3 * columns + 0.4, 2.55 * lines + 1.75), dpi=160, facecolor="white")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    policy = after.case.policy
    ceiling = None if policy is None else policy.capacity_factor
    top = max(_relative(before.load[layer]).max() for layer in shown) * 1.22
    for axis, layer in zip(axes.flat, shown, strict=False):
        _panel(axis, before, after, layer, ceiling=ceiling, top=top)
        axis.set_title(
            f"Layer {layers[layer] + 1}", loc="left", fontsize=12, color=_INK, weight="bold", pad=7
        )
        axis.set_title(
            f"straggler  {before.straggler[layer]:.1f}× → {after.straggler[layer]:.1f}×",
            loc="right",
            fontsize=11,
            color=_MUTED,
            pad=7,
        )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("load / mean load", fontsize=10, color=_MUTED)
    for axis in axes[-1]:
        axis.set_xlabel("experts, busiest first", fontsize=10, color=_MUTED)
    _headline(figure, before, after, ceiling=ceiling, subtitle=subtitle)
    _save(figure, path)


def _panel(
    axis: Any,
    before: Measured,
    after: Measured,
    layer: int,
    *,
    ceiling: float | None,
    top: float,
) -> None:
    order = np.argsort(-before.load[layer], kind="stable")
    # Both over the same mean, that of the unlimited model: what vanishes is what was dropped.
    mean = before.load[layer].mean()
    place = np.arange(len(order))
    axis.bar(place, before.load[layer][order] / mean, width=0.82, color=_CUT, label="dropped")
    axis.bar(place, after.load[layer][order] / mean, width=0.82, color=_KEPT, label="kept")
    if ceiling is not None:
        axis.axhline(ceiling, color=_INK, linewidth=1.3, linestyle=(0, (5, 2.5)))
        axis.text(
            len(order) - 0.6,
            ceiling + 0.025 * top,
            f"ceiling γ = {ceiling:g}",
            ha="right",
            va="bottom",
            fontsize=9.5,
            color=_INK,
        )
    axis.set_xlim(-0.8, len(order) - 0.2)
    axis.set_ylim(0, top)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_MUTED)
    axis.grid(axis="y", color=_RULE, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_RULE)


def _headline(
    figure: Any, before: Measured, after: Measured, *, ceiling: float | None, subtitle: str
) -> None:
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.2 / width,
        top=1 - 1.5 / height,
        bottom=0.45 / height,
        hspace=0.36,
        wspace=0.08,
    )
    left = 0.3 / width
    lost = after.bits_per_byte - before.bits_per_byte
    figure.text(
        left,
        1 - 0.42 / height,
        f"The busiest expert of a layer: {before.straggler.mean():.1f}× the mean load before the "
        f"ceiling, {after.straggler.mean():.1f}× after",
        fontsize=16,
        weight="bold",
        color=_INK,
    )
    figure.text(
        left,
        1 - 0.74 / height,
        f"{subtitle}. {after.case.name} drops {after.dropped.mean():.0%} of the assignments; bits "
        f"per byte {before.bits_per_byte:.3f} → {after.bits_per_byte:.3f} ({lost:+.3f}).",
        fontsize=11,
        color=_MUTED,
    )
    figure.legend(
        handles=[
            Patch(
                color=_KEPT, label=f"after the ceiling (γ = {ceiling:g})" if ceiling else "after"
            ),
            Patch(color=_CUT, label="before the ceiling"),
        ],
        loc="upper left",
        bbox_to_anchor=(left - 0.1 / width, 1 - 0.8 / height),
        ncols=2,
        frameon=False,
        fontsize=10.5,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.6,
    )


def _relative(load: np.ndarray) -> np.ndarray:
    return load / max(float(load.mean()), 1e-9)


def _spread(count: int) -> list[int]:
    if count <= _MOST_PANELS:
        return list(range(count))
    return sorted({round(i) for i in np.linspace(0, count - 1, _MOST_PANELS)})


def _save(figure: Any, path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            figure.savefig(file, format="png")
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
