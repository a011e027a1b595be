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
from symfuse.cli.app import (
    F,
    check_place,
    common,
    main,
    matching_options,
    proved,
    save,
    say_alignment,
    writing_options,
)
from symfuse.errors import OptionError
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.io import Checkpoint
    from symfuse.pipeline import Stage
    from symfuse.recipe import ModelRef, Recipe
    from symfuse.rewrite import Reconcile


def reconcile_options(function: F) -> F:
    for option in reversed(
        [
            click.option(
                "--foreign",
                type=click.Choice(["refuse", "drop", "keep"]),
                default="refuse",
                show_default=True,
                help="Tensors that only some models have.",
            ),
            click.option(
                "--missing-bias",
                type=click.Choice(["refuse", "zero"]),
                default="refuse",
                show_default=True,
                help="Biases that only some models have.",
            ),
            click.option("--force-config", is_flag=True, help="Merge although configs compute something else."),
        ]
    ):
        function = option(function)
    return function


def recipe_options(function: F) -> F:
    """What a recipe says, for models on the command line."""
    for option in reversed(
        [
            click.option("--method", help="How tensors are combined. Default: linear. `symfuse methods` lists them."),
            click.option("--weights", help="One per model, in order: 0.3,0.7. Default: equal."),
            click.option("--no-normalize", is_flag=True, help="Take the weights as they are."),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="NAME=VALUE",
                help="A parameter of the method: density=0.5, or one value per model: density=0.3,0.5.",
            ),
            click.option(
                "--base",
                help="Number or path of the model whose config, dtypes and tokenizer it has, and which task vectors "
                "start from (methods that need one have no default). Default: 1, or that of --heads.",
            ),
            click.option("--heads", help="Task heads: average (default), drop, or a model's number."),
            click.option("--seed", type=int, help="Of methods that draw random numbers. Default: 0."),
            click.option("--dtype", help="Of the result: float32, bfloat16, … Default: the base's, by tensor."),
            click.option("--tokenizer", help="union, base, shared-rows or a model: where vocabularies differ."),
            click.option("--align", "axes", metavar="AXES", help="Align first: attention, ffn, all."),
            click.option("--anchor", help="Number (from 1) or path of the model to align to. Default: the base of task "
                "vectors, else that nearest to the mean."),
        ]
    ):  # fmt: skip
        function = option(function)
    return function


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="RECIPE.yml OUT | MODELS...")
@recipe_options
@reconcile_options
@matching_options
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The new folder.")
@writing_options
@click.option("--resume", is_flag=True, help="Keep what is done if interrupted, and go on from it.")
@click.option("--device", default="cpu", show_default=True, help="Where tensors are combined: cpu or cuda.")
@click.option("--no-direct", is_flag=True, help="Write through the page cache.")
@common
def merge(models: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Merge as RECIPE.yml says (mergekit's recipes run as they are), or MODELS as the options say.

    \b
    symfuse merge recipe.yml OUT
    symfuse merge A B -o OUT --weights 0.3,0.7 --align all
    """
    out = Output(as_json, quiet)
    recipes, target = recipes_of(models, options)
    options["output"] = target
    results: dict[str, Checkpoint] = {}
    lineage: dict[str, list[dict[str, Any]]] = {}  # of the results, so that the output's names real models
    for recipe in recipes[:-1]:  # merged as they are read
        stage, merged = prepared(out, recipe, options, results)
        lineage[str(recipe.name)] = _lineage(stage, lineage)
        stage, _, _ = _aligned(out, stage, options)
        results[str(recipe.name)] = merged if stage.anchor is None else _finished(stage)
    recipe = recipes[-1]
    _checked(out, recipe, options, results)
    stage, merged = prepared(out, recipe, options, results, options["device"])
    check_place(options, *stage.models.values())
    inputs = _lineage(stage, lineage)
    stage, runs, extra = _aligned(out, stage, options)
    if stage.anchor is not None:
        merged = _finished(stage, options["device"])
    text = "\n---\n".join(one.text.strip() for one in recipes) + "\n"
    run = merge_run(replace(recipe, text=text), stage, merged, inputs, runs)
    state = [checkpoint.state() for checkpoint in (*stage.opened.values(), merged)]
    _save_merged(out, merged, options, run, extra, state)
    run |= {"output": str(target), "seconds": time.perf_counter() - out.start}
    say_merge(out, run)
    out.finish(run)


def recipes_of(models: Sequence[str], options: Mapping[str, Any]) -> tuple[tuple[Recipe, ...], Path | None]:
    """The recipes that the arguments mean, and the folder to write; OptionError for arguments that clash."""
    from symfuse.recipe import read_recipes

    if not models[0].endswith((".yml", ".yaml")):
        target = options.get("output", Path())
        if target is None:
            raise OptionError("where to? Name the new folder: -o OUT")
        return (_recipe_of_options(models, options),), target
    names = {"axes": "align", "settings": "set"}
    given = [
        "--" + names.get(key, key).replace("_", "-")
        for key in (*_OF_RECIPE, *_OF_ALIGNMENT)
        if options.get(key) not in (None, False, ())
    ]
    if given:
        raise OptionError(f"{', '.join(given)}: the recipe says this; write it there")
    if len(models) > 2 or (len(models) == 2 and options.get("output") is not None):
        raise OptionError("a recipe and one folder to write are expected: symfuse merge recipe.yml OUT")
    target = Path(models[1]) if len(models) == 2 else options.get("output", Path())
    if target is None:
        raise OptionError("where to? Name the new folder: symfuse merge recipe.yml OUT")
    return read_recipes(Path(models[0])), target


_OF_RECIPE = (
    "method", "weights", "no_normalize", "settings", "base", "heads", "seed", "dtype", "tokenizer", "axes", "anchor",
)  # fmt: skip
_OF_ALIGNMENT = ("layers", "no_scaling", "one_pass", "no_biases")


def _recipe_of_options(models: Sequence[str], options: Mapping[str, Any]) -> Recipe:
    from symfuse.merging import lookup
    from symfuse.recipe import parse_recipe

    method = lookup(options["method"] or "linear")
    heads = options["heads"] or "average"
    base = _base(options["base"], heads, models)
    if options["axes"] is None:
        unused = ("layers", "no_scaling", "one_pass", "no_biases", "anchor", "no_verify")
        given = ["--" + key.replace("_", "-") for key in unused if options.get(key)]
        if given:  # not ignored without a word
            raise OptionError(f"{', '.join(given)}: without --align nothing is aligned; add --align, or leave it out")
    listed = [model for i, model in enumerate(models) if method.base == "unused" or i != base]
    shared, each = _parameters(options, listed)
    recipe: dict[str, Any] = {
        "merge_method": method.name,
        "models": [{"model": m} | ({"parameters": each[i]} if each[i] else {}) for i, m in enumerate(listed)],
        "parameters": shared,
        "base_model": None if base is None else models[base],
        "dtype": options["dtype"],
        "tokenizer_source": options["tokenizer"],
        "seed": options["seed"],
        "heads": models[int(heads) - 1] if heads.isdigit() and 0 < int(heads) <= len(models) else heads,
        "align": None if options["axes"] is None else _align(options, models),
    }
    return parse_recipe({key: value for key, value in recipe.items() if value not in (None, {})}, "the options")


def _align(options: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    block = {
        "axes": options["axes"].split(",") if "," in options["axes"] else options["axes"],
        "anchor": None if options["anchor"] is None else models[_number("--anchor", options["anchor"], models)],
        "layers": options["layers"],
        "scaling": not options["no_scaling"],
        "one_pass": options["one_pass"],
        "biases": not options["no_biases"],
    }
    return {key: value for key, value in block.items() if value is not None}


def _parameters(options: Mapping[str, Any], models: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parameters for all models, and for each one."""
    shared: dict[str, Any] = {"normalize": False} if options["no_normalize"] else {}
    each: list[dict[str, Any]] = [{} for _ in models]
    given = dict(_setting(text) for text in options["settings"] or ())
    if options["weights"] is not None:
        given["weight"] = _numbers(options["weights"])
    for name, value in given.items():
        if not isinstance(value, list):
            shared[name] = value
            continue
        if len(value) != len(models):
            raise OptionError(f"{len(value)} {name}s for {len(models)} models; give one for each, in the same order")
        for block, one in zip(each, value, strict=True):
            block[name] = one
    return shared, each


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not value:
        raise OptionError(f"--set {text!r}: write NAME=VALUE, such as density=0.5")
    try:
        values = [yaml.safe_load(part) for part in value.split(",")]
    except yaml.YAMLError:
        raise OptionError(f"--set {text!r}: {value!r} is not a value") from None
    return name, values if len(values) > 1 else values[0]


def _base(text: str | None, heads: str, models: Sequence[str]) -> int | None:
    """The number of the model that the result is named and typed after: the one whose head is kept, if that is said."""
    kept = None if heads in ("average", "drop") else _number("--heads", heads, models)
    base = kept if text is None else _number("--base", text, models)
    if kept is not None and base != kept:
        raise OptionError(
            f"--base {text} and --heads {heads}: whose head is kept is also the base, as its config names the class; "
            "leave --base out, or name the same model"
        )
    return base


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--weights {text!r}: write numbers separated by commas, such as 0.3,0.7") from None


def _number(option: str, text: str, models: Sequence[str]) -> int:
    found = [i for i, model in enumerate(models) if text in (model, str(i + 1))]
    if len(found) != 1:
        listed = ", ".join(f"{i + 1} ({model})" for i, model in enumerate(models))
        raise OptionError(f"{option} {text!r}: write the number or the path of one model: {listed}")
    return found[0]


def reconcile_of(options: Mapping[str, Any]) -> Reconcile:
    from symfuse.rewrite import Reconcile

    return Reconcile(
        foreign=options["foreign"], missing_bias=options["missing_bias"], force_config=options["force_config"]
    )


def prepared(
    out: Output, recipe: Recipe, options: Mapping[str, Any], known: Mapping[str, Checkpoint], device: str = "cpu"
) -> tuple[Stage, Checkpoint]:
    """The recipe's models, opened and brought to the same tensors, and their merge as they are: whether they fit
    together is known before anything is computed. Notes are said."""
    from symfuse import pipeline, report

    stage = pipeline.prepare(recipe, pipeline.open_models(recipe, known), reconcile_of(options))
    merged = _finished(stage, device)
    if recipe.tokenizer is None:
        more = report.tokenizer_notes(list(stage.models.values()), stage.template)
        stage = replace(stage, notes=(*stage.notes, *more))
    for note in stage.notes:
        out.say(f"note: {note}")
    return stage, merged


def _finished(stage: Stage, device: str = "cpu") -> Checkpoint:
    import torch

    from symfuse import pipeline

    if device != "cpu" and not torch.cuda.is_available():
        raise OptionError(f"--device {device}: torch sees no such device here; leave it out to merge on the processor")
    return pipeline.finish(stage, device=device)


def _aligned(
    out: Output, stage: Stage, options: Mapping[str, Any]
) -> tuple[Stage, list[dict[str, Any]], dict[str, bytes]]:
    """The stage with its models moved, what that did, and the alignments as files."""
    from symfuse import pipeline, report

    anchor = pipeline.anchor_of(stage)
    if anchor is None:
        return stage, [], {}
    out.say(f"anchor: {anchor}")
    runs: list[dict[str, Any]] = []
    extra: dict[str, bytes] = {}
    alignments: dict[ModelRef, Any] = {}
    for number, ref in enumerate(stage.models, 1):
        if ref == anchor:
            continue
        with out.progress("matching", None) as advance:
            alignments[ref] = pipeline.match_model(
                stage, ref, anchor, threads=options["threads"], progress=lambda _step, total: advance(total)
            )
        source, to = stage.models[ref], stage.models[anchor]
        proof = None if options["no_verify"] else proved(out, source, alignments[ref])
        runs.append(report.alignment_run(source, to, alignments[ref], proof))
        say_alignment(out, runs[-1])
        extra[f"alignment-{number}.safetensors"] = alignments[ref].to_bytes()
    return pipeline.aligned(stage, anchor, alignments), runs, extra


def _lineage(stage: Stage, results: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the stage's models are, those of earlier recipes by what they are made of."""
    found = []
    for ref, checkpoint in stage.opened.items():
        found += results[str(ref)] if str(ref) in results else [checkpoint.lineage()]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def _checked(out: Output, recipe: Recipe, options: Mapping[str, Any], known: Mapping[str, Checkpoint]) -> None:
    """What the merge will be and cost, from headers; what makes it impossible is raised by the merge itself."""
    from symfuse.check import Target, check

    if out.quiet or out.as_json:
        return
    keys = ("overwrite", "max_shard_size", "threads")
    target = Target(options["output"], **{key: options[key] for key in keys})
    report = check(recipe, known, reconcile_of(options), target=target, sample=False)
    if report.possible:
        for line in [*report.summary(), *(f"warning: {warning}" for warning in report.warnings)]:
            out.say(line)


def merge_run(
    recipe: Recipe,
    stage: Stage,
    merged: Checkpoint,
    inputs: Sequence[Mapping[str, Any]],
    alignments: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The run as data, for symfuse.json, the model card and --json."""
    return {
        "symfuse": __version__,
        "method": recipe.merge_method,
        "recipe": recipe.text,
        "merged": merged.name,
        "models": [str(ref) for ref in stage.models],
        "inputs": list(inputs),
        "weights": weights_of(merged),
        "base": str(list(stage.models)[stage.template]),
        "base given": recipe.base_model is not None,
        "heads": recipe.heads,
        "seed": recipe.seed,
        "anchor": None if stage.anchor is None else str(stage.anchor),
        "alignments": list(alignments),
        "notes": list(stage.notes),
    }


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
    from symfuse.io.workers import keep_freed_memory

    keep_freed_memory()
    kept = {key: value for key, value in run.items() if key in ("symfuse", "recipe", "inputs", "alignments")}
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
    base = run["base"] + ("" if run["base given"] else " (the first; base_model names another)")
    out.say(f"{run['merged']}; config, dtypes and tokenizer of {base}")
    out.say(f"written to {run['output']} in {run['seconds']:.1f} s")


@main.command()
@common
def methods(as_json: bool, quiet: bool) -> None:
    """The merge methods, with their parameters and papers."""
    from symfuse.merging import METHODS

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
