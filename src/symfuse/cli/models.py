"""Verbs that look at models: inspect, align, verify, distance, demo."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from symfuse.cli.app import (
    check_place,
    common,
    main,
    match_options,
    matched,
    matching_options,
    open_model,
    proved,
    save,
    say_alignment,
    verified,
    writing_options,
)
from symfuse.output import Output


@main.command()
@click.argument("model")
@common
def inspect(model: str, as_json: bool, quiet: bool) -> None:
    """Axes, groups and sizes of MODEL: what can be matched, what not, and why."""
    from symfuse.report import inspection

    out = Output(as_json, quiet)
    data = inspection(open_model(out, model))
    out.say(
        f"{model}: {data['family']}, {data['tensors']} tensors, {data['parameters']:,} parameters, {data['dtypes']}"
    )
    rows = [[a["axis"], a["group"], str(a["size"]), str(a["instances"]), a["matched by"]] for a in data["axes"]]
    out.table(["axis", "group", "size", "elements", "matched by"], rows)
    for group, why in dict.fromkeys((a["group"], a["why"]) for a in data["axes"]):
        out.say(f"  {group}: {why}")
    for note in data["notes"]:
        out.say(f"note: {note}")
    out.finish(data)


@main.command()
@click.argument("source")
@click.option("--to", "anchor", required=True, help="The anchor, which stays as it is.")
@click.option("--axes", default="all", show_default=True, help="attention, ffn, qk, v, all.")
@matching_options
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="The new folder.")
@writing_options
@common
def align(source: str, anchor: str, axes: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Move SOURCE onto the anchor: the same function, nearer in weight space."""
    from symfuse import report

    out = Output(as_json, quiet)
    a, b = open_model(out, source), open_model(out, anchor)
    check_place(options, a, b)
    alignment = matched(out, a, b, match_options(options, axes))
    run = report.alignment_run(a, b, alignment, None if options["no_verify"] else proved(out, a, alignment))
    save(out, alignment(a), options, run, {"alignment.safetensors": alignment.to_bytes()})
    say_alignment(out, run)
    run |= {"output": str(options["output"]), "seconds": time.perf_counter() - out.start}
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    out.finish(run)


@main.command()
@click.argument("before")
@click.argument("after")
@click.option("--tolerance", type=float, help="Largest relative difference allowed. Default: by dtype.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False), help="Lines to run, with the model's tokenizer.")
@common
def verify(before: str, after: str, tolerance: float | None, text: str | None, as_json: bool, quiet: bool) -> None:
    """Run both models on the same inputs and compare what they compute. Exit code 7 if they differ."""
    from symfuse import api, report

    out = Output(as_json, quiet)
    a, b = open_model(out, before), open_model(out, after)
    inputs = None if text is None else report.text_inputs(a, Path(text))
    result = api.verify(a, b, inputs=inputs, tolerance=tolerance)
    out.table(["output", "relative difference"], [[k, f"{v:.2e}"] for k, v in result.errors.items()])
    out.say(f"{'equal' if result.equal else 'different'} to {result.tolerance:.0e} ({result.inputs})")
    out.finish(verified(result))
    if not result.equal:
        sys.exit(7)


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--axes", default="all", show_default=True, help="What to match for the second column.")
@matching_options
@common
def distance(a: str, b: str, axes: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """How far A is from B, by axis and layer, before and after alignment."""
    from symfuse import api, report

    out = Output(as_json, quiet)
    source, anchor = open_model(out, a), open_model(out, b)
    alignment = matched(out, source, anchor, match_options(options, axes))
    before, after = api.distance(source, anchor), api.distance(alignment(source), anchor)
    data = report.distances(before, after)
    for part in ("axis", "layer"):
        rows = [
            [
                "none" if r[part] == -1 else str(r[part]),
                f"{r['before']:.4g}",
                f"{r['after']:.4g}",
                f"{r['share']:.1%}" if r["before"] else "-",
            ]
            for r in data[f"by_{part}"]
        ]
        out.table([part, "squared distance", "after", "left"], rows)
    out.say(
        f"distance {data['before']:.4g} -> {data['after']:.4g} ({data['left']:.1%} left), relative to |B| "
        f"{before.relative:.3g} -> {after.relative:.3g}, cosine {before.cosine:.4f} -> {after.cosine:.4f}"
    )
    out.finish(data)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), help="Where models are written. Default: a temporary folder.")
@common
def demo(work: Path | None, as_json: bool, quiet: bool) -> None:
    """All of it, on real models that registry packages carry, in minutes."""
    from symfuse.demo.run import run_demo

    run_demo(Output(as_json, quiet), work)
