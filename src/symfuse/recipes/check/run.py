"""The check of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from symfuse.device import CPU
from symfuse.io import Checkpoint, check_target
from symfuse.io.companions import code_notes
from symfuse.io.remote import Place
from symfuse.io.target import check_space, free_space, output_place
from symfuse.merging import Merged
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes.check import cost, facts, problems, relation
from symfuse.recipes.check.problems import Found
from symfuse.recipes.check.report import Problem, Report
from symfuse.recipes.plan import template_of, why_template
from symfuse.recipes.schema import Input, ModelRef, Recipe
from symfuse.recipes.stage import Stage, plan, require_one_frame
from symfuse.rewriting import Reconcile
from symfuse.rewriting.rewritten import drop


@dataclass(frozen=True)
class Target:
    """Where the output is to be, as for `Checkpoint.save`. folder: None if that is not known yet."""

    folder: Place | None = None
    overwrite: bool = False
    max_shard_size: int | str = "5GB"
    threads: int | None = None


def check(
    recipe: Recipe,
    known: Mapping[str, Checkpoint] | None = None,
    options: Reconcile | None = None,
    *,
    target: Target | None = None,
    sample: bool = True,
) -> Report:
    """What a merge will do and cost, and every reason why it cannot be done that shows without reading all weights:
    NaN, infinity and results that do not fit into the output's dtype the merge itself may still meet.

    From headers, configs and tokenizer files; and, with `sample`, from at most 16 MB of weights. Otherwise no weights
    are read but rotary frequencies and counters, a few numbers each. known: as for `open_models`. options: instead of
    the recipe's. Raises nothing for what is wrong with models or recipe: that is in `problems`.
    """
    return _checked(recipe, known or {}, {}, options, target, sample)[0]


def check_all(
    recipes: Sequence[Recipe],
    options: Reconcile | None = None,
    *,
    known: Mapping[str, Checkpoint] | None = None,
    target: Target | None = None,
    sample: bool = True,
) -> list[Report]:
    """The check of each recipe of a file; later ones may name results of earlier ones. known: as for `open_models`.
    target: of the last."""
    out, results = [], dict[str, Checkpoint]()
    for number, recipe in enumerate(recipes, 1):
        place = target if number == len(recipes) else None
        report, merged = _checked(recipe, known or {}, results, options, place, sample)
        out.append(report)
        if merged is None:
            break  # the others need it
        if recipe.name is not None:
            results[recipe.name] = merged
    return out


def report_of(
    stage: Stage, merged: Checkpoint, target: Target | None, *, results: Collection[str], sample: bool
) -> Report:
    """The report of models that are prepared and planned already: what a run says before it begins. results: the names
    of models that are merges themselves. sample: whether some of the weights are read."""
    found, report = Found(), Report(stage.recipe.merge_method, stage.recipe.name)
    _describe(report, stage.recipe, stage.opened)
    _complete(report, stage, merged, target, results, sample, found)
    report.problems += map(Problem.of, found.errors)
    return report


def _checked(
    recipe: Recipe,
    known: Mapping[str, Checkpoint],
    results: Mapping[str, Checkpoint],
    options: Reconcile | None,
    target: Target | None,
    sample: bool,
) -> tuple[Report, Checkpoint | None]:
    found, report = Found(), Report(recipe.merge_method, recipe.name)
    merged = None
    opened = problems.open_each(recipe, {**known, **results}, found)
    used = {ref: opened[ref] for ref in recipe.models_used() if ref in opened}
    if used:
        _describe(report, recipe, used)
    if len(used) == len(recipe.models_used()) and not found.errors:
        bare = {ref: _bare(checkpoint, found, sample) for ref, checkpoint in opened.items()}
        stage = problems.prepared(recipe, bare, options, found)
        if stage is not None:
            report.notes += [note.text for note in stage.notes]
            if recipe.align is not None:
                report.alignment = problems.alignment(stage, recipe.align, found)
            problems.data(stage, found)
            merged = found.attempt(plan, stage)
            _complete(report, stage, merged, target, results, sample, found)
    report.problems += map(Problem.of, found.errors)
    return report, merged if report.possible else None


def _complete(
    report: Report,
    stage: Stage,
    merged: Checkpoint | None,
    target: Target | None,
    results: Collection[str],
    sample: bool,
    found: Found,
) -> None:
    """What follows from the plan, and from a sample of the weights. results: whose tensors are computed whole, as are
    those of models with an adapter."""
    report.tokenizer = stage.tokenizer
    computed = {ref: str(ref) in results or facts.adapter_of(ref) is not None for ref in stage.models}
    if merged is not None:
        _say_output(report, stage, merged, computed, target or Target(), found)
    if sample:
        if stage.recipe.align is None:
            found.attempt(require_one_frame, stage, lambda note: report.notes.append(note.text))
        found.attempt(_relate, report, stage, computed)


def _describe(report: Report, recipe: Recipe, models: Mapping[ModelRef, Checkpoint]) -> None:
    """The models, and what differs between them."""
    template = template_of(recipe)
    report.base, report.why_base = str(template), why_template(recipe)
    gives = facts.gives(models, template, recipe)
    for ref, checkpoint in models.items():
        model = Found().attempt(Model.of, checkpoint, undeclared=True)
        report.models.append(facts.model_facts(ref, checkpoint, model, gives[ref]))
        if warning := facts.contradicted_dtype(checkpoint):
            report.warnings.append(warning)
        code = [] if checkpoint.folder is None else Found().attempt(code_notes, checkpoint.folder) or []
        report.notes += [f"{checkpoint.name}: {note}" for note in (*checkpoint.notes, *code)]
    given = [source.model for source in recipe.models]
    ordered = [models[ref] for ref in dict.fromkeys([*given, *models]) if ref in models]
    report.config += Found().attempt(facts.config_fields, ordered) or []  # an error is said by `prepared`
    report.tokenizers += facts.tokenizer_differences(ordered, recipe.tokenizer is not None, report.warnings.append)
    report.layers += _ranges(recipe)


def _ranges(recipe: Recipe) -> list[str]:
    """Layer ranges in words: their end is not part of them."""
    parts = [*recipe.slices, *(part for module in recipe.modules.values() for part in module.slices)]
    sources: list[Input] = [source for part in parts for source in part.sources]
    listed = [*recipe.models, *(source for module in recipe.modules.values() for source in module.models)]
    return [
        f"{source.model}: layer_range [{start}, {stop}] = layer{'s' if stop - start > 1 else ''} {start}"
        + (f" to {stop - 1}" if stop - start > 1 else "")
        for source in (*listed, *sources)
        if source.layer_range is not None
        for start, stop in [source.layer_range]
    ]


def _bare(checkpoint: Checkpoint, found: Found, sample: bool) -> Checkpoint:
    """Without stored aliases, which a merge compares whole with what they stand for; here the sample does."""
    model = Found().attempt(Model.of, checkpoint, undeclared=True)
    if model is None:
        return checkpoint
    files = {model.spec.file_name(a): model.spec.file_name(name) for a, name in model.spec.tied.items()}
    aliases = {alias: name for alias, name in files.items() if alias in checkpoint and name in checkpoint}
    if sample and aliases:
        found.attempt(relation.require_aliases, checkpoint, aliases)
    return drop(checkpoint, aliases)


def _say_output(
    report: Report,
    stage: Stage,
    merged: Checkpoint,
    computed: Mapping[ModelRef, bool],
    target: Target,
    found: Found,
) -> None:
    outputs = _plan(merged)
    aligned = set() if stage.recipe.align is None else set(stage.models)
    names = {stage.models[ref].name for ref in stage.models if computed[ref] or ref in aligned}
    sized = found.attempt(
        cost.cost, merged, outputs.outputs, names, shard=target.max_shard_size, threads=target.threads
    )
    report.weights = cost.weights_of(outputs.outputs)
    report.resolved = cost.resolved(outputs.outputs)
    if sized is None:
        return
    report.cost = sized
    if target.folder is not None:
        place = output_place(target.folder)
        before = len(found.errors)
        found.attempt(check_target, place, overwrite=target.overwrite, inputs=merged.sources)
        if len(found.errors) == before and isinstance(place, Path):
            report.cost = replace(sized, disk_free=free_space(place))
            found.attempt(check_space, {place: sized.bytes})


def _plan(merged: Checkpoint) -> Merged:
    tensors = merged.tensors
    assert isinstance(tensors, Merged)
    return tensors


def _relate(report: Report, stage: Stage, computed: Mapping[ModelRef, bool]) -> None:
    models = [Model.of(checkpoint.on(CPU), undeclared=True) for checkpoint in stage.models.values()]
    align = stage.recipe.align is not None
    found = relation.related(models, stage.template, list(computed.values()), align=align)
    if found is None:
        return
    report.sample, report.relations = found.sample, found.relations
    task_vectors = lookup(stage.recipe.merge_method).base == "required" and stage.recipe.base_model is not None
    if task_vectors:
        report.deltas = found.deltas
    report.warnings += relation.task_warnings(found.deltas) if task_vectors and not align else found.warnings
