"""The verbs of symfuse for folders, state dicts and live modules; the command line calls these and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.device import CPU
from symfuse.drafts import Draft, draft_of
from symfuse.errors import OptionError, warn_caller
from symfuse.evaluation import (
    Barrier,
    Batch,
    Distance,
    Landscape,
    Loss,
    Score,
    Task,
    batch_task,
    make_task,
    read_records,
)
from symfuse.evaluation import barrier as path_barrier
from symfuse.evaluation import distance as model_distance
from symfuse.evaluation import ensemble as ensemble_models
from symfuse.evaluation import evaluate as evaluate_model
from symfuse.evaluation import landscape as plane_landscape
from symfuse.executors import Executor
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.live import module_config, unwrap
from symfuse.matching import match_universe, nearest_to_mean, usual
from symfuse.matching.learned import Learning, learn_universe
from symfuse.matching.learned import learn as learn_all
from symfuse.methods import METHODS, lookup
from symfuse.methods import collect as collect_statistics
from symfuse.model import Model
from symfuse.modules import live
from symfuse.recipes import RECIPE_KEYS, events, named, parse_recipe, read_recipes, recipe_of, recipe_of_arguments
from symfuse.recipes.align import How, match_pair, move, with_reasons
from symfuse.recipes.check import Target, check_all
from symfuse.recipes.events import Event, Follow, ignore
from symfuse.recipes.run import Shown, run
from symfuse.recipes.yaml_reader import read_value
from symfuse.rewriting import Reconcile
from symfuse.runs import framed
from symfuse.spec import Spec
from symfuse.stats.statistics import Statistics
from symfuse.transporting import Transported
from symfuse.transporting import transport as transport_thing
from symfuse.verification import Proof, Verification
from symfuse.verification import prove as prove_alignment
from symfuse.verification import verify as verify_checkpoints
from symfuse.widths import match_widths

__all__ = [
    "METHODS", "Aligned", "How", "Shown", "Source", "Target", "Verification", "align", "barrier", "check_all",
    "collect", "declare", "distance", "events", "landscape", "lookup", "match", "merge", "merge_recipe", "nearest",
    "parse_recipe", "prove", "read_recipes", "read_value", "recipe_of", "run", "score", "suggest", "task",
    "to_module", "transport", "verify", "widen",
]  # fmt: skip

# What every verb takes for a model: a folder or hub id, a live module, or an open checkpoint, which is also the way in
# for a state dict: `symfuse.open(state_dict, config=config)`.
Source = str | os.PathLike[str] | Checkpoint | torch.nn.Module


@checked
def declare(source: Source) -> Spec:
    """The declaration of a model: its tensors with their layouts, and the axes with the groups that act on them.

    Raises UnknownArchitectureError for a family that has none, SpecError or LayoutError if the model does not fit.
    """
    return _model(source).spec


@checked
def suggest(
    source: Source,
    *,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    run: bool = True,
    seed: int = 0,
) -> Draft:
    """A draft of a declaration for a family that symfuse does not know, from names, shapes and config.

    Where `transformers` has the class, or for a live module, it is run with random weights, and each axis gets the
    largest group that leaves its outputs; else, or with run=False, the draft is UNVERIFIED and its file refuses to be
    imported.
    The source is not changed, and its weights are not read. config: of a module that has none. inputs: what to run it
    on; default random ones. `draft.save(path)` writes the file; tensors that it could not place stand in
    `draft.unplaced`.
    """
    module = source if isinstance(source, torch.nn.Module) else None
    checkpoint = _open(source) if module is None and config is None else open_checkpoint(source, config=config)
    foreign = module is not None and not type(module).__module__.startswith("transformers.")
    return draft_of(checkpoint, module if foreign else None, inputs=inputs, run=run, seed=seed)


@checked
def match(
    source: Source,
    to: Source,
    *,
    axes: str | Sequence[str] = "auto",
    layers: str | int | Sequence[int] | None = None,
    scaling: bool | None = None,
    groups: Mapping[str, str] | None = None,
    variants: Sequence[str] = (),
    data: Task | Iterable[Batch] | None = None,
    learn: Task | Learning | None = None,
    device: str = CPU,
    **options: Any,
) -> Alignment:
    """The alignment that moves `source` towards the anchor `to`; from the weights, or with `data` from activations; and
    with `learn` learned from there, by descending a loss between the two.

    axes: what to match: "attention" (per-head rotations of query/key and value/output; Zhang et al. 2025, Theorem
    4.1, Algorithm 1), "ffn" (neurons, exact assignment), "heads", "residual", "pooler", single axes, or "all";
    "auto": attention and ffn of models in one basis (a fine-tune), else all. layers: which, as "0-4" or "last:3".
    scaling: also rescale (Eq. 11–12), by default only from the weights. groups: by axis the name of the group to
    match with, {"qk": "orthogonal", "residual": "permutation"}, or "none"; it must be a subgroup of what is declared,
    and its axis is matched also if `axes` does not name it. variants: inexact ones, by which the moved model computes
    something else: "heads-ignored", "separate-qk", "separate-residual", "transport": optimal transport, units
    averaged (docs/matching.md), of single axes groups={"ffn": "sinkhorn"}. data: a task, or batches of module inputs
    (both: Verma & Elbayad 2024). learn: a task whose loss is descended (Theus et al. 2025), or a
    `symfuse.matching.learned.Learning`, which says how; each axis then in the largest group that may act on it, and
    from the start that the other options describe. device: where all of it is computed, such as "cuda" (docs/gpu.md);
    a Learning has its own for what it learns. options: of `match_models` (one_pass, biases, starts, seed, frame,
    threads, executor, progress), or with data of `match_by_activations` (frame, kind, residual, without, build), both
    in symfuse.matching.

    Apply the result: `alignment(source)`. Where it has a frame (the rotated residual stream of a pre-norm model), the
    anchor to merge with is `alignment.in_frame(to)`.
    """
    chosen: dict[str, Any] = {
        "axes": axes if isinstance(axes, str) else tuple(axes),
        "layers": tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else layers,
        "groups": groups,
        "variants": tuple(variants),
        "device": device,
        **({} if scaling is None else {"scaling": scaling}),
    }
    batches = data.batches if isinstance(data, Task) else data
    learning = None if learn is None else _learning(learn, device)
    return match_pair(_model(source), _model(to), batches=batches, learning=learning, **chosen, **options)


@checked
def widen(source: Source, to: Source, **options: Any) -> tuple[Checkpoint, Alignment]:
    """The source in the widths of a wider anchor `to`, which computes the same, and the alignment of that from the
    weights (docs/widths.md). options: of `symfuse.widths.match_widths`."""
    wide, alignment = match_widths(_model(source), _model(to), **options)
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
    sources: Sequence[Source],
    anchor: int | Literal["universe"] | None = None,
    *,
    data: Task | Iterable[Batch] | None = None,
    learn: Task | Learning | None = None,
    start: Sequence[Alignment | None] | None = None,
    device: str = CPU,
    prove: bool = False,
    follow: Follow = ignore,
    **options: Any,
) -> Aligned:
    """Move all models onto the one numbered `anchor` (from 0); by default onto the one nearest to their mean.

    "universe": onto their running mean instead, until it settles, so that no model is special (`match_universe`).
    data: as in `match`; "universe" takes them only for where learning starts. learn: as in `match`, over the simplex of
    all models at once; with "universe" all are moved, two towards each other. start: alignments that are known, of the
    models in order (None: to be matched), which are applied, or learning starts from.
    device: as in `match`. prove: run each model before and after, as `symfuse.prove` does. follow: gets each event of
    the work (`symfuse.recipes.events`). options: those of `match_models`. With two models that are equally near, the
    last is the anchor.
    """
    models = [_model(source) for source in sources]
    if len(models) < 2:
        raise OptionError(f"an alignment needs two models at least, {len(models)} given")
    how = How(memory=options.get("memory"), device=device, prove=prove, follow=follow)
    batches = data.batches if isinstance(data, Task) else None if data is None else list(data)
    options = {"device": device, **(how.watch() if batches is None else {}), **options}
    learning = None if learn is None else _learning(learn, device)
    follow(events.Working("learning" if learning is not None else "matching"))
    began = time.perf_counter()
    if anchor == "universe":
        if learning is not None:
            found = learn_universe(models, learning, batches=batches, **options)
        elif batches is not None:
            raise OptionError("a universe is matched from the weights; leave data out, or name an anchor")
        else:
            found = match_universe(models, **options).alignments
        return _towards_each_other([model.checkpoint for model in models], found, how, began)
    if anchor is not None and not 0 <= anchor < len(models):
        raise OptionError(f"anchor {anchor}: there are models 0 to {len(models) - 1}")
    anchor = nearest_to_mean([model.on(device) for model in models]) if anchor is None else anchor
    why: Mapping[str, Any] = {}
    if len(models) > 2:  # axes and frame are the same for all
        asked = (options.get("axes", "auto"), options.get("groups"), options.get("frame"), options.get("variants", ()))
        options["axes"], options["frame"], why = usual(models, *asked)
    build: dict[str, Any] = {"build": learning.build} if learning is not None and batches is not None else {}
    alignments: list[Alignment | None] = list(start or [None] * len(models))
    for i, model in enumerate(models):
        if i != anchor and alignments[i] is None:
            alignments[i] = match_pair(model, models[anchor], batches=batches, **build, **options)
    if learning is not None:
        learned = learn_all(models, alignments, learning, **options)
        alignments = [None if i == anchor else g for i, g in enumerate(learned)]
    alignments = [None if g is None else with_reasons(g, why) for g in alignments]
    spent = time.perf_counter() - began
    to = models[anchor].checkpoint
    first = next(g for g in alignments if g is not None)  # the frame is the same for all
    unmoved = framed(to, first) if first.frame else to
    checkpoints = [
        unmoved if g is None else move(model.checkpoint, to, g, how, seconds=spent)
        for g, model in zip(alignments, models, strict=True)
    ]
    return Aligned(tuple(checkpoints), tuple(alignments), anchor)


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
def merge(
    sources: Sequence[Source],
    *,
    method: str = "linear",
    weights: Collection[Any] | None = None,
    base: int | None = None,
    heads: str | int = "average",
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: str = CPU,
    data: Task | Sequence[Task | None] | None = None,
    statistics: Sequence[Statistics | str | os.PathLike[str] | None] | None = None,
    force_config: bool = False,
    follow: Follow = ignore,
    **parameters: Any,
) -> Checkpoint:
    """The merge of models in the frame in which they are (see `align`), as a lazy checkpoint: `.save(folder)` it.

    `merge([base, a, b], method="ties", base=0, density=0.3)`: a recipe with these keys, which is run (`merge_recipe`
    has those of alignment, tokenizers, slices and others).

    base: the number (from 0) of the model from which names, dtypes, config and tokenizer come, by default the first;
    task vectors start from it, and methods that need a base do not count it among the models. weights, parameters:
    those of the method, one value for all models, or a list, tensor or array with one for each (without that base).
    heads: what becomes of task heads: "average" (all must have the same), "drop", or the number (from 0) or name of the
    model whose head is kept as it is; that model is then the base. seed: of random methods. dtype: of the
    floating-point tensors, by default the base's. device: where tensors are combined, and models run, such as "cuda"
    (docs/gpu.md); what is read of the result is on the processor.

    force_config: merge models whose configs compute something else, or name another type, by names and shapes, with
    the base's config; what differs stands in the notes of the merge.

    data: for methods that look at them (fisher, regmean, adamerging, greedy_soup, …): a task (`symfuse.task`) for all
    models, or one for each, the base aside; they are looked at now. statistics: what `symfuse.collect` returned of
    each, or its folder, instead of data. follow: gets each event of the run (`symfuse.recipes.events`).
    Raises IncompatibleError or OptionError before any weight is read.
    """
    if outside := sorted(RECIPE_KEYS & parameters.keys()):
        keys = ", ".join(f"{key}: …" for key in outside)
        raise OptionError(
            f"merge: {', '.join(outside)}: these are keys of a recipe, not parameters of a method; write "
            f"symfuse.merge_recipe({{merge_method: {method}, models: […], {keys}}})"
        )
    if weights is not None and "weight" in parameters:
        raise OptionError("merge: weights and weight are one parameter; give one of them")
    known = named([_named(source) for source in sources])
    recipe = recipe_of_arguments(
        list(known),
        lookup(method),
        base,
        parameters | ({} if weights is None else {"weight": weights}),
        heads=heads,
        dtype=dtype,
        seed=seed,
        force_config=force_config,
    )
    count = len(recipe.models)
    tasks = None if data is None else [data] * count if isinstance(data, Task) else list(data)
    saved = None if statistics is None else [_statistics(one) for one in statistics]
    done = run((recipe,), known, how=How(device=device, follow=_with_warnings(follow)), shown=Shown(tasks, saved))
    notes = (note.text for note in done.stage.notes if note.about != "model")
    return done.checkpoint.replace(notes=tuple(dict.fromkeys((*done.checkpoint.notes, *notes))))


@checked
def collect(source: Source, data: Task, kind: str = "fisher", **options: Any) -> Statistics:
    """Statistics of a model on data, for `merge(..., statistics=[…])`: `.save(folder)` them, and take them again.

    kind: "fisher", the squared gradients of the likelihood, or "gram", the second moments of what linear maps read.
    options: of `symfuse.methods.fisher.fisher_of` (labels, seed) and `symfuse.methods.regmean.gram_of` (memory);
    device: where the model is run.
    """
    return collect_statistics(_model_of_any(source), data, kind, **options)


@checked
def merge_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    models: Mapping[str, Source] | None = None,
    *,
    options: Reconcile | None = None,
    threads: int | None = None,
    device: str = CPU,
    executor: Executor | None = None,
    follow: Follow = ignore,
) -> Checkpoint:
    """The merge that a recipe describes, as a lazy checkpoint: a YAML file, or a mapping of the same form.

    models: those that the recipe names and that are not folders or hub ids. Of a file with several recipes the last is
    the result; those that it names are merged as they are read. options: what is let pass where models do not have the
    same tensors. device, executor: as in `match`. follow: gets each event of the run (`symfuse.recipes.events`).
    Alignments that the recipe asks for are made, and not proved: `prove` does that.
    """
    recipes = (parse_recipe(recipe),) if isinstance(recipe, Mapping) else read_recipes(Path(recipe))
    known = {name: _open(source) for name, source in (models or {}).items()}
    how = How(threads=threads, device=device, executor=executor, follow=_with_warnings(follow))
    return run(recipes, known, options=options, how=how).checkpoint


@checked
def verify(
    before: Source,
    after: Source,
    alignment: Alignment | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Mapping[str, Tensor]] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Whether two models compute the same function, by running both as the real class on the same inputs.

    Configs and tables are compared too, and the result says how much of tables and positions was read (`.coverage`,
    `.seen`). inputs: what to feed (default: seeded random ones, which reach special tokens, all token types, rows that
    differ, and positions as far as is affordable). alignment: if it moved a space that the outputs live in, theirs is
    moved along before the comparison. runner: for models without a `transformers` class. tolerance: the largest
    difference relative to the largest output of its row; default by the dtype of the tensors that differ. The result
    says `.equal`, `.errors` and `.differences`.
    """
    opened = _open if runner is None else _open_any
    return verify_checkpoints(
        opened(before), opened(after), alignment, inputs=inputs, runner=runner, dtype=dtype, tolerance=tolerance
    )


