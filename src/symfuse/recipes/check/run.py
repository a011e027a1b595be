"""The check of a recipe: all reasons why models cannot be merged, where the merge itself stops at the first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from symfuse.device import CPU
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint, check_target
from symfuse.io.companions import code_notes
from symfuse.io.remote import Place
from symfuse.io.target import check_space, free_space, output_place
from symfuse.matching import select
from symfuse.merging import Merged
from symfuse.methods import lookup
from symfuse.methods.models import require_same_heads
from symfuse.model import Model
from symfuse.model.config import differences
from symfuse.model.model import WIDTHS, let_pass, require_same_sizes, require_same_tensors
from symfuse.model.undeclared import LAYER_COUNTS
from symfuse.recipes.align import anchor_of, axes_of, data_of, groups_of, layers_of
from symfuse.recipes.check import facts, relation
from symfuse.recipes.check.report import Alignment, Problem, Report
from symfuse.recipes.learn import inputs_of, statistics_of, tasks_of
from symfuse.recipes.plan import plan_recipe, template_of, why_template
from symfuse.recipes.schema import Align, ModelRef, Recipe
from symfuse.recipes.stage import (
    Stage,
    models_of,
    open_model,
    order_of,
    plan,
    prepare,
    reconcile_of,
    require_models,
    require_one_frame,
)
from symfuse.rewriting import Reconcile, harmonise
from symfuse.rewriting.rewritten import drop

P = ParamSpec("P")
T = TypeVar("T")
SIZES = {"vocab_size", *WIDTHS[:4], *LAYER_COUNTS}  # fields that are reported as sizes
LENIENT = Reconcile(foreign="drop", missing_bias="zero")


class Errors:
    """The errors that were raised, each once."""

    def __init__(self) -> None:
        self.all: list[SymfuseError] = []

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `work` returns, or None if it raises a SymfuseError, which is added."""
        try:
            return work(*args, **kwargs)
        except SymfuseError as error:
            self.add(error)
            return None

    def add(self, error: SymfuseError) -> None:
        if str(error) not in map(str, self.all):
            self.all.append(error)


def open_each(recipe: Recipe, known: Mapping[str, Checkpoint], errors: Errors) -> dict[ModelRef, Checkpoint]:
    """The models that can be opened, in the order of `open_models`."""
    tried = {ref: errors.attempt(open_model, recipe, ref, known) for ref in models_of(recipe)}
    return {ref: checkpoint for ref, checkpoint in tried.items() if checkpoint is not None}


def prepared(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], errors: Errors) -> Stage | None:
    """The stage before alignment, or None; errors of it, and of the plan, are added."""
    stage = errors.attempt(prepare, recipe, models)
    if stage is None:
        _compare(recipe, models, reconcile_of(recipe), errors)
        _plan_of_one(recipe, models, errors)
    return stage


def alignment(stage: Stage, align: Align, errors: Errors, *, read: bool) -> Alignment | None:
    """What is aligned to which anchor; errors for what `align` names and does not exist are added. Without a named
    anchor it is the last of two models, and unknown for more until all weights are read. read: read its data too."""
    model = Model.of(stage.models[template_of(stage.recipe)], undeclared=True)
    undeclared = not all(Model.of(c, undeclared=True).declared for c in stage.models.values())
    task_vectors = lookup(stage.recipe.merge_method).base == "required" and stage.recipe.base_model is not None
    known = undeclared or align.anchor is not None or task_vectors
    anchor = errors.attempt(anchor_of, stage) if known else list(stage.models)[-1] if len(stage.models) < 3 else None
    if undeclared or (known and anchor is None):
        return None
    words = errors.attempt(axes_of, stage)
    axes = None if words is None else errors.attempt(select, model.spec, words[0], align.groups)
    layers = errors.attempt(layers_of, stage.recipe, model.spec)
    groups = errors.attempt(groups_of, stage.recipe, model.spec)
    read = read and align.source != "weights"
    unread = read and errors.attempt(data_of, align, model.checkpoint) is None
    if axes is None or layers is None or groups is None or unread:
        return None
    named = None if anchor is None else str(anchor)
    ways = (align.scaling is not False, groups, align.one_pass, align.biases)
    return Alignment(named, list(axes[1]), layers, *ways, align.data, align.source)


def data(stage: Stage, errors: Errors) -> None:
    """Check that a data-driven method has data that each model can read, and saved statistics that fit."""
    inputs = errors.attempt(inputs_of, stage.recipe) or []
    errors.attempt(tasks_of, stage.recipe, [stage.models[listed.model] for listed in inputs])
    errors.attempt(statistics_of, stage)


