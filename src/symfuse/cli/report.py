"""Verbs that show runs: report, plot."""

from __future__ import annotations

from pathlib import Path

import click

from symfuse.cli.app import common, main
from symfuse.output import Output


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Write this file: page.html."
)
@click.option("--title", help="The title of the page. Default: the models' names.")
@common
def report(runs: tuple[str, ...], output: Path, title: str | None, out: Output) -> None:
    """Write one HTML page that shows each RUN.

    A RUN is a folder that a verb wrote, or one of its JSON files. The page needs no network and no other file.
    """
    from symfuse.reports.page import write_page

    page = write_page(runs, output, title)
    size = page.stat().st_size
    out.say(f"written to {page} ({size / 2**20:.1f} MiB); open it in a browser, it needs no network")
    out.finish({"output": str(page), "bytes": size})


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path, file_okay=False), help="Write into this folder."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["png", "svg", "pdf"]),
    default="pdf",
    show_default=True,
    help="The format of the files.",
)
@common
def plot(runs: tuple[str, ...], output: Path, form: str, out: Output) -> None:
    """Draw figures of each RUN for a paper.

    They are one column wide: distances, barriers, landscapes, correspondences.
    """
    from symfuse.reports.plot import plot as plot_figures

    files = plot_figures(runs, output, form)
    for file in files:
        out.say(str(file))
    out.finish({"output": [str(file) for file in files]})