@checked
def prove(
    source: Source,
    alignment: Alignment,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Mapping[str, Tensor]] | None = None,
    memory: int | None = None,
) -> Proof:
    """Whether an alignment leaves what its source computes: in float64, before the moved weights are rounded.

    Stronger than `verify(source, alignment(source))`, above all in half precision, where rounding can hide a mistake;
    what rounding changes is told apart. memory: bytes; a model that takes more is run layer by layer. Raises
    VerificationError.
    """
    opened = _open if runner is None else _open_any
    return prove_alignment(opened(source), alignment, inputs=inputs, runner=runner, memory=memory)


@checked
def distance(a: Source, b: Source) -> Distance:
    """The Euclidean distance and cosine of two models of one family, with its split by axis, layer and tensor.

    Computed where they are read to: `symfuse.open(a).on("cuda")`.
    """
    return model_distance(_model(a), _model(b))


@checked
def barrier(
    source: Source,
    to: Source,
    loss: Task | Loss,
    alignments: Mapping[str, Alignment | tuple[Source, Source]] | None = None,
    *,
    baselines: Mapping[str, tuple[str, ...]] | None = None,
    **options: Any,
) -> Barrier:
    """The loss along the straight path from `to` (λ = 0) to `source` (λ = 1): as they are, and under each alignment.

    loss: a Task (`symfuse.task`), or any callable from a live module to one number. alignments: named; each moves the
    source, or is a pair of models in a parametrisation of its own, whose plain baseline is another such pair:
    `{"folded": (fa, fb), "rotation": (g(fa), fb)}, baselines={"rotation": ("folded", "none")}`. options: those of
    `symfuse.evaluation.barrier`, such as points, refine, build, dtype, device. The result has `.curves[name].barrier`.
    """
    pairs: dict[str, tuple[Checkpoint | torch.nn.Module, Checkpoint | torch.nn.Module]] = {
        "none": (_runnable(source), _runnable(to))
    }
    own: dict[str, tuple[str, ...]] = {}
    plains: dict[tuple[str, ...], str] = {}  # what the curve of a frame's plain models is called
    inexact: dict[str, tuple[str, ...]] = {}
    for name, given in (alignments or {}).items():
        if name in pairs:
            raise OptionError(f"an alignment cannot be called {name!r}: there is such a curve without it; rename it")
        if isinstance(given, Alignment):
            inexact[name] = given.variants
            pairs[name] = (given(_open(source)), given.in_frame(_open(to)) if given.frame else _runnable(to))
            if given.frame:
                plain = plains.setdefault(given.frame, f"none, frame of {name}" if plains else "none, same frame")
                pairs[plain] = (given.in_frame(_open(source)), given.in_frame(_open(to)))
                own[name] = (plain, "none")
        else:
            pairs[name] = (_runnable(given[0]), _runnable(given[1]))
    if baselines is None:
        baselines = {name: own.get(name, ("none",)) for name in pairs if name != "none"}
    return path_barrier(pairs, loss, baselines=baselines, inexact=inexact, **options)


