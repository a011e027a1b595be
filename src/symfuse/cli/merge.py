"""The verbs merge (of a recipe, or of models and options, which are made a recipe) and methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import (
    NEW_PLACE,
    check_place,
    common,
    declare_option,
    device_option,
    executor_of,
    executor_options,
    executor_summary,
    import_at_once,
    main,
    matching_options,
    pushed,
    save,
    writing_options,
)
from symfuse.cli.events import Printer
from symfuse.cli.mergekit import ForMergekit
from symfuse.cli.recipes import is_recipe, recipe_options, recipes_of, reconcile_options
from symfuse.errors import OptionError
from symfuse.output import Output
from symfuse.readahead import read_ahead

if TYPE_CHECKING:
    from symfuse.api import Checkpoint, Recipe
    from symfuse.recipes.events import Planned


@main.command(cls=ForMergekit)
@click.argument("models", nargs=-1, required=True, metavar="RECIPE.yml OUT | MODELS...")
@recipe_options
@reconcile_options
@matching_options
@click.option("--output", "-o", type=NEW_PLACE, help="Write to this new folder or URL (s3://…).")
@writing_options
@executor_options
@click.option("--resume", is_flag=True, help="Keep finished parts if interrupted, and continue from them.")
@device_option
@click.option("--no-direct", is_flag=True, help="Write through the page cache.")
@declare_option
@common
def merge(models: tuple[str, ...], out: Output, **options: Any) -> None:
    """Merge models, by RECIPE.yml or by options.

    Mergekit's recipes run unchanged. With a recipe, what --method to --anchor and --layers to --no-biases set is
    written in the recipe instead; all other options may be used with it.

    \b
    symfuse merge recipe.yml OUT
    symfuse merge A B -o OUT --weights 0.3,0.7 --align all
    symfuse merge LORA-1 LORA-2 -o LORA --rank 16
    """
    if options["executor"] == "local":
        read_ahead(models[:1] if is_recipe(models) else models)
    import_at_once("api")
    from symfuse import api
    from symfuse.runs import record_of

    recipes, target = recipes_of(models, options)
    if target is None:
        usage = "symfuse merge recipe.yml OUT" if is_recipe(models) else "-o OUT"
        raise OptionError(f"no folder to write; name a new one: {usage}")
    options["output"] = target
    if len(recipes) == 1 and recipes[0].of_adapters:
        _merge_adapters(out, recipes[0], options)
        return
    options["executor"] = executor = executor_of(out, options)

    def check_first(event: Planned) -> None:
        listed = event.stage.recipe.models
        saved = [Path(one.statistics) for one in listed if one.statistics is not None]
        check_place(options, *event.stage.models.values(), others=saved)

    with Printer(out, check_first) as follow:
        done = api.run(
            recipes,
            target=api.Target(target, **{key: options[key] for key in ("overwrite", "max_shard_size", "threads")}),
            how=api.How(
                prove=not options["no_verify"],
                follow=follow,
                **{key: options[key] for key in ("threads", "memory", "device", "executor")},
            ),
        )
    record = record_of(done.checkpoint)
    assert record is not None
    state = [checkpoint.state() for checkpoint in (*done.stage.opened.values(), done.checkpoint)]
    _save_merged(out, done.checkpoint, options, record.run, state)
    run = {**record.run, "output": str(target)} | out.cost() | executor_summary(executor)
    say_merge(out, run)
    out.finish(run | pushed(out, options))


def _merge_adapters(out: Output, recipe: Recipe, options: Mapping[str, Any]) -> None:
    from symfuse import api

    if given := [f"--{key}" for key in ("overwrite", "resume", "push") if options[key]]:
        raise OptionError(f"{', '.join(given)}: not for adapters, which are written to a new folder; leave it out")
    folders = [Path(entry.model.path) for entry in recipe.models]
    api.check_target(options["output"], overwrite=None, inputs=folders)  # before the work
    merged = api.merge_adapters(recipe)
    for note in merged.notes:
        out.note(note)
    merged.save(options["output"])
    run = dict(merged.run)
    out.say(f"{len(merged.factors)} modules of rank {run['rank']} by {run['method']} in the space {run['space']}")
    if run["worst"] is not None:
        worst = run["errors"][run["worst"]]
        out.say(f"cut off: {merged.error:.3g} of the merged update, at most {worst:.3g} of a module ({run['worst']})")
    out.say(f"written to {options['output']}")
    out.finish(run | {"output": str(options["output"])})


def _save_merged(
    out: Output, merged: Checkpoint, options: dict[str, Any], run: Mapping[str, Any], state: list[Any]
) -> None:
    """state: of the input files; a run is resumed only with the same ones."""
    from symfuse import api

    api.keep_freed_memory()
    same = {key: value for key, value in run.items() if key in ("symfuse", "recipe", "inputs", "learned")}
    same["alignments"] = [{key: one[key] for key in one if key != "seconds"} for one in run["alignments"]]
    fingerprint = hashlib.sha256(json.dumps([same, state], default=str).encode())
    save(
        out,
        merged,
        options,
        resume=options["resume"],
        fingerprint=fingerprint.hexdigest(),
        threads=options["threads"],
        direct=not options["no_direct"],
    )


def say_merge(out: Output, run: Mapping[str, Any]) -> None:
    base = f"{run['base']} ({run['why_base']})"
    own = run["tokenizer"] == f"tokenizer of {run['base']}"
    rest = f"config, dtypes and tokenizer of {base}" if own else f"config and dtypes of {base}, {run['tokenizer']}"
    out.say(f"{run['merged']}; {rest}")
    out.say(f"written to {run['output']} in {run['seconds']:.1f} s")


@main.command()
@common
def methods(out: Output) -> None:
    """List the merge methods, with their parameters and papers."""
    from symfuse.api import METHODS

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
