"""The stage of a recipe that aligns its models to one of them, by its `align` block."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import UnknownArchitectureError
from symfuse.evaluation import Batch, Task, make_task, read_records
from symfuse.executors import Executor, one_torch_thread
from symfuse.io import Checkpoint
from symfuse.matching import (
    choose_groups,
    choose_layers,
    match_by_activations,
    match_models,
    nearest_to_mean,
    select,
    usual,
)
from symfuse.matching.axes import NO_GROUP, limited
from symfuse.matching.learned import Learning, match_learned
from symfuse.messages import some
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes.events import AlignmentDone, Anchored, Follow, Proved, Step, Working, ignore
from symfuse.recipes.record import alignment_record
from symfuse.recipes.schema import Align, ModelRef, Recipe
from symfuse.recipes.stage import Stage, require_one_frame
from symfuse.rewriting import canonical
from symfuse.runs import framed, is_matched, recorded
from symfuse.spec import Spec
from symfuse.verification import Proof, Verification, prove, verify


@dataclass(frozen=True)
class How:
    """How models are aligned; none of it changes the result. threads, memory, device, executor: see `match_models`.
    prove: run each model before and after. follow: called with each event."""

    threads: int | None = None
    memory: int | None = None
    device: str = CPU
    executor: Executor | None = None
    prove: bool = False
    follow: Follow = ignore

    def watch(self) -> dict[str, Any]:
        """The options of matching that report its progress."""
        return {
            "progress": lambda _step, total: self.follow(Step(total)),
            "watch": lambda start, value: self.follow(Step(text=f"sweeps from {start}: squared distance {value:.5g}")),
        }


def anchor_of(stage: Stage) -> ModelRef | None:
    """The model that the others are aligned to: by the recipe; else the base of task vectors; else the model nearest to
    the mean. None if nothing is to be aligned."""
    align = stage.recipe.align
    if align is None:
        return None
    undeclared = [c.name for c in stage.models.values() if not Model.of(c, undeclared=True).declared]
    if undeclared:
        raise UnknownArchitectureError(
            f"align: symfuse has no declaration of {some(undeclared)}, so it does not know their symmetries; leave "
            "align out to merge by names and shapes, or add a declaration (CONTRIBUTING.md)"
        )
    spec = Model.of(next(iter(stage.models.values()))).spec
    layers_of(stage.recipe, spec)  # raises if they do not exist
    with stage.recipe.blaming("align.axes", "align.groups"):
        select(spec, align.axes, groups_of(stage.recipe, spec))
    if align.anchor is not None:
        return align.anchor
    if lookup(stage.recipe.merge_method).base == "required" and stage.recipe.base_model is not None:
        return stage.recipe.base_model
    nearest = nearest_to_mean([Model.of(checkpoint) for checkpoint in stage.models.values()])
    return list(stage.models)[nearest]


def axes_of(stage: Stage) -> tuple[str | tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """The axes of the recipe's `align` block and the frame, the same for all models; and the reasons, where the block
    leaves them open. OptionError, with the place in the recipe, if they cannot be matched so."""
    align = stage.recipe.align
    assert align is not None
    models = [Model.of(checkpoint) for checkpoint in stage.models.values()]
    groups = groups_of(stage.recipe, models[0].spec)
    with stage.recipe.blaming("align.axes", "align.groups"):
        axes, frame, why = usual(models, align.axes, groups)
        spec = canonical(models[0], frame).spec
        for axis, name in groups.items():
            if (declared := spec.axes[axis].group) is not None and name != NO_GROUP:
                limited(axis, declared, spec.axes[axis].size, name)
    return axes, frame, why


@dataclass(frozen=True)
class Matching:
    """How the models of a stage are matched with its anchor, the same for all. axes, frame, why: see `axes_of`. data:
    to run the models on, or None to compare weights. validation: for learning."""

    axes: str | tuple[str, ...]
    frame: tuple[str, ...]
    why: Mapping[str, Any]
    data: Task | None
    validation: Task | None


def matching_of(stage: Stage, anchor: ModelRef) -> Matching:
    """The matching of the recipe's `align` block. Raises what `axes_of` and `data_of` raise."""
    align = stage.recipe.align
    assert align is not None
    axes, frame, why = axes_of(stage)
    return Matching(axes, frame, why, *data_of(align, stage.models[anchor]))


def layers_of(recipe: Recipe, spec: Spec) -> list[int]:
    """The layers to align; OptionError, with the place in the recipe, if they do not exist."""
    with recipe.blaming("align.layers"):
        layers = choose_layers(None if recipe.align is None else recipe.align.layers, spec.depth)
    return sorted(layers)


def groups_of(recipe: Recipe, spec: Spec) -> dict[str, str]:
    """The groups of the recipe, by axis; OptionError, with the place in the recipe, for an axis that does not exist."""
    with recipe.blaming("align.groups"):
        groups = choose_groups({} if recipe.align is None else recipe.align.groups, spec)
    return dict(groups)


