"""Figures for papers from the same data as the page: one column wide, text as text, colours that colour-blind readers
tell apart."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symfuse.errors import OptionError
from symfuse.io.target import check_file, write_file
from symfuse.reports.charts import OUTSIDE, curve_metrics, layer_name
from symfuse.reports.collect import Collected, Document, collect
from symfuse.reports.content import axis_title, short, unit_of
from symfuse.reports.correspondence import Correspondence, Reordering, Turn, bins, correspondence
from symfuse.reports.landscape import KEYS, contour_lines, is_wide, labelled, levels, losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
_MARK = b"symfuse"  # in the metadata of every figure
COLUMN = 3.3  # inches: one column of the usual two-column papers
# Okabe and Ito's colours and, for whoever prints in grey, markers and dashes.
_COLOURS = ("#6b7280", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b88a00", "#56b4e9")
_MARKERS = "os^Pv*X"
_STYLE: Any = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a name may have a $ in it
    "pdf.fonttype": 42,  # text that can be selected and edited
    "svg.fonttype": "none",
    "svg.hashsalt": "symfuse",  # the same file each time
}

Draw = Callable[["Axes"], None]


def plot(runs: Sequence[str | Path], folder: Path, form: str = "pdf") -> list[Path]:
    """Draw every figure that runs (see `collect`) have data for into a folder, as png, svg or pdf; their paths.

    Raises CheckpointError for runs that cannot be read, OptionError for another format or if matplotlib is not
    installed, OutputError if the folder cannot be written.
    """
    if form not in FORMATS:
        raise OptionError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
    found = collect(runs)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("figures need matplotlib: pip install 'symfuse[report]'") from error
    drawn: dict[Path, bytes] = {}
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names in scripts that the font lacks
        for name, height, draw in figures(found):
            figure = Figure(figsize=(COLUMN, height), layout="constrained")
            draw(figure.add_subplot())
            drawn[folder / f"{_free(name, drawn)}.{form}"] = _drawn(figure, form)
    for path in drawn:  # before the first is written
        check_file(path, _MARK)
    for path, data in drawn.items():
        write_file(path, data, "the figure", mark=_MARK)
    return [*drawn]


def figures(found: Collected) -> Iterator[tuple[str, float, Draw]]:
    """Name, height in inches, and what draws it."""
    for run in [*(one["distance"] for one in found.alignments if one.get("distance")), *found.documents["distance"]]:
        for key in ("axis", "layer"):
            if rows := run[f"by_{key}"]:
                yield f"distance-by-{key}", 1.7, partial(_bars, rows=rows, key=key)
        if rows := run["by_layer_and_axis"]:
            yield "distance-left", 0.75 + 0.17 * len({row["axis"] for row in rows}), partial(_shares, rows=rows)
    for run in found.documents["barrier"]:
        yield "barrier", 2.3, partial(_curves, run=run)
        for metric, title in curve_metrics(run).items():
            yield f"barrier-{_safe(metric)}", 2.0, partial(_curves, run=run, metric=metric, what=title)
    for run in found.documents["landscape"]:
        yield "landscape", 3.1, partial(_landscape, run=run)
    for path, alignment in found.elements.items():
        yield from _correspondence(correspondence(alignment, path.stem))


def _correspondence(one: Correspondence) -> Iterator[tuple[str, float, Draw]]:
    for axis, turns in one.turns.items():
        if len(turns) == 1:
            continue  # a number is no picture
        layers = {turn.layer for turn in turns}
        yield f"rotation-{axis}", 0.75 + 0.14 * len(layers), partial(_turns, turns=turns)
    for axis, found in one.reorderings.items():
        side = bins(found)
        for reordering in found:
            name = f"permutation-{axis}-{_safe(reordering.place)}"
            yield name, COLUMN, partial(_reordering, one=reordering, side=side)


def _free(name: str, written: Collection[Path]) -> str:
    """The name, or the next free one with a number: several runs may have the same figures."""
    taken = {path.stem for path in written}
    names = (name if i == 1 else f"{name}-{i}" for i in range(1, len(taken) + 2))
    return next(one for one in names if one not in taken)


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-") or "x"


def _drawn(figure: Figure, form: str) -> bytes:
    own = "Software" if form == "png" else "Creator"
    dates: Mapping[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    data = io.BytesIO()
    figure.savefig(data, format=form, metadata=dates[form] | {own: _MARK.decode()})
    return data.getvalue()


# -- what the figures show -------------------------------------------------------------------------


def _bars(ax: Axes, rows: Sequence[Document], key: str) -> None:
    names = [layer_name(row[key]) if key == "layer" else row[key] for row in rows]
    for offset, when, colour in ((-0.2, "before", "#b5bac2"), (0.2, "after", _COLOURS[1])):
        ax.bar([i + offset for i in range(len(rows))], [row[when] for row in rows], 0.4, label=when, color=colour)
    shown = range(0, len(names), max(1, math.ceil(len(names) / 16)))
    ax.set_xticks(list(shown), [names[i] for i in shown])
    ax.set_xlabel(key)
    ax.set_ylabel("squared distance")
    ax.legend()


def _shares(ax: Axes, rows: Sequence[Document]) -> None:
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    layers.sort()
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    grid = [[math.nan] * len(layers) for _ in axes]
    for row in rows:
        if row["before"]:
            grid[axes.index(row["axis"])][layers.index(row["layer"])] = row["share"]
    _heat(ax, grid, [layer_name(one) for one in layers], axes, "share left", top=1.0)
    ax.set_xlabel(f"layer ({OUTSIDE}: outside of all)" if -1 in layers else "layer")


def _turns(ax: Axes, turns: Sequence[Turn]) -> None:
    layers = sorted({turn.layer for turn in turns})
    numbers = list(dict.fromkeys(turn.at for turn in turns))
    grid = [[math.nan] * len(numbers) for _ in layers]
    for turn in turns:
        grid[layers.index(turn.layer)][numbers.index(turn.at)] = turn.degrees
    _heat(ax, grid, numbers, [layer_name(layer) for layer in layers], "mean angle (degrees)")
    ax.set_xlabel(turns[0].noun)
    ax.set_ylabel("layer")
    ax.set_title(axis_title(turns[0].axis))


def _heat(
    ax: Axes, grid: Sequence[Sequence[float]], across: Sequence[str], down: Sequence[str], what: str,
    top: float | None = None,
) -> None:  # fmt: skip
    image = ax.imshow(grid, cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    for names, ticks in ((across, ax.set_xticks), (down, ax.set_yticks)):
        shown = range(0, len(names), max(1, math.ceil(len(names) / 16)))
        ticks(list(shown), [names[i] for i in shown])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    _of(ax).colorbar(image, ax=ax, label=what, aspect=10)


def _of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def _curves(ax: Axes, run: Document, metric: str | None = None, what: str = "loss (nats)") -> None:
    for i, curve in enumerate(run["curves"]):
        points = curve["points"]
        at = [point["at"] for point in points]
        values = [point["loss"] if metric is None else point["metrics"].get(metric, math.nan) for point in points]
        colour = _COLOURS[i % len(_COLOURS)]
        ax.plot(at, values, color=colour, marker=_MARKERS[i % len(_MARKERS)], label=curve["name"])
        if metric is None:  # the chord
            ax.plot([at[0], at[-1]], [values[0], values[-1]], color=colour, linestyle=(0, (2, 3)), linewidth=0.7)
    ax.set_xlabel("λ")
    ax.set_ylabel(what)
    ax.legend()


def _landscape(ax: Axes, run: Document) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from numpy.ma import masked_invalid

    found, grid = losses(run), masked_invalid(run["loss"])
    norm = (LogNorm if is_wide(found) else Normalize)(min(found), max(found)) if found else None
    image = ax.pcolormesh(run["xs"], run["ys"], grid, cmap="Blues", norm=norm, shading="nearest", rasterized=True)
    if drawn := levels(found):
        colours = ["#333333" if 2 * i < len(drawn) else "#ffffff" for i in range(len(drawn))]  # seen on either half
        lines = ax.contour(run["xs"], run["ys"], grid, levels=drawn, colors=colours, linewidths=0.5)
        middles = [line.middle for line in labelled(contour_lines(run), run)]
        ax.clabel(lines, fontsize=5.5, fmt="%.3g", manual=middles, inline_spacing=2)
    for key, model in zip(KEYS, run["models"], strict=False):
        place, name = (model["x"], model["y"]), f"{key}: {short(model['name'], 48)}"
        ax.plot(*place, "o", color=_COLOURS[2], markeredgecolor="white", markersize=5, linestyle="none", label=name)
        ax.annotate(
            key, place, (4, 4), textcoords="offset points", fontsize=7,
            bbox={"facecolor": "white", "alpha": 0.85, "lw": 0, "pad": 0.8},
        )  # fmt: skip
    ax.set_aspect("equal")
    ax.set_xlabel("distance")
    ax.set_ylabel("distance")
    ax.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), handletextpad=0.2)
    bar = _of(ax).colorbar(image, ax=ax, label="loss (nats)", shrink=0.7, ticks=drawn[::2], format="%.3g")
    bar.minorticks_off()


def _reordering(ax: Axes, one: Reordering, side: int) -> None:
    ax.imshow(one.density(side).numpy(), cmap="Greys", extent=(0, one.size, one.size, 0), interpolation="nearest")
    ax.set_xlabel(f"{unit_of(one.axis)} of the source")
    ax.set_ylabel(f"{unit_of(one.axis)} of the anchor")
    ax.set_title(f"{axis_title(one.axis)}, {one.place}: {one.moved:,} of {one.size:,} moved")
