"""A merge and its alignments as data, for symfuse.json and the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from symfuse import __version__
from symfuse.alignment import Alignment
from symfuse.errors import SymfuseError
from symfuse.evaluation import Distance, distance
from symfuse.evaluation.distance import finite
from symfuse.io import Checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.merging import Merged
from symfuse.merging.engine import effective_weights
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes.events import Note
from symfuse.recipes.plan import why_template
from symfuse.recipes.stage import Stage
from symfuse.rewriting.vocabulary import compare
from symfuse.runs import FILE, SUFFIX, Record, lineage, movement, record_of


def merge_record(stage: Stage, merged: Checkpoint, warned: Sequence[str] = ()) -> Record:
    """The record of a merge, with the alignments of its models: those of the recipe, and those that models came
    with."""
    records = {number: record_of(model) for number, model in enumerate(stage.models.values(), 1)}
    aligned = {number: one for number, one in records.items() if one is not None and one.kind == "alignment"}
    files = {f"alignment-{number}{SUFFIX}": one.alignments[FILE] for number, one in aligned.items()}
    run = partial(_merge_run, stage, merged, tuple(aligned.values()), tuple(warned))
    frame = next((one.frame for one in records.values() if one is not None and one.frame), ())
    return Record("merge", run, tuple(stage.opened.values()), files, frame)


def _merge_run(stage: Stage, merged: Checkpoint, aligned: Sequence[Record], warned: Sequence[str]) -> dict[str, Any]:
    recipe, alignments = stage.recipe, [record.run for record in aligned]
    first = alignments[0] if alignments else None
    return {
        "kind": "merge",
        "symfuse": __version__,
        "method": recipe.merge_method,
        "paper": lookup(recipe.merge_method).paper,
        "recipe": recipe.text,
        "merged": _title(stage, merged),
        "models": [str(ref) for ref in stage.models],
        "inputs": lineage(stage.opened.values()),
        "weights": _weights(merged),
        "base": str(list(stage.models)[stage.template]),
        "why_base": why_template(recipe),
        "tokenizer": stage.tokenizer,
        "heads": recipe.heads,
        "seed": recipe.seed,
        "anchor": None if first is None else first["anchor"]["name"],
        "align": None if first is None else _resolved(first),
        **({} if stage.learned is None else {"learned": stage.learned.to_json()}),
        "alignments": alignments,
        "notes": [note.text for note in stage.notes],
        "warnings": list(warned),
    }


def _resolved(alignment: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved `align` block of the recipe, the same for all models."""
    options = alignment["options"]
    reasons = {key: options[key] for key in ("auto", "not_rotated") if key in options}
    return {"axes": options["axes"], "frame": alignment["frame"], **reasons}


def _title(stage: Stage, merged: Checkpoint) -> str:
    """The merge in a line, with all models that contribute tensors, in the order of the recipe."""
    assert isinstance(merged.tensors, Merged)
    outputs = merged.tensors.outputs.values()
    terms = {term.checkpoint.name for output in outputs for term in output.terms}
    names = [checkpoint.name for checkpoint in stage.models.values() if checkpoint.name in terms]
    method = stage.recipe.merge_method
    if method == "linear" and _weights(merged) is not None:
        first = next(output for output in outputs if output.method is not None)
        pairs = list(zip([term.checkpoint.name for term in first.terms], effective_weights(first) or (), strict=True))
        return " + ".join(f"{weight:g}·{name}" for name, weight in sorted(pairs, key=lambda pair: names.index(pair[0])))
    base = next((f"; base {output.base.checkpoint.name}" for output in outputs if output.base is not None), "")
    return f"{method}({', '.join(names)}{base})"


def _weights(merged: Checkpoint) -> dict[str, float] | None:
    """The effective weight of each model; None if the method has none, or they differ between tensors."""
    outputs = merged.tensors.outputs.values() if isinstance(merged.tensors, Merged) else ()
    pairs_of = {
        tuple(zip([term.checkpoint.name for term in output.terms], weights, strict=True))
        for output in outputs
        if (weights := effective_weights(output)) is not None
    }
    if len(pairs_of) != 1:
        return None
    pairs = pairs_of.pop()
    return {name: sum(weight for other, weight in pairs if other == name) for name, _ in pairs}


def alignment_run(
    source: Checkpoint,
    anchor: Checkpoint,
    alignment: Alignment,
    proof: Mapping[str, Any] | None = None,
    moved: Checkpoint | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The effect of an alignment (`movement`), the distances before and after, and `more`. moved: the aligned anchor,
    if it is aligned too."""
    start, end = alignment.in_frame(source), alignment.in_frame(anchor)  # distances are between models in one frame
    pairs = ((start, end), (alignment(source), moved or end))
    before, after = (distance(*(Model.of(checkpoint) for checkpoint in pair)) for pair in pairs)
    return {**movement(source, alignment, proof), "distance": distances(before, after), **more}


def alignment_record(source: Checkpoint, anchor: Checkpoint, alignment: Alignment, *about: Any, **more: Any) -> Record:
    """The record of a source that was aligned to an anchor. about, more: further arguments of `alignment_run`."""
    make = partial(alignment_run, source, anchor, alignment, *about, **more)
    return Record("alignment", make, (source,), {FILE: alignment}, alignment.frame)


def distances(before: Distance, after: Distance) -> dict[str, Any]:
    """Euclidean distances and cosines before and after an alignment. By axis, layer, both, and tensor: squared
    distances, which add up; the share that is left; and the part's shares of the whole before and after."""

    def rows(*keys: str) -> list[dict[str, Any]]:
        out, shares = [], [one.shares(*keys) for one in (before, after)]
        for (key, a), b in zip(before.by(*keys).items(), after.by(*keys).values(), strict=True):
            values = key if isinstance(key, tuple) else (key,)
            part = {
                "before": a.squared,
                "after": b.squared,
                "share": b.squared / a.squared if a.squared else 1.0,
                "of_whole": [finite(share[key]) for share in shares],
                "cosine": [finite(a.cosine), finite(b.cosine)],
            }
            out.append(dict(zip(keys, values, strict=True)) | part)
        return out

    return {
        "before": before.euclidean,
        "after": after.euclidean,
        "left": after.euclidean / before.euclidean if before.euclidean else 1.0,
        "relative": [before.relative, after.relative],
        "cosine": [finite(before.cosine), finite(after.cosine)],
        "by_axis": rows("axis"),
        "by_layer": rows("layer"),
        "by_layer_and_axis": rows("layer", "axis"),
        "by_tensor": rows("tensor"),
    }


def with_tokenizer_notes(stage: Stage) -> Stage:
    """The stage with notes on tokenizers that differ, if the recipe does not reconcile them: those of the base are
    used, and row i of an embedding is merged with row i, whatever its token."""
    if stage.recipe.tokenizer is not None:
        return stage
    checkpoints = list(stage.models.values())
    base = checkpoints[stage.template]
    used, ours, notes = base.name, _tokenizer_files(base), list[str]()
    for checkpoint in checkpoints:
        theirs = _tokenizer_files(checkpoint)
        if differ := sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]):
            notes.append(f"{', '.join(differ)} of {checkpoint.name} and {used} differ; those of {used} are used")
            with suppress(SymfuseError):  # a merge needs no tokenizer that can be read
                differences = compare([base, checkpoint])
                notes += [str(d) for d in differences if d and not d.warning]  # else the merge warns of it
    return replace(stage, notes=(*stage.notes, *map(Note, notes)))


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: data for name, data in checkpoint.companions().items() if is_of_tokenizer(name)}
