"""A recipe from folders to the merged checkpoint: open, reconcile, one vocabulary, align, learn from data, plan.

Every stage goes from checkpoints to checkpoints that are computed when they are read; no tensor is read before the
alignment, and none is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.executors import Executor
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.recipes import Recipe
from symfuse.recipes.align import (
    align_all,
    aligned,
    anchor_of,
    axes_of,
    data_of,
    groups_of,
    layers_of,
    match_model,
    matching_of,
)
from symfuse.recipes.learn import inputs_of, learn, statistics_of, tasks_of
from symfuse.recipes.plan import plan_recipe
from symfuse.recipes.record import merge_record, opened, with_tokenizer_notes
from symfuse.recipes.stage import SHARED_ROWS, Stage, files_in, open_models, prepare, reconcile_of, vocabulary_tensors
from symfuse.rewriting import Reconcile, require_same_frame
from symfuse.rewriting.vocabulary import with_chat_template
from symfuse.runs import recorded

__all__ = [
    "SHARED_ROWS", "Stage", "align_all", "aligned", "anchor_of", "axes_of", "data_of", "finish", "groups_of",
    "inputs_of", "layers_of", "learn", "match_model", "matching_of", "merge_recipes", "merge_record", "open_models",
    "prepare", "reconcile_of", "require_one_frame", "statistics_of", "tasks_of", "vocabulary_tensors", "with_text",
    "with_tokenizer_notes",
]  # fmt: skip


def require_one_frame(stage: Stage) -> Stage:
    """`require_same_frame` of what is to be merged, which reads gains of norms, with its notes; layers may be stacked
    as they are, and with force_config gains may be 1 for want of training."""
    if stage.recipe.merge_method == "passthrough" or stage.options.force_config:
        return stage
    notes = require_same_frame([Model.of(checkpoint, undeclared=True) for checkpoint in stage.models.values()])
    return replace(stage, notes=(*stage.notes, *notes))


def finish(stage: Stage, *, device: str = CPU) -> Checkpoint:
    """The merged checkpoint, with the files that go beside it; nothing is read. device: where blocks are combined."""
    models = {ref: Model.of(checkpoint, undeclared=True) for ref, checkpoint in stage.models.items()}
    merged = plan_recipe(
        stage.recipe,
        models,
        stage.kept,
        fields=stage.config,
        before=stage.before,
        device=device,
        learned=stage.learned,
    )
    template = list(stage.models.values())[stage.template]
    files = dict(template.companions()) if stage.vocabulary is None else files_in(stage.vocabulary, template)
    if stage.recipe.chat_template is not None:
        files = with_chat_template(files, stage.recipe.chat_template, list(stage.models.values()))
    return merged.replace(files=files)


def with_text(stage: Stage, recipes: Sequence[Recipe]) -> Stage:
    """The stage with the text of a whole file of recipes."""
    text = "\n---\n".join(recipe.text.strip() for recipe in recipes) + "\n"
    return replace(stage, recipe=replace(stage.recipe, text=text))


def merge_recipes(
    recipes: Sequence[Recipe],
    known: Mapping[str, Checkpoint] | None = None,
    *,
    options: Reconcile | None = None,
    threads: int | None = None,
    device: str = CPU,
    executor: Executor | None = None,
    warnings: Sequence[str] = (),
) -> Checkpoint:
    """The result of the last recipe, for which those before it are merged as they are read. device: where models are
    matched, run and combined. executor: who matches them from weights. warnings: those to record."""
    results = dict(known or {})
    merged = None
    for recipe in recipes:
        stage = align_all(opened(recipe, results, options), threads=threads, device=device, executor=executor)
        stage = learn(require_one_frame(stage), device=device)
        merged = finish(stage, device=device)
        merged = recorded(merged, merge_record(with_text(stage, recipes), merged, warnings))
        if recipe.name is not None:
            results[recipe.name] = merged
    if merged is None:
        raise OptionError("a merge needs a recipe; none is given")
    return merged
