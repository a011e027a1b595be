"""Every reason why models cannot be merged, where the merge itself stops at the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import ParamSpec, TypeVar

from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.matching import select
from symfuse.methods import lookup
from symfuse.methods.models import require_same_heads
from symfuse.model import Model
from symfuse.model.config import differences
from symfuse.model.model import WIDTHS, let_pass, require_same_sizes, require_same_tensors
from symfuse.model.undeclared import LAYER_COUNTS
from symfuse.recipes.align import anchor_of, axes_of, data_of, groups_of, layers_of
from symfuse.recipes.check.report import Alignment
from symfuse.recipes.learn import inputs_of, statistics_of, tasks_of
from symfuse.recipes.plan import plan_recipe, template_of
from symfuse.recipes.schema import Align, ModelRef, Recipe
from symfuse.recipes.stage import Stage, models_of, open_model, order_of, prepare, reconcile_of
from symfuse.rewriting import Reconcile, harmonise

P = ParamSpec("P")
T = TypeVar("T")
SIZES = {"vocab_size", *WIDTHS[:4], *LAYER_COUNTS}  # fields that are reported as sizes
LENIENT = Reconcile(foreign="drop", missing_bias="zero")


class Errors:
    """The errors that were met, each once."""

    def __init__(self) -> None:
        self.all: list[SymfuseError] = []

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `work` returns; None, and its error noted, if it raises."""
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
    """The stage before alignment, or None; what stands against it, or against the plan, is noted."""
    stage = errors.attempt(prepare, recipe, models)
    if stage is None:
        _compare(recipe, models, reconcile_of(recipe), errors)
        _plan_of_one(recipe, models, errors)
    return stage


def alignment(stage: Stage, align: Align, errors: Errors, *, read: bool) -> Alignment | None:
    """What is to be aligned with what; what `align` names must be there. Without an anchor that is named, it is known
    once all weights are read, or of two models it is the last. read: whether the data that it names are read too."""
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
    """Whether data are there for a method that looks at them, and each model can read its own; and saved statistics."""
    inputs = errors.attempt(inputs_of, stage.recipe) or []
    errors.attempt(tasks_of, stage.recipe, [stage.models[given.model] for given in inputs])
    errors.attempt(statistics_of, stage)


def _compare(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], options: Reconcile, errors: Errors) -> None:
    """Each model by itself, then the first with each of the others."""
    template = models[template_of(recipe)]
    checkpoints = {}
    for ref in order_of(recipe, models):  # names are compared as they will be, foreign tensors left out
        both = [template, models[ref]]
        errors.attempt(harmonise, both, options=options)
        done = Errors().attempt(harmonise, both, options=replace(LENIENT, force_config=options.force_config))
        checkpoints[ref] = models[ref] if done is None else done.checkpoints[1]
    tries = [errors.attempt(Model.of, c, undeclared=True) for c in checkpoints.values()]
    opened = [model for model in tries if model is not None]
    for other in opened[1:]:
        first = opened[0]
        if first.spec.family != other.spec.family:
            continue  # said by `harmonise`
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
        if not sizes.all and rows[0] == rows[1]:  # else these follow from the sizes
            errors.attempt(require_same_tensors, first, other, pair, recipe.whole)
            if recipe.heads == "average":
                errors.attempt(require_same_heads, [first, other])


def _by_axis(first: Model, other: Model, *, without_rows: bool) -> Iterator[tuple[Model, Model]]:
    """The pair with one axis each, and with none, so that a difference of one does not hide those of others."""
    for axis in [*first.spec.axes, None]:
        if axis == "vocab" and without_rows:
            continue
        yield _with_axis(first, axis), _with_axis(other, axis)


def _with_axis(model: Model, axis: str | None) -> Model:
    axes = {name: value for name, value in model.spec.axes.items() if name == axis}
    return replace(model, spec=replace(model.spec, axes=axes))


def _plan_of_one(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], errors: Errors) -> None:
    """What the plan says against parameters and numbers of models: as if all models were the template."""
    if recipe.slices or recipe.modules:
        return  # the layers of the others are not known to be there
    template = Errors().attempt(Model.of, models[template_of(recipe)], undeclared=True)
    if template is not None:
        refs = recipe.models_used()
        stand_ins = {ref: replace(template, checkpoint=template.checkpoint.replace(name=str(ref))) for ref in refs}
        errors.attempt(plan_recipe, recipe, stand_ins)
