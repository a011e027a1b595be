"""Give models the same tensors before a merge: names, ties, biases, counters, and tensors that only some of them
have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from symfuse.architectures.base import is_declared
from symfuse.architectures.binding import resolve
from symfuse.architectures.names import HEAD
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.live import COUNTER, counts_batches
from symfuse.messages import some
from symfuse.model.config import of_text, rope_theta, text_config, with_fields
from symfuse.model.model import under_file_names
from symfuse.model.undeclared import PREDICTORS, declared_depth, disagreeing_frequencies, is_derived, predicts_more
from symfuse.rewriting.names import (
    Inside,
    declared_names,
    has_inside,
    match_names,
    out_of_wrapper,
    taken_as,
    taken_out,
    towers,
)
from symfuse.rewriting.rewritten import drop, with_values, zero_biases
from symfuse.rewriting.ties import match_ties


@dataclass(frozen=True)
class Reconcile:
    """What to do if models do not have the same tensors. foreign: tensors that only some models have are refused,
    dropped, or kept unchanged. missing_bias: biases that only some models have are refused, or zero in the others.
    force_config: models of another type are treated like the base's, by names and shapes; configs may differ in what
    they compute (`require_same_shape`); gains that are all 1 in some models are accepted."""

    foreign: Literal["refuse", "drop", "keep"] = "refuse"
    missing_bias: Literal["refuse", "zero"] = "refuse"
    force_config: bool = False


@dataclass(frozen=True)
class Harmonised:
    """checkpoints: in the order of the inputs, with the base's names. notes: what was done. kept: tensors that are
    added to the merge unchanged, by their name in it: the checkpoint and the name there. config: the fields that the
    merge's config.json needs for kept tensors. inside: the multimodal model of which the merged tensors are a part."""

    checkpoints: list[Checkpoint]
    notes: list[str] = field(default_factory=list)
    kept: dict[str, tuple[Checkpoint, str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    inside: Inside | None = None


def harmonise(checkpoints: Sequence[Checkpoint], *, base: int = 0, options: Reconcile = Reconcile()) -> Harmonised:
    """Checkpoints with the names of the base, equal ties and the same tensors, as far as `options` allow.

    Families need no declaration. Raises IncompatibleError for models of different types, and for differing biases and
    other tensors that the options do not cover; SpecError for stored aliases that differ.
    """
    saved = [under_file_names(checkpoint) for checkpoint in checkpoints]
    out = Harmonised([checkpoint for checkpoint, _ in saved])
    out.notes.extend(f"{checkpoint.name}: {note}" for checkpoint, notes in saved for note in notes)
    out = replace(out, inside=_take_out(out, base))
    _match_names(out, base, options.force_config)
    out.checkpoints[:], notes = match_ties(out.checkpoints)
    out.notes.extend(notes)
    _match_biases(out, options)
    _match_counters(out)
    out.checkpoints[:] = [_as_predicting(c, out.notes) for c in out.checkpoints]
    _match_tensors(out, base, options)
    return out


def _take_out(out: Harmonised, base: int) -> Inside | None:
    """If the base is multimodal and others are text models of the type inside it, its language model is merged alone;
    its other tensors are kept."""
    whole = out.checkpoints[base]
    texts = [checkpoint for checkpoint in out.checkpoints if has_inside(whole.config, checkpoint.config)]
    if not texts:
        return None
    out.checkpoints[base], inside = taken_out(whole, texts[0])
    names = towers(whole)
    out.kept.update({name: (whole, name) for name in names})
    out.notes.append(
        f"{len(names)} tensors of other modalities, which {some(text.name for text in texts)} has not, are those of "
        f"{whole.name}"
    )
    return inside


def _match_names(out: Harmonised, base: int, any_type: bool) -> None:
    for i, checkpoint in enumerate(out.checkpoints):
        if not is_declared(checkpoint.config):
            buffers = [name for name in checkpoint if is_derived(name, checkpoint.info(name))]
            note = disagreeing_frequencies(checkpoint, buffers, rope_theta(checkpoint.config))
            out.notes.extend([f"{checkpoint.name}: {note}"] if note else [])
            out.checkpoints[i] = drop(checkpoint, buffers)
    target = out.checkpoints[base]
    for i, checkpoint in enumerate(out.checkpoints):
        if i == base:
            continue
        ours, theirs = target.config, checkpoint.config
        unwrap = has_inside(theirs, ours)
        if ours.get("model_type") != theirs.get("model_type") and not unwrap:
            if not any_type:
                raise IncompatibleError(
                    f"{target.name} and {checkpoint.name}: one is a {ours.get('model_type')}, the other a "
                    f"{theirs.get('model_type')}; only models of one family have the same tensors. Where all names and "
                    "shapes agree, --force-config (`force_config: true` in a recipe) merges them by these"
                )
            out.checkpoints[i], notes = taken_as(checkpoint, target)
            out.notes.extend(notes)
            continue
        if is_declared(target.config) and is_declared(checkpoint.config) and not unwrap:
            # A declaration knows its own prefixes, old names and buffers.
            out.notes.extend(declared_names(checkpoint, target))
            continue
        checkpoint, note = match_names(checkpoint, target)
        out.notes.extend([note] if note else [])
        if unwrap:
            out.notes.append(f"{checkpoint.name}: {len(towers(checkpoint))} tensors of other modalities are left out")
            checkpoint = out_of_wrapper(checkpoint, target)
        out.checkpoints[i] = checkpoint


def _match_biases(out: Harmonised, options: Reconcile) -> None:
    files = [_base_names(checkpoint) for checkpoint in out.checkpoints]
    every: dict[str, TensorInfo] = {}
    owners: dict[str, str] = {}
    for checkpoint, names in zip(out.checkpoints, files, strict=True):
        biases = {n: file for n, file in names.items() if n.endswith(".bias") and file in checkpoint}
        every |= {name: checkpoint.info(file) for name, file in biases.items()}
        owners |= dict.fromkeys(biases, checkpoint.name)
    for i, (checkpoint, names) in enumerate(zip(out.checkpoints, files, strict=True)):
        weights = {name: name.removesuffix("bias") + "weight" for name in every if name not in names}
        weights = {name: names[weight] for name, weight in weights.items() if weight in names}
        absent = {weight.removesuffix("weight") + "bias": every[name] for name, weight in weights.items()}
        if not absent:
            continue
        if options.missing_bias == "refuse":
            owner = owners[next(iter(weights))]
            raise IncompatibleError(
                f"{owner} has {len(absent)} biases that {checkpoint.name} has not: {some(absent, 3)}; take them as "
                "zero (--missing-bias zero, or `missing_bias: zero` in a recipe), or make the models alike"
            )
        says = {
            key: True
            for c in out.checkpoints
            for key, value in c.config.items()
            if "bias" in key and value is True and not checkpoint.config.get(key)
        }
        out.checkpoints[i] = zero_biases(checkpoint, absent, says)
        out.notes.append(f"{checkpoint.name}: {len(absent)} biases that it has not are zero: {some(absent, 3)}")


def _base_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The base model's tensors, by canonical name → name in the file. All tensors of a declaration are included, also
    missing ones: a missing tensor is reported when the model is read."""
    if not is_declared(checkpoint.config):
        return {name: name for name in checkpoint}
    spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
    return {name: spec.file_name(name) for name in spec.tensors if name not in spec.heads}


def _match_counters(out: Harmonised) -> None:
    """Counters of batch normalisation: the maximum over the models, in all of them. The running statistics are averaged
    like weights."""
    first = out.checkpoints[0]
    names = [name for name in first if counts_batches(name) and all(name in c for c in out.checkpoints)]
    if not names:
        return
    most = {name: torch.stack([c[name].reshape(()) for c in out.checkpoints]).max() for name in names}
    out.checkpoints[:] = [with_values(checkpoint, most) for checkpoint in out.checkpoints]
    out.notes.append(
        f"batch normalisation: running means and variances are averaged like weights, {len(names)} counters "
        f"({COUNTER}) are the largest of all; the statistics fit better once taken anew from data "
        "(symfuse.renew_statistics)"
    )


def _match_tensors(out: Harmonised, base: int, options: Reconcile) -> None:
    """Handle tensors that not all models have: any tensor in families without a declaration; in others undeclared or
    optional ones."""
    if options.foreign == "refuse" and is_declared(out.checkpoints[base].config):
        return  # Model.of and require_same_shape report the others
    foreign = _foreign(out.checkpoints)
    if not any(foreign):
        return
    by_model = sorted((c.name, sorted(names)) for c, names in zip(out.checkpoints, foreign, strict=True) if names)
    words = "; ".join(f"{name}: {some(names, 8)}" for name, names in by_model)
    if options.foreign == "refuse":
        raise IncompatibleError(
            f"tensors that not all models have ({words}). Say what becomes of them: --foreign drop, or keep (as they "
            "are); `foreign: drop` in a recipe"
        )
    if options.foreign == "keep":
        for i in sorted(range(len(foreign)), key=lambda i: i != base):
            for name in foreign[i]:
                out.kept.setdefault(name, (out.checkpoints[i], name))
        out.config.update(_predicting(out.checkpoints[base].config, out.kept))
        if _has_head(foreign[base]) and "architectures" in out.checkpoints[base].config:
            out.config["architectures"] = out.checkpoints[base].config["architectures"]
    done = "dropped" if options.foreign == "drop" else "kept as they are"
    out.notes.append(f"tensors that not all models have are {done} ({words})")
    less = [_less(c, names) for c, names in zip(out.checkpoints, foreign, strict=True)]
    out.checkpoints[:] = [_as_predicting(c, out.notes) for c in less]


def _as_predicting(checkpoint: Checkpoint, notes: list[str]) -> Checkpoint:
    """The checkpoint; if it has no layers that predict further tokens, its config is changed accordingly."""
    text = text_config(checkpoint.config)
    fields = [key for key in PREDICTORS if text.get(key)]
    depth = declared_depth(checkpoint.config)
    if not fields or any(predicts_more(name, depth) for name in checkpoint):
        return checkpoint
    notes.append(
        f"{checkpoint.name}: {some(fields)} of config.json is taken as 0, as there are no tensors of such layers"
    )
    none = of_text(checkpoint.config, dict.fromkeys(fields, 0))
    return checkpoint.replace(config=with_fields(checkpoint.config, none))


def _predicting(config: Mapping[str, Any], kept: Mapping[str, tuple[Checkpoint, str]]) -> dict[str, Any]:
    """The fields of config.json for kept layers that predict further tokens, from the config of their model."""
    fields: dict[str, Any] = {}
    for owner, name in kept.values():
        if predicts_more(name, declared_depth(owner.config)):
            text = text_config(owner.config)
            fields |= {key: text[key] for key in PREDICTORS if text.get(key)}
    return of_text(config, fields)


def _has_head(names: Sequence[str]) -> bool:
    return any(HEAD.fullmatch(name) for name in names)


def _less(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """The checkpoint without these tensors; without a head its class is the base model's."""
    config = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    return drop(checkpoint, names).replace(config=config if _has_head(names) else None)


def _foreign(checkpoints: Sequence[Checkpoint]) -> list[list[str]]:
    """For each checkpoint, the tensors that not all have. Where depths differ, a tensor of a layer is compared with
    those of any layer."""
    depths = {_depth(c) for c in checkpoints}
    keys = []
    for c in checkpoints:
        names = _comparable(c)
        keys.append({n: k if len(depths) == 1 or k is None else re.sub(r"\d+", "#", k) for n, k in names.items()})
    common = set.intersection(*(set(by_name.values()) for by_name in keys)) | {_HEAD}
    return [[name for name, key in by_name.items() if key is None or key not in common] for by_name in keys]


def _depth(checkpoint: Checkpoint) -> int:
    """The number of layers by config.json, or by the largest number in a name."""
    in_config = declared_depth(checkpoint.config)
    numbers = (int(n) for name in checkpoint for n in re.findall(r"\.(\d+)\.", name))
    return max(numbers, default=0) if in_config is None else in_config


_HEAD = "the task head"


def _comparable(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Name in the file → the name by which models are compared; None if the family does not declare it."""
    if not is_declared(checkpoint.config):
        return {name: name for name in checkpoint}
    spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
    out: dict[str, str | None] = {name: None for name in checkpoint if name not in spec.buffers}
    for file, name in spec.files.items():
        if file in out:
            out[file] = _HEAD if name in spec.heads or name in spec.tied else name
    return out
