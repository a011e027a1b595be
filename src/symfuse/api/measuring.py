"""The verbs that measure: relate, evaluate and barrier, and the task that these are evaluated on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, overload

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.api.sources import model_of, options_set
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, OptionError, SymfuseError
from symfuse.evaluation import (
    Barrier,
    Batch,
    Distance,
    Loss,
    Point,
    Score,
    Task,
    batch_task,
    make_task,
    read_records,
    renewed,
)
from symfuse.evaluation import barrier as path_barrier
from symfuse.evaluation import distance as model_distance
from symfuse.evaluation import ensemble as ensemble_models
from symfuse.evaluation import evaluate as evaluate_model
from symfuse.io import Checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.io.sources import Source, opened, opened_any, runnable
from symfuse.model import Model
from symfuse.relations import Relation, Relations

Build = Callable[[Checkpoint], torch.nn.Module]


@overload
def relate(
    source: Source, to: list[Source] | tuple[Source, ...], alignment: None = None, *, quick: bool = False
) -> Relations: ...
@overload
def relate(source: Source, to: Source, alignment: Alignment | None = None, *, quick: bool = False) -> Relation: ...
@checked
def relate(
    source: Source,
    to: Source | list[Source] | tuple[Source, ...],
    alignment: Alignment | None = None,
    *,
    quick: bool = False,
) -> Relation | Relations:
    """How two models are related, by their weights alone (docs/relate.md): the same function in another basis, a
    fine-tune, a rounded, pruned, cut or widened copy, trained apart, or unrelated.

    The result has `.verdict`, `.evidence` by axis and layer, and `.distance`: Euclidean distance and cosine, by axis,
    layer and tensor. Each is computed when it is first asked for, where the models are read to:
    `symfuse.open(a).on("cuda")`. to: of several models all pairs are related, with a tree, duplicates and merges.
    alignment: of `match(source, to)`, for the distance: both are in its frame, and `.distance.after` is what is left
    once it is applied. quick: the verdict from the first evidence that is sure. `.distance` raises IncompatibleError
    for models of different shapes; the verdict says what was compared.
    """
    if isinstance(to, list | tuple):
        if alignment is not None:
            raise OptionError("an alignment is of two models; leave it out, or relate them one by one")
        models = [model_of(one) for one in (source, *to)]
        pairs = {(i, j): _related(models[i], models[j], None, quick) for i, j in combinations(range(len(models)), 2)}
        return Relations(tuple(models), pairs)
    return _related(model_of(source), model_of(to), alignment, quick)


def _related(source: Model, anchor: Model, alignment: Alignment | None, quick: bool) -> Relation:
    def measure() -> Distance:
        if alignment is None:
            return model_distance(source, anchor)
        framed = model_of(alignment.in_frame(anchor.checkpoint))
        after = model_distance(model_of(alignment(source.checkpoint)), framed)
        return replace(model_distance(model_of(alignment.in_frame(source.checkpoint)), framed), after=after)

    return Relation(source, anchor, measure, quick)


@checked
def evaluate(
    source: Source | Sequence[Source],
    loss: Task | Loss,
    *,
    ensemble: Literal["probabilities", "logits"] = "probabilities",
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Score:
    """Loss and metrics of one model, in evaluation mode; or of a list of models as an ensemble.

    loss, build: as in `barrier`. ensemble: what the mean is taken of; its loss must be a Task that predicts classes.
    device: where it is run, by default where a live module is.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        models = [runnable(one) for one in source]
        return ensemble_models(models, loss, of=ensemble, build=build, dtype=dtype, device=device)
    return evaluate_model(runnable(source), loss, build=build, dtype=dtype, device=device)


@checked
def barrier(
    source: Source,
    to: Source,
    loss: Task | Loss,
    alignments: Mapping[str, Alignment | tuple[Source, Source]] | None = None,
    *,
    baselines: Mapping[str, tuple[str, ...]] | None = None,
    names: tuple[str, str] | None = None,
    points: int = 11,
    refine: int = 2,
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    renew: Task | Iterable[Batch] | None = None,
    progress: Callable[[str, Point, int], None] | None = None,
) -> Barrier:
    """The loss along the straight path from `to` (λ = 0) to `source` (λ = 1): as they are, and under each alignment.

    loss: a Task (`symfuse.task`), or any callable from a live module to one number. alignments: by the name of a curve,
    an alignment of the source, or a pair of models, such as two in another parametrisation. baselines: by the name of
    a curve, those that it is compared with: `{"folded": (fa, fb), "rotation": (g(fa), fb)}, baselines={"rotation":
    ("folded", "none")}`. names: of both models. points: their number, evenly spaced, ends included. refine: how often
    the intervals beside the highest points are halved. build: makes the module of models that `transformers` does not
    have. dtype, device: in which and where it is run. renew:
    a task, or batches, from which running statistics of batch normalisation are recomputed. progress: called with the
    curve, the point that is done, and how many there are at most. The result has `.curves[name].barrier`.
    """
    pairs: dict[str, tuple[Checkpoint | torch.nn.Module, Checkpoint | torch.nn.Module]] = {
        "none": (runnable(source), runnable(to))
    }
    own: dict[str, tuple[str, ...]] = {}
    plains: dict[tuple[str, ...], str] = {}  # what the curve of a frame's plain models is called
    inexact: dict[str, tuple[str, ...]] = {}
    for name, given in (alignments or {}).items():
        if name in pairs:
            raise OptionError(f"an alignment cannot be called {name!r}: there is such a curve without it; rename it")
        if isinstance(given, Alignment):
            inexact[name] = given.variants
            pairs[name] = (given(opened(source)), given.in_frame(opened(to)) if given.frame else runnable(to))
            if given.frame:
                plain = plains.setdefault(given.frame, f"none, frame of {name}" if plains else "none, same frame")
                pairs[plain] = (given.in_frame(opened(source)), given.in_frame(opened(to)))
                own[name] = (plain, "none")
        else:
            pairs[name] = (runnable(given[0]), runnable(given[1]))
    if baselines is None:
        baselines = {name: own.get(name, ("none",)) for name in pairs if name != "none"}
    return path_barrier(
        pairs, loss, baselines=baselines, inexact=inexact, names=names, points=points, refine=refine, build=build,
        dtype=dtype, device=device, renew=renew.batches if isinstance(renew, Task) else renew, progress=progress,
    )  # fmt: skip


