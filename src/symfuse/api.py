"""The verbs of symfuse for folders, state dicts and live modules; the command line calls these and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
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
from symfuse.io.lazy import Held, StoredTensors
from symfuse.io.live import module_config, unwrap
from symfuse.matching import match_by_activations, match_models, match_universe, nearest_to_mean, usual
from symfuse.matching.learned import Learning, learn_universe, match_learned
from symfuse.matching.learned import learn as learn_all
from symfuse.merging import Method
from symfuse.methods import Pending, lookup, merge_models
from symfuse.methods import collect as collect_statistics
from symfuse.methods import learn as learn_method
from symfuse.model import Model
from symfuse.modules import live
from symfuse.recipes import ModelRef, Recipe, parse_recipe, read_recipes, recipe_of
from symfuse.recipes.check import check_all
from symfuse.recipes.record import alignment_record, merge_record, opened
from symfuse.recipes.run import merge_recipes
from symfuse.rewriting import Reconcile, harmonise
from symfuse.runs import framed, recorded
from symfuse.spec import Spec
from symfuse.stats.statistics import Statistics
from symfuse.transporting import Transported
from symfuse.transporting import transport as transport_thing
from symfuse.verification import Proof, Verification
from symfuse.verification import prove as prove_alignment
from symfuse.verification import verify as verify_checkpoints

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
    "auto": attention and ffn of models in one basis (a fine-tune), else all. layers: which, as "0-4" or "tail:3".
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
    if learn is not None:
        return match_learned(_model(source), _model(to), _learning(learn, device), batches=batches, **chosen, **options)
    if batches is None:
        return match_models(_model(source), _model(to), **chosen, **options)
    return match_by_activations(_model(source), _model(to), batches, **chosen, **options)


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
    device: str = CPU,
    **options: Any,
) -> Aligned:
    """Move all models onto the one numbered `anchor` (from 0); by default onto the one nearest to their mean.

    "universe": onto their running mean instead, until it settles, so that no model is special (`match_universe`).
    data: as in `match`; "universe" takes them only for where learning starts. learn: as in `match`, over the simplex of
    all models at once; with "universe" all are moved, two towards each other.
    device: as in `match`. options: those of `match_models`. With two models that are equally near, the last is the
    anchor.
    """
    models = [_model(source) for source in sources]
    if len(models) < 2:
        raise OptionError(f"an alignment needs two models at least, {len(models)} given")
    options["device"] = device
    batches = data.batches if isinstance(data, Task) else None if data is None else list(data)
    if anchor == "universe":
        if learn is not None:
            found = learn_universe(models, _learning(learn, device), batches=batches, **options)
        elif batches is not None:
            raise OptionError("a universe is matched from the weights; leave data out, or name an anchor")
        else:
            found = match_universe(models, **options).alignments
        return Aligned(tuple(g(m.checkpoint) for g, m in zip(found, models, strict=True)), found, None)
    asked = (options.get("axes", "auto"), options.get("groups"), options.get("frame"), options.get("variants", ()))
    options["axes"], options["frame"], _ = usual(models, *asked)  # the same for all
    if anchor is not None and not 0 <= anchor < len(models):
        raise OptionError(f"anchor {anchor}: there are models 0 to {len(models) - 1}")
    anchor = nearest_to_mean([model.on(device) for model in models]) if anchor is None else anchor
    build: dict[str, Any] = {"build": learn.build} if isinstance(learn, Learning) else {}
    on_data = partial(match_by_activations, batches=batches, **build) if batches is not None else None
    find: Callable[..., Alignment] = on_data or match_models
    alignments = [None if i == anchor else find(m, models[anchor], **options) for i, m in enumerate(models)]
    if learn is not None:
        moved = learn_all(models, alignments, _learning(learn, device), **options)
        alignments = [None if i == anchor else g for i, g in enumerate(moved)]
    first = next(g for g in alignments if g is not None)  # the frame is the same for all
    checkpoints, to = [], models[anchor].checkpoint
    for g, model in zip(alignments, (m.checkpoint for m in models), strict=True):
        if g is not None:
            checkpoints.append(recorded(g(model), alignment_record(model, to, g)))
        else:
            checkpoints.append(framed(model, first) if first.frame else model)
    return Aligned(tuple(checkpoints), tuple(alignments), anchor)


@checked
def merge(
    sources: Sequence[Source],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: int | None = None,
    heads: str | int = "average",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str = CPU,
    data: Task | Sequence[Task | None] | None = None,
    statistics: Sequence[Statistics | str | os.PathLike[str] | None] | None = None,
    force_config: bool = False,
    **parameters: Any,
) -> Checkpoint:
    """The merge of models in the frame in which they are (see `align`), as a lazy checkpoint: `.save(folder)` it.

    `merge([base, a, b], method="ties", base=0, density=0.3)`; options as in `symfuse.merging.merge_models`, but that
    the model whose head is kept has its number from 0, like base: `heads=1`. From a recipe: `merge_recipe`. device:
    where tensors are combined, and models run, such as "cuda" (docs/gpu.md); what is read of the result is on the
    processor.

    force_config: merge models whose configs compute something else, or name another type, by names and shapes, with
    the base's config; what differs stands in the notes of the merge.

    data: for methods that look at them (fisher, regmean, adamerging, greedy_soup, …): a task (`symfuse.task`) for all
    models, or one for each, the base aside; they are looked at now. statistics: what `symfuse.collect` found of each,
    or its folder, in their stead.
    """
    if isinstance(heads, int):
        if not 0 <= heads < len(sources):
            raise OptionError(
                f"heads {heads}: there are models 0 to {len(sources) - 1}; or write 'average', 'drop' or a model's name"
            )
        heads = str(heads + 1)
    models, notes = _reconciled(_named(sources), base, heads, force_config)
    chosen = lookup(method)
    given: dict[str, Any] = {"method": method, "weights": weights, "base": base, "seed": seed, "dtype": dtype}
    if weights is not None and "weight" in parameters:
        raise OptionError("merge: weights and weight are one parameter; give one of them")
    given |= {"device": device, "heads": heads, "force_config": force_config, **parameters}
    # Whether they fit is known before any data are looked at.
    merged = merge_models(models, **given, learned=None if chosen.learn is None else Pending())
    saved = None if statistics is None else [_statistics(one) for one in statistics]
    apart = base if chosen.base != "unused" else None
    others = [model for i, model in enumerate(models) if i != apart]
    for model, one in zip(others, saved or (), strict=False):
        if one is not None:
            one.require(model)
    tasks = None if data is None else [data] * len(others) if isinstance(data, Task) else list(data)
    recipe, known = _recipe_of(models, chosen, given, parameters)
    warned, stage = _warned((recipe,), known), opened(recipe, known)
    stage = replace(stage, notes=(*notes, *stage.notes))
    options: dict[str, Any] = {"base": base, "heads": heads, "seed": seed, "device": device, "parameters": parameters}
    found = learn_method(chosen, models, tasks=tasks, statistics=saved, **options)
    merged = merged if found is None else merge_models(found.models, **given, learned=found)
    merged = merged.replace(notes=tuple(dict.fromkeys((*merged.notes, *notes))))
    for note in merged.notes:
        harmless = not force_config and "config.json differs in" in note  # dtypes, versions
        if not harmless and not any(note in model.checkpoint.notes for model in models):
            warn_caller(note)
    return recorded(merged, merge_record(replace(stage, learned=found), merged, warned))


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
) -> Checkpoint:
    """The merge that a recipe describes, as a lazy checkpoint: a YAML file, or a mapping of the same form.

    models: those that the recipe names and that are not folders or hub ids. Of a file with several recipes the last is
    the result; those that it names are merged as they are read. options: what is let pass where models do not have the
    same tensors. device, executor: as in `match`. Alignments that the recipe asks for are made, and not proved:
    `prove` does that.
    """
    recipes = (parse_recipe(recipe),) if isinstance(recipe, Mapping) else read_recipes(Path(recipe))
    known = {name: _open(source) for name, source in (models or {}).items()}
    how: dict[str, Any] = {"options": options, "threads": threads, "device": device, "executor": executor}
    return merge_recipes(recipes, known, **how, warnings=_warned(recipes, known, options))


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


def _named(sources: Sequence[Source]) -> list[Checkpoint]:
    """The models, folders and hub ids under the names by which they are written, as on the command line."""
    return [
        open_checkpoint(source, name=os.fspath(source)) if isinstance(source, str | os.PathLike) else _open(source)
        for source in sources
    ]


def _recipe_of(
    models: Sequence[Model], method: Method, given: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[Recipe, dict[str, Checkpoint]]:
    """The recipe that arguments of `merge` amount to, and its models by the names that it calls them."""
    known: dict[str, Checkpoint] = {}
    for model in models:
        same = sum(model.name == name.partition(" (copy ")[0] for name in known)
        known[f"{model.name} (copy {same})" if same else model.name] = model.checkpoint
    names, base, heads = list(known), given["base"], given["heads"]
    if heads.isdigit():
        heads = names[int(heads) - 1]
    if base is None and heads in names and method.base != "required":
        base = names.index(heads)
    more = dict(parameters) | ({} if given["weights"] is None else {"weight": list(given["weights"])})
    more = json.loads(json.dumps(more))  # without numbers and lists of other kinds
    dtype = None if given["dtype"] is None else str(given["dtype"]).removeprefix("torch.")
    keys = {"dtype": dtype, "heads": heads}
    keys |= {"force_config": True} if given["force_config"] else {}
    keys |= {"seed": given["seed"] or None}
    marks = [f"input-{i}-of-{len(names)}" for i in range(len(names))]  # names are no paths, which recipes would read
    keys["heads"] = marks[names.index(heads)] if heads in names else heads
    recipe = recipe_of(marks, method, base, more, keys)
    refs, text = {mark: ModelRef(name) for mark, name in zip(marks, names, strict=True)}, recipe.text
    for mark, name in zip(marks, names, strict=True):
        text = text.replace(mark, yaml.safe_dump(name, allow_unicode=True, width=10**6).removesuffix("...\n").strip())
    listed = tuple(replace(one, model=refs[one.model.path]) for one in recipe.models)
    apart = None if recipe.base_model is None else refs[recipe.base_model.path]
    return replace(recipe, models=listed, base_model=apart, heads=heads, text=text), known


def _warned(recipes: Sequence[Recipe], known: Mapping[str, Checkpoint], options: Reconcile | None = None) -> list[str]:
    """What `symfuse check` warns of, which are warnings here. Models that are computed are not sampled: nothing is read
    of them before they are saved."""
    sample = all(isinstance(checkpoint.tensors, StoredTensors | Held) for checkpoint in known.values())
    here = {name: checkpoint.on(CPU) for name, checkpoint in known.items()}
    reports = check_all(recipes, options, known=here, sample=sample)
    found = [text for report in reports for text in report.warnings]
    for text in dict.fromkeys(found):
        warn_caller(text)
    return found


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
    return source if isinstance(source, Checkpoint) else open_checkpoint(source)


def _open_any(source: Source) -> Checkpoint:
    """Also a module without a config, of which whoever runs it needs none."""
    bare = isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None
    return open_checkpoint(source, config={}) if bare else _open(source)


def _model(source: Source) -> Model:
    return Model.of(_open(source))


def _model_of_any(source: Source) -> Model:
    return Model.of(_open(source), undeclared=True)


def _reconciled(
    checkpoints: list[Checkpoint], base: int | None, heads: str, force_config: bool
) -> tuple[list[Model], list[str]]:
    """The models to be merged, those of other types as of the base's if that is forced; and notes."""
    notes: list[str] = []
    if force_config and len({str(checkpoint.config.get("model_type")) for checkpoint in checkpoints}) > 1:
        template = int(heads) - 1 if heads.isdigit() else base or 0
        done = harmonise(checkpoints, base=template, options=Reconcile(force_config=True))
        checkpoints, notes = done.checkpoints, done.notes
    return [_model_of_any(checkpoint) for checkpoint in checkpoints], notes


def _learning(given: Task | Learning, device: str) -> Learning:
    """As it is given, of a task on the device."""
    return given if isinstance(given, Learning) else Learning(given, device=device)


def _statistics(source: Statistics | str | os.PathLike[str] | None) -> Statistics | None:
    return source if source is None or isinstance(source, Statistics) else Statistics.load(source)
