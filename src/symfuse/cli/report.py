"""Verbs that show runs: report, plot."""

from __future__ import annotations

from pathlib import Path

import click

from symfuse.cli.app import common, main
from symfuse.output import Output


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, dir_okay=False), help="page.html.")
@click.option("--title", help="Of the page. Default: the models' names.")
@common
def report(runs: tuple[str, ...], output: Path, title: str | None, as_json: bool, quiet: bool) -> None:
    """Write one HTML page that shows each RUN.

    A RUN is a folder that a verb wrote, or one JSON file of it. The page is complete in itself: it needs no network.
    """
    from symfuse.reports.page import write_page

    out = Output(as_json, quiet)
    page = write_page(runs, output, title)
    size = page.stat().st_size
    out.say(f"written to {page} ({size / 2**20:.1f} MiB); open it in a browser, it needs no network")
    out.finish({"output": str(page), "bytes": size})


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, file_okay=False), help="A folder.")
@click.option(
    "--format", "form", type=click.Choice(["png", "svg", "pdf"]), default="pdf", show_default=True, help="Of the files."
)
@common
def plot(runs: tuple[str, ...], output: Path, form: str, as_json: bool, quiet: bool) -> None:
    """Draw figures of each RUN for a paper.

    One column wide: distances, barriers, landscapes, correspondences.
    """
    from symfuse.reports.plot import plot as plot_figures

    out = Output(as_json, quiet)
    files = plot_figures(runs, output, form)
    for file in files:
        out.say(str(file))
    out.finish({"output": [str(file) for file in files]})
