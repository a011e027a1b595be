"""The verbs that merge: merge, merge_recipe, check, and collect, of what methods read of data."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from symfuse.api.rebasing import is_adapter_folder
from symfuse.api.sources import options_set, with_warnings
from symfuse.arguments import checked, checked_with
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.executors import Executor
from symfuse.io import Checkpoint
from symfuse.io.remote import place_of
from symfuse.io.sources import Source, named_as_written, opened
from symfuse.methods import METHODS, lookup
from symfuse.methods import collect as collect_statistics
from symfuse.model import Model
from symfuse.recipes import (
    RECIPE_KEYS,
    Recipe,
    named,
    parse_recipe,
    plain,
    read_recipes,
    recipe_of,
    recipe_of_arguments,
)
from symfuse.recipes.adapters import merge_adapters
from symfuse.recipes.align import How
from symfuse.recipes.check import Report, Target, check_all
from symfuse.recipes.events import Follow, ignore
from symfuse.recipes.run import Shown, run
from symfuse.rewriting import Reconcile
from symfuse.stats.statistics import Statistics


def _elsewhere(names: Sequence[str]) -> str:
    """Where a merge has the options that are none of the verb's own."""
    if keys := [name for name in names if name in RECIPE_KEYS]:
        rest = ", ".join(f"{key}: …" for key in keys)
        return (
            f"{', '.join(keys)}: these are keys of a recipe, not options of a merge; write "
            f"symfuse.merge_recipe({{merge_method: …, models: […], {rest}}})"
        )
    known = {name for method in METHODS.values() for name in method.parameters}
    if all(name in known for name in names):
        pairs = ", ".join(f'"{name}": …' for name in names)
        return f"{', '.join(names)}: parameters of a method are written together: parameters={{{pairs}}}"
    return ""


