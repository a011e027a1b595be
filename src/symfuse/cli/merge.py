"""The verb merge: a recipe, or models and options, which are a recipe too."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse import __version__
from symfuse.ahead import read_ahead
from symfuse.cli.app import (
    NEW_PLACE,
    check_place,
    common,
    device_option,
    executor_of,
    executor_options,
    executor_summary,
    import_at_once,
    main,
    matching_options,
    proved,
    save,
    say_alignment,
    writing_options,
)
from symfuse.cli.recipes import is_recipe, recipe_options, recipes_of, reconcile_options
from symfuse.errors import OptionError
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.io import Checkpoint
    from symfuse.pipeline import Stage
    from symfuse.recipe import ModelRef, Recipe


MERGEKIT = {  # its options, and what is to be said here
    "--cuda": "--device cuda",
    "--gpu-rich": "--device cuda",
    "--random-seed": "--seed",
    "--num-threads": "--threads",
    "--out-shard-size": "--max-shard-size, in bytes",
    "--allow-crimes": "--force-config",
    **dict.fromkeys(
        ("--lazy-unpickle", "--low-cpu-memory", "--copy-tokenizer", "--write-model-card", "--safe-serialization",
         "--async-write", "--clone-tensors", "--read-to-gpu"), "nothing: leave it out",
    ),
}  # fmt: skip


class _Merge(click.Command):
    """Who comes from mergekit is told what its options are called here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            here = MERGEKIT.get(error.option_name.replace("--no-", "--"))
            if here is None:
                raise
            raise click.UsageError(f"{error.option_name} is an option of mergekit; here it is {here}", ctx) from error


