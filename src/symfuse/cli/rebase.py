"""The verb rebase: move a fine-tune onto another base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import (
    NEW_PLACE,
    check_place,
    common,
    declare_option,
    device_option,
    main,
    open_model,
    pushed,
    save,
    writing_options,
)
from symfuse.cli.evaluate import DATA_OPTIONS, data_options, task
from symfuse.errors import OptionError, OutputError
from symfuse.output import Output, warn


@main.command()
@click.argument("finetune")
@click.option("--from", "base", required=True, help="The base that FINETUNE was trained from.")
@click.option("--onto", required=True, help="Move the fine-tune onto this model, which is not changed.")
@click.option(
    "--alpha", type=float, default=1.0, show_default=True, help="Add this much of what the fine-tune changed."
)
@click.option(
    "--towards",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Begin this far on the way from --onto (0) to the aligned base (1): more of the fine-tune's skill, less of "
    "the new base's.",
)
@click.option(
    "--by",
    "alignment",
    type=click.Path(path_type=Path),
    help="Use the alignment of this folder or file (symfuse align BASE --to ONTO). Default: match now.",
)
@click.option("--axes", default="auto", show_default=True, help="Match these axes, as in align.")
@partial(data_options, required=False)
@click.option("--output", "-o", required=True, type=NEW_PLACE, help="The new folder, or its URL (s3://…).")
@device_option
@writing_options
@declare_option
@common
def rebase(
    finetune: str, base: str, onto: str, alpha: float, towards: float, alignment: Path | None, axes: str, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Move what FINETUNE changed of its base onto another base.

    FINETUNE is a model, or the folder of a LoRA adapter, which becomes an adapter of the same rank. Exact if the new
    base is the old one moved by its symmetries. Else it says how far apart the two are, and what to expect: measure
    the result before using it (docs/rebase.md). With --data the bases are matched by activations, not by weights.
    """
    from symfuse import api

    _require_use(options, alignment, axes)
    options["executor"] = None
    a, b = open_model(out, base), open_model(out, onto)
    adapter = api.is_adapter_folder(finetune)
    thing: Any = finetune if adapter else open_model(out, finetune)
    check_place(options, a, b, *([] if adapter else [thing]), others=[Path(finetune)] if adapter else [])
    if adapter and not isinstance(options["output"], Path):
        raise OutputError(f"{options['output']}: an adapter is written to a local folder; choose one")
    with out.progress("matching", None):
        done = api.rebase(
            thing, a, b,
            alignment=alignment, alpha=alpha, towards=towards, axes=axes, device=options["device"],
            data=None if options["data"] is None else task(options, b), prove=not options["no_verify"],
        )  # fmt: skip
    for text in done.notes:
        out.note(text)
    out.say(done.expect)
    if done.verified is not None:
        out.say(f"outputs {'equal' if done.verified.equal else 'differ'} to {done.verified.worst:.0e} from {finetune}")
        if not done.verified.equal:
            warn(f"warning: {onto} is {base} moved, and yet the result computes something else than {finetune}")
    if adapter:
        done.save(options["output"])
    else:
        save(out, done.checkpoint, options)
    out.say(f"{'adapter' if adapter else 'model'} written to {options['output']}")
    out.finish({**done.run, "output": str(options["output"])} | out.cost() | pushed(out, options))


def _require_use(options: dict[str, Any], alignment: Path | None, axes: str) -> None:
    """OptionError for options that would be ignored."""
    if alignment is not None and (options["data"] is not None or axes != "auto"):
        raise OptionError("--by is an alignment that is made already; leave --data and --axes out")
    unused = [key for key in DATA_OPTIONS if options[key] not in (None, ())]
    if unused and options["data"] is None:
        raise OptionError(f"--{unused[0].replace('columns', 'column').replace('_', '-')}: only with --data")
