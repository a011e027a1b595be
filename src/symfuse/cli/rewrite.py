"""The verb rewrite: exact rewrites of a model, proved before they are written."""

from __future__ import annotations

from typing import Any

import click

from symfuse.cli.app import (
    NEW_PLACE,
    check_place,
    common,
    declare_option,
    main,
    open_model,
    pushed,
    save,
    writing_options,
)
from symfuse.output import Output


@main.command()
@click.argument("model")
@click.argument("rewrites", nargs=-1, required=True)
@click.option("--output", "-o", required=True, type=NEW_PLACE, help="The new folder, or its URL (s3://…).")
@writing_options
@declare_option
@common
def rewrite(model: str, rewrites: tuple[str, ...], out: Output, **options: Any) -> None:
    """Rewrite MODEL exactly: the same function, in other weights.

    REWRITES are names, in any order: untie, fold_scales, fold_norms, centre, drop_gauges, balance
    (docs/symmetries.md). The rewritten model is run beside MODEL in float64, and written if their outputs are equal.
    """
    import torch

    from symfuse import api
    from symfuse.runs import frame_text, record_of, recorded

    options["executor"] = None
    checkpoint = open_model(out, model)
    new = api.rewrite(checkpoint, rewrites)
    check_place(options, checkpoint)
    record = record_of(new)
    assert record is not None
    verified = None
    if not options["no_verify"]:
        exact = checkpoint.to(torch.float64)
        result = api.verify(exact, api.rewrite(exact, rewrites))
        result.raise_if_different(f"{model} after {', '.join(rewrites)}")
        out.say(f"proved: outputs equal to {result.worst:.0e} ({result.inputs})")
        verified = result.to_dict()
    run = {**record.run, "verified": verified}
    save(out, recorded(new, record.known(run)), options)
    out.say(f"{model} in {frame_text(record.frame)}: {options['output']}")
    out.finish(run | {"output": str(options["output"])} | out.cost() | pushed(out, options))