@checked
def task(name: str | None, data: Any, model: Source, *, encoding: str = "utf-8", **options: Any) -> Task:
    """What to evaluate on: a loss that `barrier`, `landscape` and `evaluate` take.

    name: causal-lm, masked-lm, sequence-classification, token-classification, image-classification, retrieval; None:
    what the model's head is made for. data: a path (text, CSV, JSON lines, Parquet, a folder of images), a `datasets`
    object, or a list of dictionaries, one a row; or batches of tensors by the module's inputs, taken as they are, such
    as `[{"pixel_values": …, "labels": …}]` or a `DataLoader` of these. model: whose tokenizer or image processor
    prepares them. options: those of the task, such as text_column, label_column, max_length, batch_size, limit, seed.
    Raises DataError, naming file and row.
    """
    if isinstance(data, Iterable) and not isinstance(data, str | os.PathLike | Mapping) and not _is_dataset(data):
        data = list(data)
        if data and all(isinstance(one, Mapping) and all(isinstance(t, Tensor) for t in one.values()) for one in data):
            return batch_task(name, data, _open_any(model), **options)
    return make_task(name, read_records(data, encoding=encoding), _open(model), **options)


def _is_dataset(data: object) -> bool:
    """Whether this is of the library `datasets`, whose rows are read when they are used."""
    return hasattr(data, "column_names")


