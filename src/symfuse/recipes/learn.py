"""The stage of a recipe in which its method learns from data: `data` and `statistics`, of all models or of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from symfuse.errors import IncompatibleError, OptionError, SymmetryError
from symfuse.evaluation import Records, Task, make_task, read_records
from symfuse.io import Checkpoint
from symfuse.merging import Method
from symfuse.methods import learn as learn_method
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes.align import How
from symfuse.recipes.events import LearningDone, Note, Step, Working
from symfuse.recipes.schema import Data, Input, ModelRef, Recipe
from symfuse.recipes.stage import Stage
from symfuse.runs import record_of, recorded
from symfuse.stats.statistics import Statistics


def inputs_of(recipe: Recipe) -> list[Input]:
    """The models from whose data a method learns: those listed, without the base if the method has one. Empty for
    methods without data. OptionError for recipes by slices and modules, whose layers come from several models, and for
    a model that is listed twice with different data."""
    method = lookup(recipe.merge_method)
    if method.learn is None:
        return []
    if not recipe.models:
        raise OptionError(
            f"{method.name} learns from data of whole models: list them under `models`, not in slices or modules"
        )
    entries = [entry for entry in recipe.models if method.base == "unused" or entry.model != recipe.base_model]
    for i, entry in enumerate(entries):
        own = (entry.data, entry.statistics)
        if any(one.model == entry.model and (one.data, one.statistics) != own for one in entries[:i]):
            raise OptionError(f"{entry.model} is listed twice, with different data; list it once, with all of them")
    return entries


def tasks_of(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> list[Task | None]:
    """The data of each of `inputs_of`, as that model reads them; None for a model without data, or with statistics.

    OptionError or DataError, with the place in the recipe, for data that cannot be read, CheckpointError for a model
    that cannot read them.
    """
    method, read, tasks = lookup(recipe.merge_method), dict[tuple[str, str], Records](), list[Task | None]()
    parameters = _parameters(recipe, method)
    for entry, checkpoint in zip(inputs_of(recipe), checkpoints, strict=True):
        data = (entry.data or Data()).over(recipe.data)
        if entry.statistics is not None or data.file is None:
            tasks.append(None)
            if entry.statistics is None and method.data_required:
                raise OptionError(
                    f"{method.name} needs data, and {entry.model} has none: write `data: FILE` in the recipe, for all "
                    "models or for one, or --data FILE"
                    + ("; or use saved statistics" if method.statistics is not None else "")
                )
            continue
        key = (data.file, data.encoding)
        with recipe.blaming(f"models[{recipe.models.index(entry)}].data" if entry.data is not None else "data"):
            if key not in read:
                read[key] = read_records(data.file, encoding=data.encoding)
            tasks.append(task_of_data(data, read[key], checkpoint, unlabelled=method.unlabelled(parameters)))
    return tasks


def task_of_data(data: Data, records: Records, checkpoint: Checkpoint, *, unlabelled: bool) -> Task:
    """The task on these data, as a model reads them."""
    columns: dict[str, Any] = {f"{role}_column": name for role, name in data.columns.items()}
    return make_task(data.task, records, checkpoint, **columns, **data.options, unlabelled=unlabelled)


def statistics_of(stage: Stage, saved: Sequence[Statistics | None] | None = None) -> list[Statistics | None]:
    """The saved statistics of each of `inputs_of`, transformed with its model if that was aligned. saved: instead of
    those that the recipe names.

    IncompatibleError if they are of another model; SymmetryError if they cannot be transformed.
    """
    inputs = inputs_of(stage.recipe)
    if saved is None:
        saved = [None if one.statistics is None else Statistics.load(one.statistics) for one in inputs]
    return [
        one if one is None or number >= len(inputs) else _followed(stage, inputs[number], one)
        for number, one in enumerate(saved)
    ]


def _followed(stage: Stage, listed: Input, statistics: Statistics) -> Statistics:
    from symfuse.transporting.statistics import transported_statistics

    ref, what = listed.model, listed.statistics or f"statistics of {listed.model}"
    statistics.require(Model.of(stage.opened[ref], undeclared=True))
    if why := _rewritten(stage, ref):
        raise IncompatibleError(
            f"{what}: {ref} is rewritten before the merge ({why}), so that its statistics do not fit any more; leave "
            "them out, and give data"
        )
    alignment = stage.alignments.get(ref)
    framed = next((a.frame for a in stage.alignments.values()), ())
    if alignment is None and framed:
        raise SymmetryError(
            f"{what}: the alignment brings {ref} into another frame ({', '.join(framed)}), in which these statistics "
            "were not computed; leave them out, and give data"
        )
    return statistics if alignment is None else transported_statistics(statistics, alignment, known=True)


def _rewritten(stage: Stage, ref: ModelRef) -> str | None:
    """The change of a model before alignment, if any, that its statistics cannot follow."""
    if stage.vocabulary is not None and not stage.vocabulary.unchanged(list(stage.models).index(ref)):
        return "another vocabulary"
    before, after = (Model.of(each[ref], undeclared=True).spec for each in (stage.opened, stage.models))
    framed = any(alignment.frame for alignment in stage.alignments.values())  # checked by the caller
    if not framed and (before.tied.keys() != after.tied.keys() or before.tensors.keys() != after.tensors.keys()):
        return "tensors were untied, left out or added"
    return None


def learn(
    stage: Stage, how: How, tasks: Sequence[Task | None] | None, saved: Sequence[Statistics | None] | None = None
) -> Stage:
    """The stage with what its method learns from data, and its models as the method transforms them; unchanged if the
    method uses no data. tasks: of each of `inputs_of`. saved: as in `statistics_of`."""
    recipe, method, refs = stage.recipe, lookup(stage.recipe.merge_method), list(stage.models)
    if method.learn is None and not tasks and not saved:
        return stage
    apart, numbers = recipe.base_model, [refs.index(entry.model) for entry in inputs_of(recipe)]
    parameters = _parameters(recipe, method)
    how.follow(Working("learning from data"))

    def report(line: str) -> None:
        how.follow(Step(text=line))

    with recipe.blaming("merge_method"):
        result = learn_method(
            method,
            [Model.of(checkpoint, undeclared=True) for checkpoint in stage.models.values()],
            of=numbers,
            base=None if apart is None or method.base == "unused" else refs.index(apart),
            tasks=tasks,
            statistics=statistics_of(stage, saved),
            parameters=parameters,
            heads=recipe.heads,
            seed=recipe.seed,
            memory=how.memory,
            device=how.device,
            report=report,
        )
    if result is None:
        return stage
    if result.learned.summary:
        how.follow(LearningDone(result.learned.summary))
    notes = [Note(text) for text in result.learned.notes]
    for note in notes:
        how.follow(note)
    pairs = zip(stage.models.items(), result.models, strict=True)
    moved = {ref: recorded(model.checkpoint, record_of(before)) for (ref, before), model in pairs}
    return replace(stage, models=moved, learned=result, notes=(*stage.notes, *notes))


def _parameters(recipe: Recipe, method: Method) -> dict[str, Any]:
    """The parameters that a method learns with: one value each."""
    values = {}
    for name in method.learned:
        if name in recipe.parameters:
            cases = recipe.parameters[name].cases
            if len(cases) != 1 or not cases[0].of_all or len(cases[0].values) != 1:
                raise OptionError(
                    f"{cases[0].place or name}: {name} of {method.name} has one value for the whole merge, not one by "
                    "layer or tensor"
                )
            values[name] = cases[0].values[0]
    return values
