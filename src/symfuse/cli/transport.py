"""The verb transport: what rides along with a model, in the frame of the aligned model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import NEW_FOLDER, common, declare_option, main, open_model
from symfuse.errors import OptionError
from symfuse.output import Output, note

KINDS = ("adapter", "vector", "probe", "sae", "moments", "statistics")


@main.command()
@click.argument("thing", type=click.Path(path_type=Path))
@click.option(
    "--by",
    "alignment",
    required=True,
    type=click.Path(path_type=Path),
    help="alignment.symfuse, or the folder that `symfuse align` wrote.",
)
@click.option("--output", "-o", required=True, type=NEW_FOLDER, help="Write this new folder.")
@click.option("--kind", type=click.Choice(KINDS), help="What THING is. Default: by its file; else a vector.")
@click.option(
    "--axis", help="The axis of vectors, probes and auto-encoders: residual, ffn[3], v[3] (all heads), v[3,2] (head 2)."
)
@click.option("--base", help="The model of the adapter, of the optimizer or of the statistics.")
@click.option(
    "--new-base", help="Name this model in the adapter's config. Default: the folder of the aligned model, if known."
)
@click.option(
    "--encoder",
    type=click.Choice(["rows", "columns"]),
    help="Whether an auto-encoder's encoder has its features in rows or columns.",
)
@click.option(
    "--names", type=click.Path(path_type=Path), help="A file of the parameters in the optimizer's order, one a line."
)
@declare_option
@common
def transport(
    thing: Path, alignment: Path, output: Path, base: str | None, names: Path | None, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Move THING, which belongs to a model, to its aligned form.

    A LoRA adapter (folder of peft), steering vectors, a probe, a sparse auto-encoder, the moments of AdamW
    (optimizer.pt), or statistics of data: on the aligned model it does exactly what it did on the model.
    """
    from symfuse import api
    from symfuse.reports import transport_card, transport_run

    model_of = api.aligned_model_of(alignment)
    inputs = (thing, alignment, *(Path(folder) for folder in (base, model_of) if folder))
    api.check_target(output, overwrite=None, inputs=[path for path in inputs if path.exists()])
    model = None if base is None else open_model(out, base)
    moved = api.transport(thing, alignment, base=model, names=_lines(names), **options)
    run = transport_run(moved, thing, alignment)
    for text in () if out.quiet else moved.notes:
        note(text)
    moved.save(output, {"symfuse.json": json.dumps(run, indent=2) + "\n", "README.md": transport_card(run)})
    out.say(f"{moved.kind} of {len(moved.tensors)} tensors moved by {alignment}, written to {output}")
    out.finish(run | {"output": str(output)} | out.cost())


def _lines(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--names {path}: not a text file that can be read ({error})") from error
