"""The verb collect: statistics of a model on data, for data-driven methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import NEW_FOLDER, common, declare_option, device_option, main, memory_option, open_model
from symfuse.cli.evaluate import data_options, task
from symfuse.errors import OptionError
from symfuse.output import Output, note


@main.command()
@click.argument("model")
@click.option(
    "--kind",
    type=click.Choice(["fisher", "gram"]),
    default="fisher",
    show_default=True,
    help="Collect this (see above).",
)
@click.option(
    "--labels",
    type=click.Choice(["sampled", "given"]),
    help="Sample labels, or use those given (fisher). Default: sampled.",
)
@memory_option("Limit the memory of gram's sums, such as 6GB; the rest takes more passes.")
@data_options
@click.option("--output", "-o", required=True, type=NEW_FOLDER, help="Write this new folder.")
@device_option
@declare_option
@common
def collect(model: str, kind: str, output: Path, out: Output, **options: Any) -> None:
    """Collect statistics of MODEL on data, for merges.

    `symfuse merge --statistics` reads them. fisher: the mean squared gradient of the likelihood, by entry, for the
    method fisher. gram: the second moments of the inputs of linear maps, for the method regmean. `symfuse transport`
    moves them with an alignment.
    """
    from symfuse import api

    own: dict[str, Any] = {"fisher": {"labels": options["labels"]}, "gram": {"memory": options["memory"]}}
    for other in own.keys() - {kind}:
        for name, value in own[other].items():
            if value is not None:
                raise OptionError(f"--{name} is for --kind {other}; leave it out")
    opened = open_model(out, model)
    api.check_target(output, overwrite=None, inputs=opened.sources)
    data = task(options, opened, unlabelled=options["labels"] != "given")
    settings = {name: value for name, value in own[kind].items() if value is not None} | {"device": options["device"]}
    if kind == "fisher":
        settings["seed"] = options["seed"] or 0
    with out.progress("collecting", None):
        result = api.collect(opened, data, kind, **settings)
    result.save(output)
    for text in result.notes():
        note(text)
    out.say(f"{kind} statistics of {result.count} examples, {len(result.tensors)} tensors, written to {output}")
    out.finish({"kind": "statistics", "statistics": kind, "count": result.count, "output": str(output)} | out.cost())
