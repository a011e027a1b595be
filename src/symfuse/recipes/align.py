"""The stage of a recipe in which its models are moved onto one of them, as its `align` block says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import OptionError, UnknownArchitectureError
from symfuse.evaluation import Task, make_task, read_records
from symfuse.executors import Executor, one_torch_thread
from symfuse.io import Checkpoint
from symfuse.matching import (
    Step,
    choose_groups,
    choose_layers,
    match_by_activations,
    match_models,
    nearest_to_mean,
    select,
    usual,
)
from symfuse.matching.axes import NO_GROUP, limited
from symfuse.matching.descent import Watch
from symfuse.matching.learned import Learning, match_learned
from symfuse.messages import some
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes import Align, ModelRef, Recipe
from symfuse.recipes.record import alignment_record
from symfuse.recipes.stage import Stage
from symfuse.rewriting import canonical
from symfuse.runs import recorded
from symfuse.spec import Spec


def anchor_of(stage: Stage) -> ModelRef | None:
    """The model that the others are moved onto: as the recipe says; else the base of task vectors; else the one nearest
    to the mean. None if nothing is to be aligned."""
    align = stage.recipe.align
    if align is None:
        return None
    refs = list(stage.models)
    undeclared = [c.name for c in stage.models.values() if not Model.of(c, undeclared=True).declared]
    if undeclared:
        raise UnknownArchitectureError(
            f"align: symfuse has no declaration of {some(undeclared)}, so it does not know what may be moved; leave "
            "align out to merge by names and shapes, or add a declaration (CONTRIBUTING.md)"
        )
    spec = Model.of(next(iter(stage.models.values()))).spec
    selected_of(stage.recipe, spec)  # whether they can be matched
    layers_of(stage.recipe, spec)
    if isinstance(align.anchor, ModelRef):
        return align.anchor
    if isinstance(align.anchor, int):
        listed = [given.model for given in stage.recipe.models] or refs
        if not 1 <= align.anchor <= len(listed):
            raise OptionError(f"align.anchor is {align.anchor}; there are models 1 to {len(listed)}")
        return listed[align.anchor - 1]
    if lookup(stage.recipe.merge_method).base == "required" and stage.recipe.base_model is not None:
        return stage.recipe.base_model
    return refs[nearest_to_mean([Model.of(checkpoint) for checkpoint in stage.models.values()])]


def axes_of(stage: Stage) -> tuple[str | tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """The words for the axes that the recipe's `align` block asks for, and the frame: the same for all models; and why,
    where it does not say. OptionError, with the place in it, if they cannot be matched as it says."""
    align = stage.recipe.align
    assert align is not None
    models = [Model.of(checkpoint) for checkpoint in stage.models.values()]
    groups = groups_of(stage.recipe, models[0].spec)
    try:
        axes, frame, why = usual(models, align.axes, groups)
        spec = canonical(models[0], frame).spec
        for axis, name in groups.items():
            if (declared := spec.axes[axis].group) is not None and name != NO_GROUP:
                limited(axis, declared, spec.axes[axis].size, name)
    except OptionError as error:
        stage.recipe.refuse(error, "align.axes", "align.groups")
    return axes, frame, why


@dataclass(frozen=True)
class Matching:
    """How the models of a stage are matched with its anchor, the same for all. axes, frame, why: of `axes_of`. data:
    what they are run on; None: the weights are compared. validation: of learning."""

    axes: str | tuple[str, ...]
    frame: tuple[str, ...]
    why: Mapping[str, Any]
    data: Task | None
    validation: Task | None


def matching_of(stage: Stage, anchor: ModelRef) -> Matching:
    """As the recipe's `align` block asks for. OptionError as of `axes_of`, and what `data_of` raises."""
    align = stage.recipe.align
    assert align is not None
    axes, frame, why = axes_of(stage)
    return Matching(axes, frame, why, *data_of(align, stage.models[anchor]))


def selected_of(recipe: Recipe, spec: Spec) -> tuple[str, ...]:
    """The axes that are to be aligned; OptionError, with the place in the recipe, if there are none."""
    align = recipe.align
    assert align is not None
    groups = groups_of(recipe, spec)
    try:
        return select(spec, align.axes, groups)[1]
    except OptionError as error:
        recipe.refuse(error, "align.axes", "align.groups")


