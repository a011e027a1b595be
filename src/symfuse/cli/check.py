"""The verb check: what a merge would do, or why it cannot be done."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import NEW_PLACE, common, declare_option, main, matching_options
from symfuse.cli.mergekit import ForMergekit
from symfuse.cli.recipes import recipe_options, recipes_of, reconcile_options
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.api import Report
    from symfuse.recipes.check.report import Alignment

LINES = 6  # of one kind that are printed; --json has all


@main.command(cls=ForMergekit)
@click.argument("models", nargs=-1, required=True, metavar="RECIPE.yml [OUT] | MODELS...")
@recipe_options
@reconcile_options
@matching_options
@click.option("--output", "-o", type=NEW_PLACE, help="Check that this folder or URL can be written, with enough room.")
@click.option("--overwrite", is_flag=True, help="Allow that folder to be replaced.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Limit each weight file to this size.")
@click.option("--no-sample", is_flag=True, help="Read no weights, and do not compare them.")
@declare_option
@common
def check(models: tuple[str, ...], out: Output, **options: Any) -> None:
    """Check whether a merge can be done, and what it takes.

    Takes RECIPE.yml, or MODELS and options, as `symfuse merge` does. Prints how the models differ and how related they
    are, what is aligned, and what the merge costs. Writes nothing. Reads headers, configs, tokenizers and a sample of
    the weights (with --no-sample, no weights). The exit code is 0, or that of the merge's error. NaN, infinity and
    overflow of the output's dtype are not detected: they show when all weights are read.
    """
    from symfuse import api

    recipes, folder = recipes_of(models, options)
    target = api.Target(folder, options["overwrite"], options["max_shard_size"], options["threads"])
    reports = api.check_all(recipes, target=target, sample=not options["no_sample"])
    for report in reports:
        _say(out, report)
    out.finish({"recipes": [report.to_dict() for report in reports]})
    code = next((report.exit_code for report in reports if not report.possible), 0)
    if code:
        sys.exit(code)


def _say(out: Output, report: Report) -> None:
    if report.name is not None:
        out.say(f"{report.name}:")
    rows = [
        [
            m.name,
            m.family,
            "-" if m.layers is None else str(m.layers),
            _count(m.parameters),
            ", ".join(m.dtypes),
            "-" if m.vocabulary is None else f"{m.vocabulary}{' tied' if m.tied else ''}",
            "yes" if m.tokenizer else "no",
        ]
        for m in report.models
    ]
    out.table(["model", "family", "layers", "size", "dtype", "tokens", "tokenizer"], rows)
    for model in report.models:
        if model.adapter is not None:
            out.say(f"{model.name}: with the adapter {model.adapter}")
    _several(out, "differs", [f"{f.field}: {f.ours!r} and {f.theirs!r} in {' and '.join(f.models)}"
             + (" (matters)" if f.matters else "") for f in report.config])  # fmt: skip
    _several(out, "differs", [tokens.text for tokens in report.tokenizers])
    _related(out, report)
    if report.weights:
        words = [f"{name} {a:g}" + (f" to {b:g}" if a != b else "") for name, (a, b) in report.weights.items()]
        out.say(f"weights in effect: {', '.join(words)}")
    _several(out, "layers", report.layers)
    if report.alignment is not None:
        out.say(alignment_text(report.alignment))
    _several(out, "note", report.notes)
    _several(out, "warning", report.warnings)
    if report.problems:
        out.say(f"cannot be merged, for {len(report.problems)} reason{'s' if len(report.problems) > 1 else ''}:")
        for problem in report.problems:
            out.say(f"  {problem.text}")
            if out.quiet and not out.as_json:
                warn(problem.text)
        return
    out.say("can be merged: " + report.summary()[0])
    if report.cost is not None:
        out.say(str(report.cost))


def alignment_text(alignment: Alignment) -> str:
    anchor = alignment.anchor or "the model nearest to the mean of all (known once all weights are read)"
    ways = ("" if alignment.scaling else ", without scaling") + (", in one pass" if alignment.one_pass else "")
    ways += "".join(f", {axis} by {group}" for axis, group in alignment.groups.items())
    biases = "" if alignment.biases else ", biases not translated"
    layers = ", ".join(map(str, alignment.layers))
    how = "learned" if alignment.source == "learned" else "from activations"
    biases += "" if alignment.data is None else f", {how} on {alignment.data}"
    return f"aligned first: axes {', '.join(alignment.axes)} of layers {layers}{ways}{biases}; anchor: {anchor}"


def _related(out: Output, report: Report) -> None:
    if report.sample is None:
        return
    rows = [
        [r.model, _number(r.distance), _number(r.cosine), f"{r.equal_entries:.1%}", f"{r.equal_rows:.1%}"]
        for r in report.relations
    ]
    s = report.sample
    title = f"Against {report.relations[0].reference}, in {s.entries:,} entries of {len(s.tensors)} of {s.of} matrices"
    out.table(["model", "distance / norm", "cosine", "equal entries", "equal rows"], rows, title)
    if report.deltas is not None:
        d = report.deltas
        table = [
            [model, _number(norm), _number(base), *map(_number, cosines)]
            for model, norm, base, cosines in zip(d.models, d.norms, d.with_base, d.correlations, strict=True)
        ]
        out.table(["task vector", "norm / base", "cosine with base", *d.models], table)


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:,.0f} M" if parameters >= 1e7 else f"{parameters:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _several(out: Output, what: str, lines: list[str]) -> None:
    for line in lines[:LINES]:
        out.say(f"{what}: {line}")
    if len(lines) > LINES:
        out.say(f"{what}: {len(lines) - LINES} more (--json has all)")
