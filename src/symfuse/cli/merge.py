"""The verb merge: a recipe, or models and options, which are a recipe too."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
    pushed,
    save,
    say_alignment,
    writing_options,
)
from symfuse.cli.mergekit import ForMergekit
from symfuse.cli.recipes import is_recipe, recipe_options, recipes_of, reconcile_options
from symfuse.errors import OptionError
from symfuse.io.readahead import read_ahead
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.io import Checkpoint
    from symfuse.recipes import ModelRef, Recipe
    from symfuse.recipes.run import Stage


@main.command(cls=ForMergekit)
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
    import_at_once("recipes.check", "recipes.run", "reports")
    from symfuse.recipes import run as pipeline
    from symfuse.runs import recorded

    recipes, target = recipes_of(models, options)
    if target is None:
        usage = "symfuse merge recipe.yml OUT" if is_recipe(models) else "-o OUT"
        raise OptionError(f"where to? Name the new folder: {usage}")
    options["output"] = target
    options["executor"] = executor = executor_of(out, options)
    warnings: list[str] = []
    results: dict[str, Checkpoint] = {}
    for recipe in recipes[:-1]:  # merged as they are read
        warnings += _checked(out, recipe, options, results, last=False)
        stage, merged = _merged(out, *prepared(out, recipe, results, options["device"]), options)
        results[str(recipe.name)] = recorded(merged, pipeline.merge_record(stage, merged))
    recipe = recipes[-1]
    warnings += _checked(out, recipe, options, results, last=True)
    stage, merged = prepared(out, recipe, results, options["device"])
    kept = [Path(given.statistics) for given in recipe.models if given.statistics is not None]
    check_place(options, *stage.models.values(), others=kept)
    stage, merged = _merged(out, stage, merged, options)
    record = pipeline.merge_record(pipeline.with_text(stage, recipes), merged, warnings)
    run = dict(record.run())
    state = [checkpoint.state() for checkpoint in (*stage.opened.values(), merged)]
    _save_merged(out, recorded(merged, record.known(run)), options, run, state)
    run |= {"output": str(target)} | out.cost() | executor_summary(executor)
    say_merge(out, run)
    out.finish(run | pushed(out, options))


def prepared(out: Output, recipe: Recipe, known: Mapping[str, Checkpoint], device: str) -> tuple[Stage, Checkpoint]:
    """The recipe's models, opened and brought to the same tensors, and their merge as they are: whether they fit
    together is known before anything is computed. Notes are said."""
    from symfuse.recipes import run as pipeline

    stage = pipeline.prepare(recipe, pipeline.open_models(recipe, known))
    merged = pipeline.finish(stage, device=device)
    stage = pipeline.with_tokenizer_notes(stage)
    for note in stage.notes:
        out.say(f"note: {note}")
    return stage, merged


def _merged(out: Output, stage: Stage, merged: Checkpoint, options: Mapping[str, Any]) -> tuple[Stage, Checkpoint]:
    """The stage after alignment and with what its method finds out of data, and its merge."""
    from symfuse.recipes import run as pipeline

    stage = _learned(out, _aligned(out, stage, options), options)
    return stage, pipeline.finish(stage, device=options["device"]) if stage.changed else merged


def _aligned(out: Output, stage: Stage, options: Mapping[str, Any]) -> Stage:
    """The stage with its models moved, and what that did recorded of each."""
    from symfuse import reports
    from symfuse.recipes import run as pipeline
    from symfuse.runs import record_of, recorded

    anchor = pipeline.anchor_of(stage)
    matching = None if anchor is None else pipeline.matching_of(stage, anchor)
    if matching is None or not matching.frame:  # an alignment in a frame brings all into it
        framed = pipeline.require_one_frame(stage)
        for note in framed.notes[len(stage.notes) :]:
            out.say(f"note: {note}")
        stage = framed
    if anchor is None or matching is None:
        return stage
    out.say(f"anchor: {anchor}")
    runs: dict[ModelRef, dict[str, Any]] = {}
    alignments: dict[ModelRef, Any] = {}
    for ref in stage.models:
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
        runs[ref] = reports.alignment_run(source, to, alignments[ref], proof) | spent
        say_alignment(out, runs[ref])
    moved = pipeline.aligned(stage, anchor, alignments, device=options["device"])
    models = dict(moved.models)
    for ref, run in runs.items():
        record = record_of(models[ref])
        models[ref] = recorded(models[ref], None if record is None else record.known(run))
    return replace(moved, models=models)


def _learned(out: Output, stage: Stage, options: Mapping[str, Any]) -> Stage:
    """The stage with what its method finds out of data."""
    from symfuse.recipes import run as pipeline

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


def _checked(
    out: Output, recipe: Recipe, options: Mapping[str, Any], known: Mapping[str, Checkpoint], *, last: bool
) -> list[str]:
    """What the merge will be and cost, from headers, and what to be warned of; what makes it impossible is raised by
    the merge itself. last: this is what will be written."""
    from symfuse.recipes.check import Target, check

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


def _save_merged(
    out: Output,
    merged: Checkpoint,
    options: Mapping[str, Any],
    run: Mapping[str, Any],
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
    """List the merge methods, with their parameters and papers."""
    from symfuse.methods import METHODS

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
