"""The verb rewrite: exact rewrites of a model, proved before they are written."""

from __future__ import annotations

from statistics import median
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

LARGEST = 8  # tensors that are printed


@main.command()
@click.argument("model")
@click.argument("rewrites", nargs=-1, required=True)
@click.option("--output", "-o", required=True, type=NEW_PLACE, help="The new folder, or its URL (s3://…).")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed the choice of rotations."
)
@writing_options
@declare_option
@common
def rewrite(model: str, rewrites: tuple[str, ...], seed: int, out: Output, **options: Any) -> None:
    """Rewrite MODEL exactly: the same function, in other weights.

    REWRITES are names, in any order: untie, fold_scales, fold_norms, centre, drop_gauges, balance
    (docs/symmetries.md); rotate=hadamard|random|FILE and heads=hadamard|random (docs/rotations.md). The rewritten
    model is run beside MODEL in float64, and written if their outputs are equal.
    """
    import torch

    from symfuse import api
    from symfuse.runs import frame_text, record_of, recorded

    options["executor"] = None
    checkpoint = open_model(out, model)
    new = api.rewrite(checkpoint, rewrites, seed=seed)
    check_place(options, checkpoint)
    record = record_of(new)
    assert record is not None
    for note in record.run["notes"]:
        out.note(note)
    verified = None
    if not options["no_verify"]:
        exact = checkpoint.to(torch.float64)
        result = api.verify(exact, api.rewrite(exact, rewrites, seed=seed))
        result.raise_if_different(f"{model} after {', '.join(rewrites)}")
        out.say(f"proved: outputs equal to {result.worst:.0e} ({result.inputs})")
        verified = result.to_dict()
    run = {**record.run, "verified": verified}
    _show(out, **run["tensors"])
    save(out, recorded(new, record.known(run)), options)
    moves = f", {', '.join(run['moves'])}" if run["moves"] else ""
    out.say(f"{model} in {frame_text(record.frame)}{moves}: {options['output']}")
    out.finish(run | {"output": str(options["output"])} | out.cost() | pushed(out, options))


def _show(out: Output, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> None:
    """The tensors with the largest kurtosis, before or after, and the medians of all."""
    names = sorted(after, key=lambda name: -max(one[name]["kurtosis"] for one in (before, after) if name in one))
    shown: dict[str, list[dict[str, float]]] = {
        name: [one.get(name, {}) for one in (before, after)] for name in names[:LARGEST]
    }
    medians = [{key: median(t[key] for t in one.values()) for key in ("max", "kurtosis")} for one in (before, after)]
    shown |= {f"median of {len(after)}": medians}
    rows = [
        [name, *(f"{one[key]:.3g}" if one else "-" for key in ("max", "kurtosis") for one in pair)]
        for name, pair in shown.items()
    ]
    out.table(["tensor", "largest entry", "after", "kurtosis", "after"], rows)
