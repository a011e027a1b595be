"""The verb report: show runs on one page, or as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from symfuse.cli.app import common, main
from symfuse.output import Output


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="Write this file (page.html), or figures into this folder.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "pdf", "svg", "png"]),
    default="html",
    show_default=True,
    help="One page (html), or figures of this format.",
)
@click.option("--title", help="Set the title of the page. Default: the models' names.")
@common
def report(
    runs: tuple[str, ...], output: Path, form: Literal["html", "pdf", "svg", "png"], title: str | None, out: Output
) -> None:
    """Show each RUN on one HTML page, or as figures.

    A RUN is a folder that a verb wrote, or one of its JSON files. The page needs no network and no other file. Figures
    fit one column of a paper: distances, barriers, landscapes, correspondences.
    """
    from symfuse import reports

    click.Path(file_okay=form == "html", dir_okay=form != "html")(output)
    files = reports.report(runs, output, title=title, format=form)
    if form != "html":
        for file in files:
            out.say(str(file))
        out.finish({"output": [str(file) for file in files]})
        return
    size = files[0].stat().st_size
    out.say(f"written to {files[0]} ({size / 2**20:.1f} MiB); open it in a browser, it needs no network")
    out.finish({"output": str(files[0]), "bytes": size})