@checked_with(_elsewhere)
def merge(
    sources: Sequence[Source],
    *,
    method: str = "linear",
    weights: Collection[Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    base: int | None = None,
    heads: str | int = "average",
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: str = CPU,
    data: Task | Sequence[Task | None] | None = None,
    statistics: Sequence[Statistics | str | os.PathLike[str] | None] | None = None,
    force_config: bool = False,
    rank: int | None = None,
    space: str | None = None,
    follow: Follow = ignore,
) -> Checkpoint | Any:
    """The merge of models in the frame in which they are (see `align`), as a lazy checkpoint: `.save(folder)` it.

    `merge([base, a, b], method="ties", base=0, parameters={"density": 0.3})`: a recipe with these keys, which is run
    (`merge_recipe` has those of alignment, tokenizers, slices and others).

    base: the number (from 0) of the model from which names, dtypes, config and tokenizer come, by default the first;
    task vectors start from it, and methods that need a base do not count it among the models. parameters: those of the
    method, by name (`symfuse methods` lists them), one value for all models, or a list, tensor or array with one for
    each (without that base); weights: the one that most methods have, "weight".
    heads: what becomes of task heads: "average" (all must have the same), "drop", or the number (from 0) or name of the
    model whose head is kept as it is; that model is then the base. seed: of random methods. dtype: of the
    floating-point tensors, by default the base's. device: where tensors are combined, and models run, such as "cuda"
    (docs/gpu.md); what is read of the result is on the processor.

    force_config: merge models whose configs compute something else, or name another type, by names and shapes, with
    the base's config; what differs stands in the notes of the merge.

    data: for data-driven methods (fisher, regmean, adamerging, greedy_soup, …): a task (`symfuse.task`) for all
    models, or one for each, the base aside; they are looked at now. statistics: what `symfuse.collect` returned of
    each, or its folder, instead of data. follow: gets each event of the run (`symfuse.api.events`).
    rank, space: if all sources are folders of LoRA adapters, which give one adapter (docs/merging.md): the rank that it
    is cut to, and the coordinates in which they are merged ("core", "knots", "full", "factors").
    Raises IncompatibleError or OptionError before any weight is read.
    """
    values = dict(parameters or {})
    if weights is not None:
        if "weight" in values:
            raise OptionError("merge: weights and weight are one parameter; give one of them")
        values["weight"] = weights
    listed = list(sources)
    if listed and all(map(is_adapter_folder, listed)):
        others = {"base": base, "data": data, "statistics": statistics, "force_config": force_config or None}
        others["heads"] = None if heads == "average" else heads
        if given := [key for key, value in others.items() if value is not None]:
            raise OptionError(f"{', '.join(given)}: not for a merge of adapters; open each with its base as a model")
        keys = {"rank": rank, "space": space, "seed": seed or None}
        keys |= {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
        paths = [str(source) for source in listed]
        return merge_adapters(recipe_of(paths, lookup(method), None, plain(values), keys, kind="adapter"))
    if rank is not None or space is not None:
        raise OptionError("rank and space are for folders of adapters alone; leave them out, or give only adapters")
    known = named([named_as_written(source) for source in listed])
    recipe = recipe_of_arguments(
        list(known), lookup(method), base, values, heads=heads, dtype=dtype, seed=seed, force_config=force_config
    )
    count = len(recipe.models)
    tasks = None if data is None else [data] * count if isinstance(data, Task) else list(data)
    saved = None if statistics is None else [_statistics(one) for one in statistics]
    done = run((recipe,), known, how=How(device=device, follow=with_warnings(follow)), shown=Shown(tasks, saved))
    notes = (note.text for note in done.stage.notes if note.about != "model")
    return done.checkpoint.replace(notes=tuple(dict.fromkeys((*done.checkpoint.notes, *notes))))


@checked
def merge_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    models: Mapping[str, Source] | None = None,
    *,
    options: Reconcile | None = None,
    threads: int | None = None,
    device: str = CPU,
    executor: Executor | None = None,
    follow: Follow = ignore,
) -> Checkpoint | Any:
    """The merge that a recipe describes, as a lazy checkpoint: a YAML file, or a mapping of the same form.

    models: those that the recipe names and that are not folders or hub ids. Of a file with several recipes the last is
    the result; those that it names are merged as they are read. options: what is let pass where models do not have the
    same tensors. device, executor: as in `match`. follow: gets each event of the run (`symfuse.api.events`).
    Alignments that the recipe asks for are made, and not proved: `prove` does that.
    """
    how = How(threads=threads, device=device, executor=executor, follow=with_warnings(follow))
    recipes, known = _recipes(recipe), _known(models)
    if len(recipes) == 1 and recipes[0].of_adapters:
        return merge_adapters(recipes[0], known)
    return run(recipes, known, options=options, how=how).checkpoint


@checked
def check(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    models: Mapping[str, Source] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    threads: int | None = None,
    sample: bool = True,
) -> list[Report]:
    """Whether the merges of a recipe can be done, and what they take, without doing them: a report of each recipe.

    recipe, models: as of `merge_recipe`. output: the folder or URL where the last is to be written; overwrite,
    max_shard_size, threads: as in `Checkpoint.save`. sample: read some of the weights, and say how related the models
    are; else headers, configs and tokenizers only. A report has `.possible`, `.problems`, `.cost`, `.to_dict()` …
    """
    place = None if output is None else place_of(os.fspath(output))
    target = Target(place, overwrite, max_shard_size, threads)
    return check_all(_recipes(recipe), _known(models), target=target, sample=sample)


@checked
def collect(
    source: Source,
    data: Task,
    kind: str = "fisher",
    *,
    labels: str | None = None,
    seed: int | None = None,
    memory: int | None = None,
    scratch: Path | None = None,
    device: str = CPU,
) -> Statistics:
    """Statistics of a model on data, for `merge(..., statistics=[…])`: `.save(folder)` them, and take them again.

    kind: "fisher", the squared gradients of the likelihood, or "gram", the second moments of what linear maps read.
    labels, seed: of "fisher", whether labels are "sampled" (the default), by this seed (0), or those "given". memory:
    of "gram", about how many bytes its sums may take. scratch: an empty folder for the result; by default it stays in
    memory. device: where the model is run. OptionError for an option of the other kind.
    """
    given = options_set({"labels": labels, "seed": seed, "memory": memory, "scratch": scratch})
    return collect_statistics(Model.of(opened(source), undeclared=True), data, kind, device=device, **given)


def _recipes(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Recipe, ...]:
    return (parse_recipe(recipe),) if isinstance(recipe, Mapping) else read_recipes(Path(recipe))


def _known(models: Mapping[str, Source] | None) -> dict[str, Checkpoint]:
    return {name: opened(source) for name, source in (models or {}).items()}


def _statistics(source: Statistics | str | os.PathLike[str] | None) -> Statistics | None:
    return source if source is None or isinstance(source, Statistics) else Statistics.load(source)
