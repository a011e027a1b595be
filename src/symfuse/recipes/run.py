"""A recipe from folders to the merged checkpoint: open, reconcile, one vocabulary, plan, align, learn from data.

Every stage returns checkpoints whose tensors are computed when they are read; no tensor is read before the alignment,
and none is kept. Both the command line, which prints the events, and `symfuse.merge` call `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.io import Checkpoint
from symfuse.recipes.align import How, align
from symfuse.recipes.check import Target, report_of
from symfuse.recipes.events import Planned, Warned
from symfuse.recipes.learn import inputs_of, learn, tasks_of
from symfuse.recipes.record import merge_record, with_tokenizer_notes
from symfuse.recipes.schema import Recipe
from symfuse.recipes.stage import Stage, open_models, plan, prepare, require_one_frame
from symfuse.rewriting import Reconcile
from symfuse.runs import recorded
from symfuse.stats.statistics import Statistics


@dataclass(frozen=True)
class Shown:
    """Data in memory for a data-driven method, instead of those that the recipe names: one for each model that it
    learns from, in the order of the recipe, or None."""

    tasks: Sequence[Task | None] | None = None
    statistics: Sequence[Statistics | None] | None = None


@dataclass(frozen=True)
class Merge:
    """The result of a recipe. stage: its aligned models, and what was learned. checkpoint: the merge, with its
    record."""

    stage: Stage
    checkpoint: Checkpoint


def run(
    recipes: Sequence[Recipe],
    known: Mapping[str, Checkpoint] | None = None,
    *,
    options: Reconcile | None = None,
    how: How | None = None,
    target: Target | None = None,
    shown: Shown | None = None,
) -> Merge:
    """Run the last of these recipes; earlier ones are merged when their results are read. known: models in memory, by
    their names in the recipes. options: instead of the recipes' own. how: resources, and the function that gets the
    events. target: where the result will be written, for its check. shown: data in memory.

    Each recipe's models are opened, prepared, planned and checked once, before any work; a recipe that aligns or learns
    is planned again at the end. Raises SymfuseError.
    """
    how, results, warnings = how or How(), dict[str, Checkpoint](), list[str]()
    if not recipes:
        raise OptionError("a merge needs a recipe; none is given")
    for recipe in recipes:
        last = recipe is recipes[-1]
        available = {**(known or {}), **results}
        stage = with_tokenizer_notes(prepare(recipe, open_models(recipe, available), options))
        merged, place = plan(stage, device=how.device), target if last else None
        tasks, saved = (_tasks(stage), None) if shown is None else (shown.tasks, shown.statistics or ())
        report = report_of(stage, merged, place, results=results, sample=_is_stored(recipe, available))
        how.follow(Planned(stage, merged, report, last))
        for text in report.warnings if report.possible else ():
            warnings.append(text)
            how.follow(Warned(text))
        stage = require_one_frame(stage) if recipe.align is None else stage
        for note in stage.notes:
            how.follow(note)
        stage = learn(align(stage, how), how, tasks, saved)
        merged = plan(stage, device=how.device) if stage.changed else merged
        done = with_text(stage, recipes) if last else stage
        merged = recorded(merged, merge_record(done, merged, warnings if last else ()))
        if recipe.name is not None:
            results[recipe.name] = merged
    return Merge(stage, merged)


def with_text(stage: Stage, recipes: Sequence[Recipe]) -> Stage:
    """The stage with the text of a whole file of recipes."""
    text = "\n---\n".join(recipe.text.strip() for recipe in recipes) + "\n"
    return replace(stage, recipe=replace(stage.recipe, text=text))


def _is_stored(recipe: Recipe, known: Mapping[str, Checkpoint]) -> bool:
    """Whether its models are in files or dictionaries; others are computed, and not read before they are saved."""
    return all(known[str(ref)].at_hand for ref in recipe.models_used() if str(ref) in known)


def _tasks(stage: Stage) -> list[Task | None]:
    return tasks_of(stage.recipe, [stage.models[listed.model] for listed in inputs_of(stage.recipe)])