def _compare(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], options: Reconcile, errors: Errors) -> None:
    """Check each model by itself, then the first with each of the others."""
    template = models[template_of(recipe)]
    checkpoints = {}
    for ref in order_of(recipe, models):  # compare the names that will be merged, without foreign tensors
        both = [template, models[ref]]
        errors.attempt(harmonise, both, options=options)
        done = Errors().attempt(harmonise, both, options=replace(LENIENT, force_config=options.force_config))
        checkpoints[ref] = models[ref] if done is None else done.checkpoints[1]
    tries = [errors.attempt(Model.of, c, undeclared=True) for c in checkpoints.values()]
    opened = [model for model in tries if model is not None]
    for other in opened[1:]:
        first = opened[0]
        if first.spec.family != other.spec.family:
            continue  # `harmonise` raises for it
        pair = f"{first.name} and {other.name}"
        sizes = Errors()
        for one, two in _by_axis(first, other, without_rows=recipe.tokenizer is not None):
            sizes.attempt(require_same_sizes, one, two, pair, recipe.whole, options.force_config)
        for error in sizes.all:
            errors.add(error)
        fields = errors.attempt(differences, first.checkpoint, other.checkpoint) or []
        others = [d for d in fields if d.field not in SIZES]
        errors.attempt(let_pass, others, pair, options.force_config, recipe.whole)
        rows = [model.spec.sizes.get("vocab") for model in (first, other)]
        if not sizes.all and rows[0] == rows[1]:  # else these differences follow from the sizes
            errors.attempt(require_same_tensors, first, other, pair, recipe.whole)
            if recipe.heads == "average":
                errors.attempt(require_same_heads, [first, other])


def _by_axis(first: Model, other: Model, *, without_rows: bool) -> Iterator[tuple[Model, Model]]:
    """The pair with one axis at a time, and with none, so that a difference in one does not hide the others."""
    for axis in [*first.spec.axes, None]:
        if axis == "vocab" and without_rows:
            continue
        yield _with_axis(first, axis), _with_axis(other, axis)


def _with_axis(model: Model, axis: str | None) -> Model:
    axes = {name: value for name, value in model.spec.axes.items() if name == axis}
    return replace(model, spec=replace(model.spec, axes=axes))


def _plan_of_one(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], errors: Errors) -> None:
    """Add the plan's errors for parameters and numbers of models, as if all models were the template."""
    if recipe.slices or recipe.modules:
        return  # it is not known whether the others have these layers
    template = Errors().attempt(Model.of, models[template_of(recipe)], undeclared=True)
    if template is not None:
        refs = recipe.models_used()
        stand_ins = {ref: replace(template, checkpoint=template.checkpoint.replace(name=str(ref))) for ref in refs}
        errors.attempt(plan_recipe, recipe, stand_ins)


@dataclass(frozen=True)
class Target:
    """Where the output will be written, as for `Checkpoint.save`. folder: None if not known yet."""

    folder: Place | None = None
    overwrite: bool = False
    max_shard_size: int | str = "5GB"
    threads: int | None = None


def check_all(
    recipes: Sequence[Recipe],
    known: Mapping[str, Checkpoint] | None = None,
    *,
    target: Target | None = None,
    sample: bool = True,
) -> list[Report]:
    """What the merge of each recipe will do and cost, and every reason why it cannot be done that shows without reading
    all weights. The merge may still fail on NaN, infinity, or results that do not fit into the output's dtype.

    Reads headers, configs and tokenizer files; with `sample`, at most 16 MB of weights; and rotary frequencies and
    counters, a few numbers each. known: as for `open_models`. Later recipes may name results of earlier ones. target:
    of the last. Errors of models and recipes are not raised, but listed in `problems`. OptionError for a recipe of
    adapters.
    """
    out, results = list[Report](), dict[str, Checkpoint]()
    for number, recipe in enumerate(recipes, 1):
        require_models(recipe)
        one = _Check(recipe, target if number == len(recipes) else None, results, sample)
        merged = one.all({**(known or {}), **results})
        out.append(one.report)
        if merged is None or not one.report.possible:
            break  # later recipes need it
        if recipe.name is not None:
            results[recipe.name] = merged
    return out


def report_of(
    stage: Stage, merged: Checkpoint, target: Target | None, *, results: Collection[str], sample: bool
) -> Report:
    """The report of models that are prepared and planned already. results: the names of models that are merges of
    earlier recipes. sample: whether to read some of the weights."""
    one = _Check(stage.recipe, target, results, sample)
    one.describe(stage.opened)
    one.alignment(stage, read=False)
    one.complete(stage, merged)
    return one.report