@checked
def landscape(models: Mapping[str, Source], loss: Task | Loss, **options: Any) -> Landscape:
    """The loss on the plane through three named models, such as `{"A": a, "A aligned": g(a), "B": b}`.

    options: those of `symfuse.evaluation.landscape`: steps, margin, journal (a file to go on from), build, dtype,
    device.
    """
    return plane_landscape({name: _runnable(source) for name, source in models.items()}, loss, **options)


@checked
def score(
    source: Source | Sequence[Source],
    loss: Task | Loss,
    *,
    ensemble: Literal["probabilities", "logits"] = "probabilities",
    build: Callable[[Checkpoint], torch.nn.Module] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Score:
    """Loss and metrics of one model, in evaluation mode; or of a list of models as an ensemble.

    loss, build: as in `barrier`. ensemble: what the mean is taken of; its loss must be a Task that predicts classes.
    device: where it is run, by default where a live module is.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        models = [_runnable(one) for one in source]
        return ensemble_models(models, loss, of=ensemble, build=build, dtype=dtype, device=device)
    return evaluate_model(_runnable(source), loss, build=build, dtype=dtype, device=device)


@checked
def to_module(source: Source, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A live module of the class that the config names, in evaluation mode: `merge([a, b])` → module out."""
    return live(_open(source), dtype)


@checked
def transport(
    thing: str | os.PathLike[str],
    alignment: Alignment | str | os.PathLike[str],
    *,
    kind: str | None = None,
    axis: str | None = None,
    base: Source | None = None,
    **options: Any,
) -> Transported:
    """What belongs to a model A, for A' = alignment(A): `.save(folder)` it, or read its tensors by name.

    thing: the folder of a LoRA adapter, or a file of steering vectors, a probe, a sparse auto-encoder or the moments of
    AdamW; kind: which of these ("adapter", "vector", "probe", "sae", "moments"), by default what it looks like. axis:
    the space that a vector, probe or auto-encoder is of, "residual" or "ffn[3]". base: A. options: those of
    `symfuse.transporting.transport` (new_base, encoder, names). Exact, or SymmetryError says why it cannot be.
    """
    given = None if base is None else _open(base)
    return transport_thing(thing, alignment, kind=kind, axis=axis, base=given, **options)


@checked
def nearest(sources: Sequence[Source]) -> int:
    """The number (from 0) of the model nearest to the mean of all: the anchor, where none is named."""
    return nearest_to_mean([_model(source) for source in sources])


def _named(source: Source) -> Checkpoint:
    """A model, folders and hub ids under the names by which they are written, as on the command line."""
    if isinstance(source, str | os.PathLike):
        return _with_notes(open_checkpoint(source, name=os.fspath(source)))
    return _open(source)


def _with_warnings(follow: Follow) -> Follow:
    """Also warns in Python of what the command line prints: differences that matter, and doubts."""
    warned: set[str] = set()

    def warn(event: Event) -> None:
        if isinstance(event, events.Warned | events.Note):
            matters = getattr(event, "about", "merge") == "merge"
            if matters and event.text not in warned:
                warned.add(event.text)
                warn_caller(event.text)
        follow(event)

    return warn


def _runnable(source: Source) -> Checkpoint | torch.nn.Module:
    return source if isinstance(source, torch.nn.Module) else _open(source)


def _open(source: Source) -> Checkpoint:
    """OptionError for a module without a config, which says how to give one."""
    if isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None:
        name = type(source).__name__
        raise OptionError(
            f"{name} has no config of its own; open it with one first: symfuse.open(module, config={{...}}), a "
            'dictionary such as {"model_type": "mine"} or a transformers config'
        )
    return source if isinstance(source, Checkpoint) else _with_notes(open_checkpoint(source))


def _with_notes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint; what it notes, which the command line prints, is a warning, as nobody else sees it."""
    for note in checkpoint.notes:
        warn_caller(f"{checkpoint.name}: {note}")
    return checkpoint


def _open_any(source: Source) -> Checkpoint:
    """Also a module without a config, of which whoever runs it needs none."""
    bare = isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None
    return open_checkpoint(source, config={}) if bare else _open(source)


def _model(source: Source) -> Model:
    return Model.of(_open(source))


def _model_of_any(source: Source) -> Model:
    return Model.of(_open(source), undeclared=True)


def _learning(given: Task | Learning, device: str) -> Learning:
    """Learning of a task on the device, or as it is."""
    return given if isinstance(given, Learning) else Learning(given, device=device)


def _statistics(source: Statistics | str | os.PathLike[str] | None) -> Statistics | None:
    return source if source is None or isinstance(source, Statistics) else Statistics.load(source)
