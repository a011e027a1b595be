"""How the figures of the studies look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which the colour-blind tell apart, and a dash for each.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b88a00", "#56b4e9", "#000000", "#6b7280")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (4, 1)))


@contextmanager
def figure(file: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (2.6, 2.2)) -> Iterator[Any]:
    """A grid of axes [rows, columns], saved as SVG in the end; the same axes make the same bytes. size: inches, of one
    of them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": "symfuse", "lines.linewidth": 1.1}):
        drawn = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        yield drawn.subplots(rows, columns, squeeze=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(file, metadata={"Date": None})


def legend(axes: Any, columns: int = 3) -> None:
    """One legend below all axes of a grid, of all names that occur."""
    named = {}
    for one in axes.flat:
        handles, names = one.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    axes.flat[0].figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)