@main.command(cls=_Merge)
@click.argument("models", nargs=-1, required=True, metavar="RECIPE.yml OUT | MODELS...")
@recipe_options
@reconcile_options
@matching_options
@click.option("--output", "-o", type=NEW_PLACE, help="The new folder, or its URL (s3://…).")
@writing_options
@executor_options
@click.option("--resume", is_flag=True, help="Keep what is done if interrupted, and go on from it.")
@device_option
@click.option("--no-direct", is_flag=True, help="Write through the page cache.")
@common
def merge(models: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Merge as RECIPE.yml or the options say.

    Mergekit's recipes run as they are. With a recipe, --method to --anchor and --layers to --no-biases are written in
    it, and not given here; the other options go with both.

    \b
    symfuse merge recipe.yml OUT
    symfuse merge A B -o OUT --weights 0.3,0.7 --align all
    """
    out = Output(as_json, quiet)
    if options["executor"] == "local":
        read_ahead(models[:1] if is_recipe(models) else models)
    import_at_once("check", "pipeline", "report")
    from symfuse import pipeline

    recipes, target = recipes_of(models, options)
    if target is None:
        usage = "symfuse merge recipe.yml OUT" if is_recipe(models) else "-o OUT"
        raise OptionError(f"where to? Name the new folder: {usage}")
    options["output"] = target
    options["executor"] = executor = executor_of(out, options)
    warnings: list[str] = []
    results: dict[str, Checkpoint] = {}
    lineage: dict[str, list[dict[str, Any]]] = {}  # of the results, so that the output's names real models
    for recipe in recipes[:-1]:  # merged as they are read
        warnings += _checked(out, recipe, options, results, last=False)
        stage, merged = prepared(out, recipe, results, options["device"])
        lineage[str(recipe.name)] = _lineage(stage, lineage)
        stage, _, _ = _aligned(out, stage, options)
        stage = _learned(out, stage, options)
        results[str(recipe.name)] = pipeline.finish(stage, device=options["device"]) if stage.changed else merged
    recipe = recipes[-1]
    warnings += _checked(out, recipe, options, results, last=True)
    stage, merged = prepared(out, recipe, results, options["device"])
    kept = [Path(given.statistics) for given in recipe.models if given.statistics is not None]
    check_place(options, *stage.models.values(), others=kept)
    inputs = _lineage(stage, lineage)
    stage, runs, extra = _aligned(out, stage, options)
    stage = _learned(out, stage, options)
    if stage.changed:
        merged = pipeline.finish(stage, device=options["device"])
    text = "\n---\n".join(one.text.strip() for one in recipes) + "\n"
    run = merge_run(replace(recipe, text=text), stage, merged, inputs, runs) | {"warnings": warnings}
    state = [checkpoint.state() for checkpoint in (*stage.opened.values(), merged)]
    _save_merged(out, merged, options, run, extra, state)
    run |= {"output": str(target)} | out.cost() | executor_summary(executor)
    say_merge(out, run)
    out.finish(run)


def prepared(out: Output, recipe: Recipe, known: Mapping[str, Checkpoint], device: str) -> tuple[Stage, Checkpoint]:
    """The recipe's models, opened and brought to the same tensors, and their merge as they are: whether they fit
    together is known before anything is computed. Notes are said."""
    from symfuse import pipeline, report

    stage = pipeline.prepare(recipe, pipeline.open_models(recipe, known))
    merged = pipeline.finish(stage, device=device)
    if recipe.tokenizer is None:
        more = report.tokenizer_notes(list(stage.models.values()), stage.template)
        stage = replace(stage, notes=(*stage.notes, *more))
    for note in stage.notes:
        out.say(f"note: {note}")
    return stage, merged


def _aligned(
    out: Output, stage: Stage, options: Mapping[str, Any]
) -> tuple[Stage, list[dict[str, Any]], dict[str, bytes]]:
    """The stage with its models moved, what that did, and the alignments as files."""
    from symfuse import pipeline, report

    anchor = pipeline.anchor_of(stage)
    matching = None if anchor is None else pipeline.matching_of(stage, anchor)
    if matching is None or not matching.frame:  # an alignment in a frame brings all into it
        pipeline.require_one_frame(stage)
    if anchor is None or matching is None:
        return stage, [], {}
    out.say(f"anchor: {anchor}")
    runs: list[dict[str, Any]] = []
    extra: dict[str, bytes] = {}
    alignments: dict[ModelRef, Any] = {}
    for number, ref in enumerate(stage.models, 1):
        if ref == anchor:
            continue
        start = time.perf_counter()
        with out.progress("matching", None) as advance:
            alignments[ref] = pipeline.match_model(
                stage,
                ref,
                anchor,
                matching,
                threads=options["threads"],
                memory=options["memory"],
                device=options["device"],
                executor=options["executor"],
                progress=lambda _step, total: advance(total),
                watch=lambda start, value: advance(text=f"sweeps from {start}: squared distance {value:.5g}"),
            )
        spent = {"seconds": time.perf_counter() - start}
        source, to = stage.models[ref], stage.models[anchor]
        proof = None if options["no_verify"] else proved(out, source, alignments[ref], options["memory"])
        runs.append(report.alignment_run(source, to, alignments[ref], proof) | spent)
        say_alignment(out, runs[-1])
        extra[f"alignment-{number}.safetensors"] = alignments[ref].to_bytes()
    return pipeline.aligned(stage, anchor, alignments, device=options["device"]), runs, extra


def _learned(out: Output, stage: Stage, options: Mapping[str, Any]) -> Stage:
    """The stage with what its method finds out of data."""
    from symfuse import pipeline

    if not pipeline.inputs_of(stage.recipe):
        return stage
    with out.progress("looking at data", None) as advance:
        learned = pipeline.learn(
            stage, memory=options["memory"], device=options["device"], report=lambda line: advance(text=line)
        )
    if learned.learned is not None and learned.learned.learned.summary:
        out.say(learned.learned.learned.summary)
    for note in learned.notes[len(stage.notes) :]:
        out.say(f"note: {note}")
    return learned


def _lineage(stage: Stage, results: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the stage's models are, those of earlier recipes by what they are made of."""
    found = []
    for ref, checkpoint in stage.opened.items():
        found += results[str(ref)] if str(ref) in results else [checkpoint.lineage()]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def _checked(
    out: Output, recipe: Recipe, options: Mapping[str, Any], known: Mapping[str, Checkpoint], *, last: bool
) -> list[str]:
    """What the merge will be and cost, from headers, and what to be warned of; what makes it impossible is raised by
    the merge itself. last: this is what will be written."""
    from symfuse.check import Target, check

    keys = ("overwrite", "max_shard_size", "threads")
    target = Target(options["output"] if last else None, **{key: options[key] for key in keys})
    # Not of results of earlier recipes, which are merged whenever they are read.
    sample = not any(str(ref) in known for ref in recipe.models_used())
    report = check(recipe, known, target=target, sample=sample)
    if not report.possible:
        return []
    for line in report.summary()[1:] if last else ():  # what of which model is said of the result
        out.say(line)
    for warning in report.warnings:
        if out.quiet or out.as_json:
            warn(f"warning: {warning}")
        out.say(f"warning: {warning}")
    return report.warnings


def merge_run(
    recipe: Recipe,
    stage: Stage,
    merged: Checkpoint,
    inputs: Sequence[Mapping[str, Any]],
    alignments: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The run as data, for symfuse.json, the model card and --json."""
    from symfuse.plan import why_template

    return {
        "kind": "merge",
        "symfuse": __version__,
        "method": recipe.merge_method,
        "recipe": recipe.text,
        "merged": _title(recipe, stage, merged),
        "models": [str(ref) for ref in stage.models],
        "inputs": list(inputs),
        "weights": weights_of(merged),
        "base": str(list(stage.models)[stage.template]),
        "why base": why_template(recipe),
        "tokenizer": stage.tokenizer,
        "heads": recipe.heads,
        "seed": recipe.seed,
        "anchor": None if stage.anchor is None else str(stage.anchor),
        "align": _resolved(stage, alignments),
        **({} if stage.learned is None else {"learned": stage.learned.to_json()}),
        "alignments": list(alignments),
        "notes": list(stage.notes),
    }


def _resolved(stage: Stage, alignments: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the recipe's `align` block came to, the same for all models; None if nothing is aligned."""
    if stage.anchor is None or not alignments:
        return None
    options, frame = alignments[0]["options"], alignments[0]["frame"]
    kept = ("auto", "not rotated")
    return {"axes": options["axes"], "frame": frame, **{key: options[key] for key in kept if key in options}}


def _title(recipe: Recipe, stage: Stage, merged: Checkpoint) -> str:
    """The merge in a line, with all models whose tensors it has, in the order of the recipe."""
    from symfuse.merging import Merged
    from symfuse.merging.engine import effective_weights

    assert isinstance(merged.tensors, Merged)
    outputs = merged.tensors.outputs.values()
    terms = {term.checkpoint.name for output in outputs for term in output.terms}
    names = [checkpoint.name for checkpoint in stage.models.values() if checkpoint.name in terms]
    if recipe.merge_method == "linear" and weights_of(merged) is not None:
        first = next(output for output in outputs if output.method is not None)
        pairs = list(zip([term.checkpoint.name for term in first.terms], effective_weights(first) or (), strict=True))
        return " + ".join(f"{weight:g}·{name}" for name, weight in sorted(pairs, key=lambda pair: names.index(pair[0])))
    base = next((f"; base {output.base.checkpoint.name}" for output in outputs if output.base is not None), "")
    return f"{recipe.merge_method}({', '.join(names)}{base})"


def weights_of(merged: Checkpoint) -> dict[str, float] | None:
    """The weight of each model that is in effect; None if the method has none, or they differ between tensors."""
    from symfuse.merging import Merged
    from symfuse.merging.engine import effective_weights

    outputs = merged.tensors.outputs.values() if isinstance(merged.tensors, Merged) else ()
    found = {
        tuple(zip([term.checkpoint.name for term in output.terms], weights, strict=True))
        for output in outputs
        if (weights := effective_weights(output)) is not None
    }
    if len(found) != 1:
        return None
    pairs = found.pop()
    return {name: sum(weight for other, weight in pairs if other == name) for name, _ in pairs}


def _save_merged(
    out: Output,
    merged: Checkpoint,
    options: Mapping[str, Any],
    run: Mapping[str, Any],
    extra: dict[str, bytes],
    state: list[Any],
) -> None:
    """state: of the input files, so that a run is not resumed with others."""
    from symfuse.executors import keep_freed_memory

    keep_freed_memory()
    kept = {key: value for key, value in run.items() if key in ("symfuse", "recipe", "inputs", "learned")}
    kept["alignments"] = [{key: one[key] for key in one if key != "seconds"} for one in run["alignments"]]
    fingerprint = hashlib.sha256(json.dumps([kept, state], default=str).encode())
    save(
        out,
        merged,
        dict(options),
        dict(run),
        extra,
        resume=options["resume"],
        fingerprint=fingerprint.hexdigest(),
        threads=options["threads"],
        direct=not options["no_direct"],
    )


def say_merge(out: Output, run: Mapping[str, Any]) -> None:
    base = f"{run['base']} ({run['why base']})"
    own = run["tokenizer"] == f"tokenizer of {run['base']}"
    given = f"config, dtypes and tokenizer of {base}" if own else f"config and dtypes of {base}, {run['tokenizer']}"
    out.say(f"{run['merged']}; {given}")
    out.say(f"written to {run['output']} in {run['seconds']:.1f} s")


@main.command()
@common
def methods(as_json: bool, quiet: bool) -> None:
    """The merge methods, with their parameters and papers."""
    from symfuse.guided import METHODS

    out = Output(as_json, quiet)
    rows = []
    for method in sorted(METHODS.values(), key=lambda method: method.name):
        parameters = [
            f"{p.name}{' (each)' if p.per_model else ''}{'' if p.default is None else f'={p.default}'}"
            for p in method.parameters.values()
        ]
        rows.append([method.name, method.base, ", ".join(parameters), method.paper])
    out.table(["method", "base", "parameters", "source"], rows)
    keys = ("method", "base", "parameters", "source")
    out.finish({"methods": [dict(zip(keys, row, strict=True)) for row in rows]})
