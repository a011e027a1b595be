"""The verb transport: transform what belongs to a model, so that it fits the aligned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import NEW_FOLDER, common, declare_option, main, open_model
from symfuse.errors import OptionError
from symfuse.files import regular
from symfuse.output import Output, note

KINDS = ("adapter", "vector", "probe", "sae", "moments", "statistics")


@main.command()
@click.argument("thing", type=click.Path(path_type=Path))
@click.option(
    "--by",
    "alignment",
    required=True,
    type=click.Path(path_type=Path),
    help="Apply this alignment.symfuse, or that of the folder that `symfuse align` wrote.",
)
@click.option("--output", "-o", required=True, type=NEW_FOLDER, help="Write this new folder.")
@click.option("--kind", type=click.Choice(KINDS), help="Read THING as this kind. Default: by its file, else a vector.")
@click.option(
    "--axis", help="Name the axis of vectors, probes, auto-encoders: residual, ffn[3], v[3] (all heads), v[3,2]."
)
@click.option("--base", help="Name the model of the adapter, optimizer or statistics.")
@click.option(
    "--new-base", help="Name this model in the adapter's config. Default: the folder of the aligned model, if known."
)
@click.option(
    "--encoder",
    type=click.Choice(["rows", "columns"]),
    help="Read the features of an auto-encoder's encoder from rows or columns.",
)
@click.option(
    "--names",
    type=click.Path(path_type=Path),
    help="Read the parameters' names, in the optimizer's order, from this file, one a line.",
)
@declare_option
@common
def transport(
    thing: Path, alignment: Path, output: Path, base: str | None, names: Path | None, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Transform THING of a model, to fit the aligned model.

    THING is a LoRA adapter (folder of peft), steering vectors, a probe, a sparse auto-encoder, the moments of AdamW
    (optimizer.pt), or statistics of data. The result does on the aligned model exactly what THING did on the model.
    """
    from symfuse import api
    from symfuse.reports import transport_card, transport_run
    from symfuse.runs import described

    model_of = api.aligned_model_of(alignment)
    inputs = (thing, alignment, *(Path(folder) for folder in (base, model_of) if folder))
    api.check_target(output, overwrite=None, inputs=[path for path in inputs if path.exists()])
    model = None if base is None else open_model(out, base)
    moved = api.transport(thing, alignment, base=model, names=_lines(names), **options)
    run = transport_run(moved, thing, alignment)
    for text in () if out.quiet else moved.notes:
        note(text)
    moved.save(output, described(run, transport_card(run)))
    out.say(f"{moved.kind} of {len(moved.tensors)} tensors transformed by {alignment}, written to {output}")
    out.finish(run | {"output": str(output)} | out.cost())


def _lines(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return [line.strip() for line in regular(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--names {path}: not a text file that can be read ({error})") from error