def data_of(align: Align, model: Checkpoint) -> tuple[Task | None, Task | None]:
    """The data to run models on, and those to validate learning on, as this model reads them. DataError, OptionError or
    CheckpointError if it cannot read them."""
    options = {} if align.limit is None else {"limit": align.limit}
    data, validation = (
        None if file is None else make_task(None, read_records(file), model, **options)
        for file in (align.data, align.validation)
    )
    if align.source == "learned" and data is not None:
        Learning(data, validation, **settings_of(align))  # raises if they do not fit
    return data, validation


def settings_of(align: Align) -> dict[str, Any]:
    """The settings of learning that the recipe sets."""
    settings = {"steps": align.steps, "rate": align.rate, "distil": align.distil}
    return {key: value for key, value in settings.items() if value is not None}


def match_pair(
    source: Model,
    anchor: Model,
    *,
    batches: Iterable[Batch] | None = None,
    learning: Learning | None = None,
    **options: Any,
) -> Alignment:
    """The alignment of `source` to `anchor`: by weights; with `batches` by activations; with `learning` learned from
    that start. options: of `match_models`, `match_by_activations` or `match_learned`."""
    if learning is not None:
        return match_learned(source, anchor, learning, batches=batches, **options)
    if batches is not None:
        return match_by_activations(source, anchor, batches, **options)
    return match_models(source, anchor, **options)


def with_reasons(alignment: Alignment, why: Mapping[str, Any]) -> Alignment:
    """The alignment, with the reasons for its axes and frame (`usual`) in its provenance."""
    if not why:
        return alignment
    options = {**alignment.provenance["options"], **why}
    return replace(alignment, provenance={**alignment.provenance, "options": options})


def align(stage: Stage, how: How) -> Stage:
    """The stage with all models aligned to the anchor, if the recipe asks for that. They must be in one frame, unless
    the alignment has a frame."""
    anchor = anchor_of(stage)
    if anchor is None:
        return stage
    matching = matching_of(stage, anchor)
    if not matching.frame:
        before, stage = len(stage.notes), require_one_frame(stage)
        for note in stage.notes[before:]:
            how.follow(note)
    how.follow(Anchored(str(anchor)))
    models, alignments = dict(stage.models), dict[ModelRef, Alignment]()
    for ref, source in stage.models.items():
        if ref != anchor:
            start = time.perf_counter()
            how.follow(Working("matching"))
            alignments[ref] = _match(stage, ref, anchor, matching, how)
            spent = time.perf_counter() - start
            done = move(source, stage.models[anchor], alignments[ref], how, device=how.device, seconds=spent)
            models[ref] = done.replace(name=source.name)
    first = next(iter(alignments.values()), None)  # the frame is the same for all
    if first is not None and first.frame:
        models[anchor] = framed(models[anchor].on(how.device), first).replace(name=models[anchor].name)
    return replace(stage, models=models, anchor=anchor, alignments=alignments)


def _match(stage: Stage, ref: ModelRef, anchor: ModelRef, matching: Matching, how: How) -> Alignment:
    """The alignment of one model to the anchor."""
    recipe, settings = stage.recipe, stage.recipe.align
    assert settings is not None
    options: dict[str, Any] = {"axes": matching.axes, "frame": matching.frame, "layers": settings.layers}
    options |= {"device": how.device, "groups": settings.groups}
    options |= {} if settings.scaling is None else {"scaling": settings.scaling}
    if settings.source != "activations":
        options |= {"one_pass": settings.one_pass, "biases": settings.biases, "threads": how.threads}
        options |= {"memory": how.memory, **how.watch()}
    if settings.source == "weights":
        options["executor"] = how.executor
    elif settings.source == "activations" and matching.data is not None:
        options["batches"] = matching.data.batches
    elif matching.data is not None:
        own = {"seed": recipe.seed, "device": how.device, **settings_of(settings)}
        options["learning"] = Learning(matching.data, matching.validation, **own)
    with one_torch_thread() if how.threads == 1 and matching.data is not None else nullcontext():
        alignment = match_pair(*(Model.of(stage.models[one]) for one in (ref, anchor)), **options)
    return with_reasons(alignment, matching.why)


def move(
    source: Checkpoint,
    anchor: Checkpoint,
    alignment: Alignment,
    how: How,
    *,
    other: Checkpoint | None = None,
    device: str | None = None,
    seconds: float,
) -> Checkpoint:
    """The aligned source with its record, proved if `how` asks for that. other: the anchor, if it is aligned too.
    device: to read tensors to. seconds: spent on matching, for the record. VerificationError if the proof fails."""
    proof = None
    if how.prove:
        how.follow(Working("proving"))
        proof = _proof(source, alignment, how)
    moved = alignment(source if device is None else source.on(device))
    if not is_matched(alignment):  # nothing to record
        return moved
    record = alignment_record(source, anchor, alignment, proof, other, seconds=seconds)
    how.follow(AlignmentDone(record))
    return recorded(moved, record)


def _proof(source: Checkpoint, alignment: Alignment, how: How) -> dict[str, Any]:
    """The comparison of outputs before and after, as data; of an inexact alignment, how much they differ."""
    result: Proof | Verification
    if alignment.variants:
        wide = source.to(torch.float64)
        result = verify(wide, alignment(wide), alignment)
    else:
        result = prove(source, alignment, memory=how.memory)
    how.follow(Proved(result))
    return result.to_dict()
