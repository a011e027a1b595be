"""The verb report: show runs on one page, or as figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from symfuse.arguments import checked
from symfuse.errors import OptionError
from symfuse.reports.page import write_page
from symfuse.reports.plot import plot


@checked
def report(
    runs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    title: str | None = None,
    format: Literal["html", "pdf", "svg", "png"] = "html",  # noqa: A002 - as of the command line
) -> list[Path]:
    """Show runs (folders that a verb wrote, or their JSON files), and return the paths of the written files.

    format: "html" writes one page to the file `output`, which needs no network; the others write figures for a paper,
    one column wide, to the folder `output`: all of them, or none. title: of the page, by default the names of the
    models. Raises CheckpointError for runs that cannot be read, OutputError if the output cannot be written,
    OptionError if vl-convert is not installed.
    """
    paths = [Path(run) for run in runs]
    if format == "html":
        return [write_page(paths, Path(output), title)]
    if title is not None:
        raise OptionError(f"a title is for a page, and format is {format!r}; leave one of them out")
    return plot(paths, Path(output), format)
