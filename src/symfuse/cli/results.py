"""The option that saves a verb's result for `symfuse report`, and its printing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import NEW_FOLDER
from symfuse.output import Output

result_option = click.option(
    "--output", "-o", metavar="DIR", type=NEW_FOLDER, help="Save the result in this folder, as JSON."
)


def finish(out: Output, data: dict[str, Any], folder: Path | None) -> None:
    """Write a result with its time and memory, and print the place; with --json print the result."""
    from symfuse.reports import write_result

    data = data | out.cost()
    if folder is not None:
        out.say(f"written to {write_result(data, folder)}; to look at it: symfuse report {folder} -o page.html")
    out.finish(data)
