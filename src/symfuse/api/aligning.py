"""The verbs that move a model by its symmetries: match, align, widen."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from symfuse.alignment import Alignment
from symfuse.api.sources import model_of, options_set
from symfuse.arguments import checked
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.evaluation import Batch, Task
from symfuse.executors import Executor
from symfuse.io import Checkpoint
from symfuse.io.sources import Source
from symfuse.matching import match_universe, nearest_to_mean, usual
from symfuse.matching.coordinate import Progress
from symfuse.matching.descent import Watch
from symfuse.matching.learned import Learning, learn_universe
from symfuse.matching.learned import learn as learn_all
from symfuse.model import Model
from symfuse.recipes import events
from symfuse.recipes.align import How, match_pair, move, with_reasons
from symfuse.recipes.events import Follow, ignore
from symfuse.runs import framed
from symfuse.widths import match_widths

Build = Callable[[Checkpoint], torch.nn.Module]


@checked
def match(
    source: Source, to: Source, *, axes: str | Sequence[str] = "auto",
    layers: str | int | Sequence[int] | None = None, scaling: bool | None = None,
    groups: Mapping[str, str] | None = None, variants: Sequence[str] = (), frame: Sequence[str] | None = None,
    data: Task | Iterable[Batch] | None = None, learn: Task | Learning | None = None, device: str = CPU,
    one_pass: bool | None = None, biases: bool | None = None, starts: int | None = None, seed: int | None = None,
    threads: int | None = None, memory: int | None = None, executor: Executor | None = None,
    progress: Progress | None = None, watch: Watch | None = None, kind: str | None = None,
    residual: str | None = None, without: Collection[int] | None = None, build: Build | None = None,
) -> Alignment:  # fmt: skip
    """The alignment that moves `source` towards the anchor `to`. It is matched from the weights, or from activations if
    `data` are given. With `learn` it is then trained on a loss between the two models.

    axes: what to match: "attention" (per-head rotations of query/key and value/output; Zhang et al. 2025, Theorem
    4.1, Algorithm 1), "ffn" (neurons, exact assignment), "heads", "residual", "pooler", single axes, or "all";
    "auto": attention and ffn of models in one basis (a fine-tune), else all. layers: those that are matched, such as
    "0-4" or "last:3". scaling: also rescale (Eq. 11–12), by default only from the weights. groups: by axis the name of
    the group to match with, {"qk": "orthogonal", "residual": "permutation"}, or "none". It must be a subgroup of what
    is declared, and its axis is matched even if `axes` does not name it. variants: inexact matchings, after which the
    model computes something else: "heads-ignored", "separate-qk", "separate-residual", or "transport" (optimal
    transport, which averages units; docs/matching.md; of single axes groups={"ffn": "sinkhorn"}). frame: the rewrites
    that both models get first (`symfuse.rewrite`), by default those that the axes need. data: a task, or batches of
    module inputs (both: Verma & Elbayad 2024). learn: a task on whose loss the alignment is trained (Theus et al.
    2025), or a `symfuse.Learning` with further settings. Training starts from what the other options match, and each
    axis gets the largest group that may act on it. device: where all of it is computed, such as "cuda" (docs/gpu.md);
    a Learning has its own device for training.

    Options of matching from the weights. one_pass: rotate, then scale, once. biases: translate key and value biases
    (the default). starts, seed: of the descent over axes that share tensors (2 and 0). threads, memory (bytes),
    executor: resources, on which no bit of the result depends. progress: called with each axis that is done and their
    number. watch: called with the start and the squared distance of each sweep.
    Options of matching from activations. kind: how units are compared ("pearson"). residual: one map of the whole
    stream ("all"), or another policy. without: ids of tokens that are left out. build: makes the module of models that
    `transformers` does not have. OptionError for an option of the other way.

    Apply the result: `alignment(source)`. Where it has a frame (the rotated residual stream of a pre-norm model), the
    anchor to merge with is `alignment.in_frame(to)`.
    """
    batches = data.batches if isinstance(data, Task) else data
    options = _common(axes, layers, scaling, groups, variants, frame, device) | _of_one_way(
        "match",
        batches is not None,
        {"one_pass": one_pass, "biases": biases, "starts": starts, "seed": seed, "threads": threads, "memory": memory,
         "executor": executor, "progress": progress, "watch": watch},
        {"kind": kind, "residual": residual, "without": without, "build": build},
    )  # fmt: skip
    learning = None if learn is None else _learning(learn, device)
    return match_pair(model_of(source), model_of(to), batches=batches, learning=learning, **options)


@checked
def widen(
    source: Source, to: Source, *, axes: str | Sequence[str] = "all",
    layers: str | int | Sequence[int] | None = None, scaling: bool | None = None,
    groups: Mapping[str, str] | None = None, variants: Sequence[str] = (), frame: Sequence[str] | None = None,
    rounds: int = 1, even: bool = False, device: str = CPU, one_pass: bool | None = None, biases: bool | None = None,
    starts: int | None = None, seed: int | None = None, threads: int | None = None, memory: int | None = None,
    executor: Executor | None = None, progress: Progress | None = None, watch: Watch | None = None,
) -> tuple[Checkpoint, Alignment]:  # fmt: skip
    """The source in the widths of a wider anchor `to`, which computes the same, and the alignment of that from the
    weights (docs/widths.md).

    rounds: how often the copies of neurons and heads are chosen anew for the stream that was matched, and all is
    matched again. even: with equal shares of the copies. The other options are those of `match` from the weights.
    """
    options = _common(axes, layers, scaling, groups, variants, frame, device) | options_set(
        {"one_pass": one_pass, "biases": biases, "starts": starts, "seed": seed, "threads": threads, "memory": memory,
         "executor": executor, "progress": progress, "watch": watch}
    )  # fmt: skip
    wide, alignment = match_widths(model_of(source), model_of(to), rounds=rounds, even=even, **options)
    return wide.checkpoint, alignment


@dataclass(frozen=True)
class Aligned:
    """Models in one frame. checkpoints: in the order given, the anchor unmoved, in that frame. alignments: None for the
    anchor."""

    checkpoints: tuple[Checkpoint, ...]
    alignments: tuple[Alignment | None, ...]
    anchor: int | None


@checked
def align(
    sources: Sequence[Source], anchor: int | Literal["universe"] | None = None, *,
    axes: str | Sequence[str] = "auto", layers: str | int | Sequence[int] | None = None, scaling: bool | None = None,
    groups: Mapping[str, str] | None = None, variants: Sequence[str] = (), frame: Sequence[str] | None = None,
    data: Task | Iterable[Batch] | None = None, learn: Task | Learning | None = None,
    start: Sequence[Alignment | None] | None = None, device: str = CPU, prove: bool = False, follow: Follow = ignore,
    rounds: int | None = None, one_pass: bool | None = None, biases: bool | None = None, starts: int | None = None,
    seed: int | None = None, threads: int | None = None, memory: int | None = None, executor: Executor | None = None,
    progress: Progress | None = None, watch: Watch | None = None, kind: str | None = None,
    residual: str | None = None, without: Collection[int] | None = None, build: Build | None = None,
) -> Aligned:  # fmt: skip
    """Move all models onto the one numbered `anchor` (from 0); by default onto the one nearest to their mean.

    "universe": onto their running mean instead, until it settles or `rounds` are done (10), so that no model is
    special. data: as in `match`; "universe" takes them only for where learning starts. learn: as in `match`, over the
    simplex of all models at once; with "universe" all are moved, two towards each other. start: alignments that are
    known, of the models in order (None: to be matched), which are applied, or learning starts from.
    prove: run each model before and after, as `symfuse.prove` does. follow: gets each event of the work
    (`symfuse.api.events`). The other options are those of `match`. With two models that are equally near, the last is
    the anchor.
    """
    models = [model_of(source) for source in sources]
    if len(models) < 2:
        raise OptionError(f"an alignment needs two models at least, {len(models)} given")
    how = How(memory=memory, device=device, prove=prove, follow=follow)
    batches = data.batches if isinstance(data, Task) else None if data is None else list(data)
    shown = how.watch() if batches is None else {}
    learning = None if learn is None else _learning(learn, device)
    if batches is not None and learning is not None:
        build = build or learning.build
    options = _common(axes, layers, scaling, groups, variants, frame, device) | _of_one_way(
        "align",
        batches is not None,
        {"one_pass": one_pass, "biases": biases, "starts": starts, "seed": seed, "threads": threads, "memory": memory,
         "executor": executor, "progress": progress or shown.get("progress"), "watch": watch or shown.get("watch")},
        {"kind": kind, "residual": residual, "without": without, "build": build},
    )  # fmt: skip
    follow(events.Working("learning" if learning is not None else "matching"))
    began = time.perf_counter()
    if anchor == "universe":
        alignments = _universe(models, learning, batches, options | options_set({"rounds": rounds}))
        return _towards_each_other([model.checkpoint for model in models], alignments, how, began)
    if rounds is not None:
        raise OptionError('align: rounds is of the anchor "universe"; leave it out')
    if anchor is not None and not 0 <= anchor < len(models):
        raise OptionError(f"anchor {anchor}: there are models 0 to {len(models) - 1}")
    anchor = nearest_to_mean([model.on(device) for model in models]) if anchor is None else anchor
    found = _onto(models, anchor, learning, batches, list(start or [None] * len(models)), options)
    return _moved(models, anchor, found, how, time.perf_counter() - began)


def _onto(
    models: Sequence[Model],
    anchor: int,
    learning: Learning | None,
    batches: Sequence[Batch] | None,
    alignments: list[Alignment | None],
    options: dict[str, Any],
) -> list[Alignment | None]:
    """The alignments of all models onto the anchor, those that are known among them; None for the anchor."""
    why: Mapping[str, Any] = {}
    if len(models) > 2:  # axes and frame are the same for all
        asked = (options["axes"], options.get("groups"), options.get("frame"), options["variants"])
        options["axes"], options["frame"], why = usual(models, *asked)
    for i, model in enumerate(models):
        if i != anchor and alignments[i] is None:
            alignments[i] = match_pair(model, models[anchor], batches=batches, **options)
    if learning is not None:
        learned = learn_all(models, alignments, learning, **options)
        alignments = [None if i == anchor else g for i, g in enumerate(learned)]
    return [None if g is None else with_reasons(g, why) for g in alignments]


def _moved(
    models: Sequence[Model], anchor: int, alignments: Sequence[Alignment | None], how: How, seconds: float
) -> Aligned:
    """The models moved onto the anchor, which is brought into the frame of the alignments."""
    to = models[anchor].checkpoint
    first = next(g for g in alignments if g is not None)  # the frame is the same for all
    unmoved = framed(to, first) if first.frame else to
    checkpoints = [
        unmoved if g is None else move(model.checkpoint, to, g, how, seconds=seconds)
        for g, model in zip(alignments, models, strict=True)
    ]
    return Aligned(tuple(checkpoints), tuple(alignments), anchor)


def _universe(
    models: Sequence[Model], learning: Learning | None, batches: Sequence[Batch] | None, options: dict[str, Any]
) -> tuple[Alignment, ...]:
    """The alignments of all models towards their mean, or towards each other."""
    if learning is not None:
        return learn_universe(models, learning, batches=batches, **options)
    if batches is not None:
        raise OptionError("a universe is matched from the weights; leave data out, or name an anchor")
    return match_universe(models, **options).alignments


def _towards_each_other(
    models: Sequence[Checkpoint], alignments: Sequence[Alignment], how: How, began: float
) -> Aligned:
    """All models moved; of two each is the anchor of the other."""
    checkpoints = [g(model) for g, model in zip(alignments, models, strict=True)]
    spent = time.perf_counter() - began
    if len(models) == 2:
        pairs = zip(models, models[::-1], alignments, checkpoints[::-1], strict=True)
        checkpoints = [move(one, to, g, how, other=other, seconds=spent) for one, to, g, other in pairs]
    return Aligned(tuple(checkpoints), tuple(alignments), None)


@checked
def nearest(sources: Sequence[Source]) -> int:
    """The number (from 0) of the model nearest to the mean of all: the anchor, where none is named."""
    return nearest_to_mean([model_of(source) for source in sources])


def _common(
    axes: str | Sequence[str],
    layers: str | int | Sequence[int] | None,
    scaling: bool | None,
    groups: Mapping[str, str] | None,
    variants: Sequence[str],
    frame: Sequence[str] | None,
    device: str,
) -> dict[str, Any]:
    """The options of every way to match."""
    return {
        "axes": axes if isinstance(axes, str) else tuple(axes),
        "layers": tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else layers,
        "groups": groups,
        "variants": tuple(variants),
        "device": device,
    } | options_set({"scaling": scaling, "frame": frame})


def _of_one_way(
    verb: str, from_data: bool, weights: Mapping[str, Any], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that are set, of matching from the weights or from activations; OptionError for the others."""
    own, others = (activations, weights) if from_data else (weights, activations)
    unused = options_set(others)
    if unused:
        names = ", ".join(map(repr, unused))
        way, out = ("the weights", "leave data out") if from_data else ("activations", "add data")
        raise OptionError(f"{verb}: {names}: of matching from {way}; {out}, or leave {names} out")
    return options_set(own)


def _learning(given: Task | Learning, device: str) -> Learning:
    """Learning of a task on the device, or as it is."""
    return given if isinstance(given, Learning) else Learning(given, device=device)