class _Check:
    """Makes a report. results: the names of models whose tensors are computed whole."""

    def __init__(self, recipe: Recipe, target: Target | None, results: Collection[str], sample: bool) -> None:
        self.recipe, self.target, self.results, self.sample = recipe, target or Target(), results, sample
        self.errors = Errors()
        self._report = Report(recipe.merge_method, recipe.name)

    @property
    def report(self) -> Report:
        self._report.problems = [Problem.of(error) for error in self.errors.all]
        return self._report

    def all(self, known: Mapping[str, Checkpoint]) -> Checkpoint | None:
        """Check everything, from opening the models on; returns the merge, if it can be planned."""
        recipe, errors = self.recipe, self.errors
        opened = open_each(recipe, known, errors)
        used = {ref: opened[ref] for ref in recipe.models_used() if ref in opened}
        if used:
            self.describe(used)
        if len(used) < len(recipe.models_used()) or errors.all:
            return None
        bare = {ref: _bare(checkpoint, errors, self.sample) for ref, checkpoint in opened.items()}
        stage = prepared(recipe, bare, errors)
        if stage is None:
            return None
        self.alignment(stage, read=True)
        data(stage, errors)
        merged = errors.attempt(plan, stage)
        if self.sample and recipe.align is None:
            stage = errors.attempt(require_one_frame, stage) or stage
        self._report.notes += [note.text for note in stage.notes]
        self.complete(stage, merged)
        return merged

    def alignment(self, stage: Stage, *, read: bool) -> None:
        """Add what is aligned. read: read its data too."""
        if self.recipe.align is not None:
            self._report.alignment = alignment(stage, self.recipe.align, self.errors, read=read)

    def complete(self, stage: Stage, merged: Checkpoint | None) -> None:
        """Add what follows from the plan, and from a sample of the weights."""
        self._report.tokenizer = stage.tokenizer
        computed = {ref: str(ref) in self.results or facts.adapter_of(ref) is not None for ref in stage.models}
        if merged is not None:
            self._output(stage, merged, computed)
        if self.sample:
            self.errors.attempt(self._relate, stage, computed)

    def describe(self, models: Mapping[ModelRef, Checkpoint]) -> None:
        """Add the models, and how they differ."""
        recipe, report = self.recipe, self._report
        template = template_of(recipe)
        report.base, report.why_base = str(template), why_template(recipe)
        gives = facts.gives(models, template, recipe)
        for ref, checkpoint in models.items():
            model = Errors().attempt(Model.of, checkpoint, undeclared=True)
            report.models.append(facts.model_facts(ref, checkpoint, model, gives[ref]))
            if warning := facts.contradicted_dtype(checkpoint):
                report.warnings.append(warning)
            code = [] if checkpoint.folder is None else Errors().attempt(code_notes, checkpoint.folder) or []
            report.notes += [f"{checkpoint.name}: {note}" for note in (*checkpoint.notes, *code)]
        listed = [source.model for source in recipe.models]
        ordered = [models[ref] for ref in dict.fromkeys([*listed, *models]) if ref in models]
        report.config += Errors().attempt(facts.config_fields, ordered) or []  # `prepared` reports its errors
        report.tokenizers += facts.tokenizer_differences(ordered, recipe.tokenizer is not None, report.warnings.append)
        report.layers += _ranges(recipe)

    def _output(self, stage: Stage, merged: Checkpoint, computed: Mapping[ModelRef, bool]) -> None:
        report, target, errors = self._report, self.target, self.errors
        assert isinstance(merged.tensors, Merged)
        outputs = merged.tensors.outputs
        aligned = set() if stage.recipe.align is None else set(stage.models)
        names = {stage.models[ref].name for ref in stage.models if computed[ref] or ref in aligned}
        sized = errors.attempt(facts.cost, merged, outputs, names, shard=target.max_shard_size, threads=target.threads)
        report.weights = facts.weights_of(outputs)
        report.resolved = facts.resolved(outputs)
        if sized is None:
            return
        report.cost = sized
        if target.folder is not None:
            place = output_place(target.folder)
            before = len(errors.all)
            errors.attempt(check_target, place, overwrite=target.overwrite, inputs=merged.sources)
            if len(errors.all) == before and isinstance(place, Path):
                report.cost = replace(sized, disk_free=free_space(place))
                errors.attempt(check_space, {place: sized.bytes})

    def _relate(self, stage: Stage, computed: Mapping[ModelRef, bool]) -> None:
        report = self._report
        models = [Model.of(checkpoint.on(CPU), undeclared=True) for checkpoint in stage.models.values()]
        align = stage.recipe.align is not None
        related = relation.related(models, stage.template, list(computed.values()), align=align)
        if related is None:
            return
        report.sample, report.relations = related.sample, related.relations
        task_vectors = lookup(stage.recipe.merge_method).base == "required" and stage.recipe.base_model is not None
        if task_vectors:
            report.deltas = related.deltas
        report.warnings += relation.task_warnings(related.deltas) if task_vectors and not align else related.warnings


def _ranges(recipe: Recipe) -> list[str]:
    """Layer ranges in words, with the last layer included."""
    return [
        f"{source.model}: layer_range [{start}, {stop}] = layer{'s' if stop - start > 1 else ''} {start}"
        + (f" to {stop - 1}" if stop - start > 1 else "")
        for source in recipe.inputs
        if source.layer_range is not None
        for start, stop in [source.layer_range]
    ]


def _bare(checkpoint: Checkpoint, errors: Errors, sample: bool) -> Checkpoint:
    """The checkpoint without stored aliases, of which a sample is compared with the tensors that they are tied to."""
    model = Errors().attempt(Model.of, checkpoint, undeclared=True)
    if model is None:
        return checkpoint
    files = {model.spec.file_name(a): model.spec.file_name(name) for a, name in model.spec.tied.items()}
    aliases = {alias: name for alias, name in files.items() if alias in checkpoint and name in checkpoint}
    if sample and aliases:
        errors.attempt(relation.require_aliases, checkpoint, aliases)
    return drop(checkpoint, aliases)