def layers_of(recipe: Recipe, spec: Spec) -> list[int]:
    """The layers that are to be aligned; OptionError, with the place in the recipe, if they are not there."""
    try:
        return sorted(choose_layers(None if recipe.align is None else recipe.align.layers, spec.depth))
    except OptionError as error:
        recipe.refuse(error, "align.layers")


def groups_of(recipe: Recipe, spec: Spec) -> dict[str, str]:
    """The groups that the recipe names, by axis; OptionError, with the place in it, for an axis that is not there."""
    try:
        return choose_groups({} if recipe.align is None else recipe.align.groups, spec)
    except OptionError as error:
        recipe.refuse(error, "align.groups")


def match_model(
    stage: Stage,
    ref: ModelRef,
    anchor: ModelRef,
    matching: Matching,
    *,
    threads: int | None = None,
    memory: int | None = None,
    device: str = CPU,
    executor: Executor | None = None,
    progress: Callable[[Step, int], None] | None = None,
    watch: Watch | None = None,
) -> Alignment:
    """The alignment of one model onto the anchor. matching: that of the stage (`matching_of`). device: where it is
    found. executor: who finds it, from weights."""
    align = stage.recipe.align
    assert align is not None
    source, to = (Model.of(stage.models[one]) for one in (ref, anchor))
    same: dict[str, Any] = {"axes": matching.axes, "frame": matching.frame, "layers": align.layers}
    same |= {"device": device, "groups": align.groups} | ({} if align.scaling is None else {"scaling": align.scaling})
    own: dict[str, Any] = {"one_pass": align.one_pass, "biases": align.biases, "threads": threads, "memory": memory}
    own |= {"progress": progress, "watch": watch}
    if matching.data is None:
        found = match_models(source, to, **same, **own, executor=executor)
    else:
        with one_torch_thread() if threads == 1 else nullcontext():
            if align.source == "learned":
                given = {"seed": stage.recipe.seed, "device": device, **settings_of(align)}
                learning = Learning(matching.data, matching.validation, **given)
                found = match_learned(source, to, learning, **same, **own)
            else:
                found = match_by_activations(source, to, matching.data.batches, **same)
    options = {**found.provenance["options"], **matching.why}
    return replace(found, provenance={**found.provenance, "options": options})


def data_of(align: Align, model: Checkpoint) -> tuple[Task | None, Task | None]:
    """What the models are run on, and what learning is validated on, as a model reads it. DataError, OptionError or
    CheckpointError if it cannot."""
    options = {} if align.limit is None else {"limit": align.limit}
    found = [
        None if file is None else make_task(None, read_records(file), model, **options)
        for file in (align.data, align.validation)
    ]
    if align.source == "learned" and found[0] is not None:
        Learning(found[0], found[1], **settings_of(align))  # whether they fit
    return found[0], found[1]


def settings_of(align: Align) -> dict[str, Any]:
    """What is said of learning."""
    given = {"steps": align.steps, "rate": align.rate, "distil": align.distil}
    return {key: value for key, value in given.items() if value is not None}


def aligned(stage: Stage, anchor: ModelRef, alignments: Mapping[ModelRef, Alignment], *, device: str = CPU) -> Stage:
    """The stage with its models moved, on the device: what is moved is read to there."""
    models = dict(stage.models)
    for ref, alignment in alignments.items():
        moved = alignment(models[ref].on(device)).replace(name=models[ref].name)
        models[ref] = recorded(moved, alignment_record(stage.models[ref], stage.models[anchor], alignment))
        if alignment.frame:  # the same for all
            models[anchor] = alignment.in_frame(stage.models[anchor].on(device))
    return replace(stage, models=models, anchor=anchor, alignments=dict(alignments))


def align_all(
    stage: Stage, *, threads: int | None = None, device: str = CPU, executor: Executor | None = None
) -> Stage:
    """All models moved onto the anchor, if the recipe says so."""
    anchor = anchor_of(stage)
    if anchor is None:
        return stage
    matching, others = matching_of(stage, anchor), [ref for ref in stage.models if ref != anchor]
    how: dict[str, Any] = {"threads": threads, "device": device, "executor": executor}
    moved = {ref: match_model(stage, ref, anchor, matching, **how) for ref in others}
    return aligned(stage, anchor, moved, device=device)