@checked
def renew_statistics(source: Source, data: Task | Iterable[Batch], *, build: Build | None = None) -> Checkpoint:
    """The model with the running statistics of its batch normalisation taken anew from data: for merged networks, where
    those that were averaged fit badly (REPAIR; Jordan et al. 2023). Inexact: it computes something else, and a record
    of how it was made says so.

    data: a task, or batches of tensors by the module's inputs, such as `[{"pixel_values": …}]`; labels are not used.
    build: makes the module of models that `transformers` does not have. OptionError for a model without such
    statistics, and for batches that it does not take.
    """
    batches, where = (data.batches, data.source) if isinstance(data, Task) else (list(data), "memory")
    return renewed(opened(source), batches, where, build)


@checked
def task(
    name: str | None,
    data: Any,
    model: Source,
    *,
    encoding: str = "utf-8",
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    tokens_column: str | None = None,
    tags_column: str | None = None,
    image_column: str | None = None,
    query_column: str | None = None,
    positive_column: str | None = None,
    unlabelled: bool | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    seed: int | None = None,
) -> Task:
    """What to evaluate on: a loss that `barrier`, `landscape` and `evaluate` take.

    name: causal-lm, masked-lm, sequence-classification, token-classification, image-classification, retrieval; None:
    what the model's head is made for. data: a path (text, CSV, JSON lines, Parquet, a folder of images), a `datasets`
    object, or a list of dictionaries, one a row; or batches of tensors by the module's inputs, taken as they are, such
    as `[{"pixel_values": …, "labels": …}]` or a `DataLoader` of these. model: whose tokenizer or image processor
    prepares them. …_column: the names of columns, by default "text", "label", "tokens", "tags", "image", "query" and
    "positive"; a pair of texts has a pair_column. unlabelled: do not read labels. limit: take so many rows, drawn by
    the seed (0). batch_size: 16. max_length: of a text in tokens, 256 or the model's. pooling: of embeddings
    (retrieval), "mean", "cls" or "max". Raises DataError, naming file and row; OptionError for an option that the task
    does not have.
    """
    options = options_set({
        "text_column": text_column, "pair_column": pair_column, "label_column": label_column,
        "tokens_column": tokens_column, "tags_column": tags_column, "image_column": image_column,
        "query_column": query_column, "positive_column": positive_column, "unlabelled": unlabelled, "limit": limit,
        "batch_size": batch_size, "max_length": max_length, "pooling": pooling, "seed": seed,
    })  # fmt: skip
    if isinstance(data, Iterable) and not isinstance(data, str | os.PathLike | Mapping) and not _is_dataset(data):
        data = list(data)
        if data and all(isinstance(one, Mapping) and all(isinstance(t, Tensor) for t in one.values()) for one in data):
            return batch_task(name, data, opened_any(model), **options)
    return make_task(name, read_records(data, encoding=encoding), opened(model), **options)


def task_of_models(
    name: str | None, data: str, models: Sequence[Checkpoint], encoding: str, options: Mapping[str, Any]
) -> tuple[Task, list[str]]:
    """A task on data that the first model's tokenizer or image processor reads, and a warning of each other model that
    would read them differently."""
    first, *others = models
    records = read_records(data, encoding=encoding)
    made = make_task(name, records, first, **options)
    warnings = []
    for other in others:
        if _reading(other) == _reading(first):
            continue
        reason = "its tokens or labels have other numbers"
        try:
            same = make_task(made.name, records, other, **options).describe() == made.describe()
        except CheckpointError:  # it has no tokenizer of its own
            continue
        except SymfuseError as error:
            same, reason = False, str(error)
        if not same:
            warnings.append(
                f"{other.name} would read these data differently from {first.name} ({reason}); it gets what "
                f"{first.name} reads"
            )
    return made, warnings


def _reading(checkpoint: Checkpoint) -> tuple[object, ...]:
    """All of a checkpoint that data are read by, but its weights."""
    files = {
        name: data
        for name, data in checkpoint.companions().items()
        if is_of_tokenizer(name) or name == "preprocessor_config.json"
    }
    keys = ("label2id", "num_labels", "vocab_size", "max_position_embeddings", "type_vocab_size", "pad_token_id")
    return (files, *(checkpoint.config.get(key) for key in keys))


def _is_dataset(data: object) -> bool:
    """Whether this is of the library `datasets`, whose rows are read when they are used."""
    return hasattr(data, "column_names")
