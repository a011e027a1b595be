"""How related models are, from a sample of their matrices that is the same at every run.

The thresholds are from tiny Llamas. Two models trained from different seeds are 1.36 norms apart, with cosine -0.01. A
fine-tune is 0.08 to 0.37 norms away from its base (0.6 after retraining that forgets everything), and its delta has
cosine -0.05 to 0.01 with the base. Deltas from a wrong base have norm 1.38, cosine -0.73 with the base and 0.96 with
each other. Deltas of true fine-tunes had cosine 0.03: perpendicular deltas are usual and no reason for a warning.
Vectors are skipped, since gains of norms are near one in unrelated models too.

Weights are compared in their own basis: a model transformed by a symmetry shows no relation here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import torch
from torch import Tensor

from symfuse.errors import SpecError
from symfuse.executors.threads import one_torch_thread
from symfuse.io import Checkpoint, TensorInfo, scan
from symfuse.matching.auto import SAME_BASIS
from symfuse.model import Model
from symfuse.recipes.check.report import Deltas, Relation, Sample
from symfuse.spec import layer_of

TENSORS = 16
BYTES = 16_000_000  # read at most, of all models together
PIECES = 4  # blocks of rows of a matrix
LARGE = 0.5  # of the base's norm: deltas of fine-tunes are smaller


@dataclass(frozen=True)
class Related:
    sample: Sample
    relations: list[Relation]
    deltas: Deltas
    warnings: list[str]


def related(models: Sequence[Model], reference: int, computed: Sequence[bool], *, align: bool) -> Related | None:
    """Read a sample and compare each model with the reference; None if there is nothing to read. CheckpointError for
    NaN in it. models: with the same names, and shapes where they are sampled. computed: whether the tensors of each are
    computed whole when read. align: whether they will be aligned, so that a missing relation needs no warning."""
    names = _names(models, reference)
    share = BYTES // (max(1, min(TENSORS, len(names))) * len(models))
    sampled = _spread([n for n in names if all(_info(m, n).nbytes <= share for m in compress(models, computed))])
    if not sampled or len(models) < 2:
        return None
    others = [i for i in range(len(models)) if i != reference]
    gram = torch.zeros(len(models), len(models), dtype=torch.float64)  # of the reference, then the deltas
    equal = torch.zeros(len(others), 2, dtype=torch.float64)
    entries = rows = nbytes = 0
    with one_torch_thread():  # more threads take longer to start than a piece of the sample
        for name in sampled:
            infos = [_info(model, name) for model in models]
            for start, stop in _ranges(infos[0].shape, share // max(info.dtype.itemsize for info in infos)):
                origin, *parts = (_part(models[i], name, start, stop) for i in (reference, *others))
                vectors = torch.stack([origin, *(part - origin for part in parts)])
                gram += vectors @ vectors.T
                changes = vectors[1:].reshape(len(others), -1, max(1, infos[0].shape[-1]))
                entry, row = changes.flatten(1).count_nonzero(1), changes.abs().amax(2).count_nonzero(1)
                equal += torch.stack([origin.numel() - entry, changes.shape[1] - row], 1)
                entries, rows = entries + origin.numel(), rows + changes.shape[1]
                nbytes += sum(info.dtype.itemsize for info in infos) * origin.numel()
    sample = Sample([models[reference].spec.file_name(n) for n in sampled], len(names), entries, nbytes)
    labels = [models[i].name for i in (reference, *others)]
    shares = equal / torch.tensor([entries, rows])
    relations = [_relation(labels, gram, i, shares[i - 1]) for i in range(1, len(models))]
    deltas = _deltas(labels, gram)
    declared = all(model.declared for model in models)
    return Related(sample, relations, deltas, [] if align else _no_relation(relations, declared))


def task_warnings(deltas: Deltas) -> list[str]:
    """Warnings of deltas that are too large for a fine-tune of the base."""
    out = []
    for model, norm, cosine in zip(deltas.models, deltas.norms, deltas.with_base, strict=True):
        if norm is None or norm <= LARGE:
            continue
        foreign = cosine is not None and cosine < -SAME_BASIS
        why = f" and points away from it (cosine {cosine:.2f})" if foreign else ""
        out.append(
            f"the task vector of {model} has {norm:.2f} times the norm of the base {deltas.base}{why}; those of "
            f"fine-tunes in the basis of their base stay below {LARGE:g}. Is {deltas.base} the model that {model} was "
            "trained from, and was neither of them transformed by a symmetry?"
        )
    return out


def require_aliases(checkpoint: Checkpoint, aliases: Mapping[str, str]) -> None:
    """SpecError if a stored alias differs, in the sample, from the tensor that it is tied to. aliases: names in the
    file."""
    for alias, name in aliases.items():
        info = checkpoint.info(alias)
        for start, stop in _ranges(info.shape, BYTES // (2 * PIECES * max(1, len(aliases)) * info.dtype.itemsize)):
            if not torch.equal(checkpoint.part(alias, start, stop), checkpoint.part(name, start, stop)):
                raise SpecError(
                    f"{checkpoint.name}: {alias} is tied to {name} by config.json (tie_word_embeddings) or its family, "
                    "but the stored tensors differ; set tie_word_embeddings to false to use both, or remove the first"
                )


def _names(models: Sequence[Model], reference: int) -> list[str]:
    """The matrices that all models store in one shape, layer by layer."""
    out = []
    for name, declared in models[reference].spec.tensors.items():
        if all(name in m.spec.tensors and m.spec.file_name(name) in m.whole for m in models):
            infos = [_info(model, name) for model in models]
            matrix = len(infos[0].shape) > 1 and infos[0].numel > 0
            if matrix and len({i.shape for i in infos}) == 1 and all(i.dtype.is_floating_point for i in infos):
                layer = layer_of(declared.index)
                out.append((-1 if layer is None else layer, name))
    return [name for _, name in sorted(out)]


def _info(model: Model, name: str) -> TensorInfo:
    return model.whole.info(model.spec.file_name(name))


def _spread(names: Sequence[str]) -> list[str]:
    """At most TENSORS of them: one of each stretch, at varying positions, so that all kinds of matrices occur."""
    if len(names) <= TENSORS:
        return list(names)
    edges = [i * len(names) // TENSORS for i in range(TENSORS + 1)]
    return [names[a + (11 * i) % (b - a)] for i, (a, b) in enumerate(pairwise(edges))]


def _ranges(shape: Sequence[int], entries: int) -> Iterator[tuple[int, int]]:
    """Flat ranges of whole rows spread over the matrix: about that many entries in total, at least a row per range."""
    columns = max(1, shape[-1])
    rows, wanted = math.prod(shape) // columns, max(1, entries // columns)
    if wanted >= rows:
        yield 0, rows * columns
        return
    pieces = min(PIECES, wanted)
    length = wanted // pieces
    for i in range(pieces):
        first = i * (rows - length) // max(1, pieces - 1)
        yield first * columns, (first + length) * columns


def _part(model: Model, name: str, start: int, stop: int) -> Tensor:
    file = model.spec.file_name(name)
    part = model.whole.part(file, start, stop)
    scan(file, part, f"{model.name}/{model.whole.where(file)}")
    return part.double()


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _relation(labels: Sequence[str], gram: Tensor, i: int, shares: Tensor) -> Relation:
    origin, delta, both = float(gram[0, 0]), float(gram[i, i]), float(gram[0, i])
    own = math.sqrt(max(0.0, origin + 2 * both + delta))
    return Relation(
        labels[i],
        labels[0],
        _ratio(math.sqrt(delta), math.sqrt(origin)),
        _ratio(origin + both, math.sqrt(origin) * own),
        float(shares[0]),
        float(shares[1]),
    )


def _deltas(labels: Sequence[str], gram: Tensor) -> Deltas:
    norms = gram.diagonal().sqrt().tolist()

    def cosine(i: int, j: int) -> float | None:
        return _ratio(float(gram[i, j]), norms[i] * norms[j])

    each = range(1, len(labels))
    return Deltas(
        base=labels[0],
        models=list(labels[1:]),
        norms=[_ratio(norms[i], norms[0]) for i in each],
        correlations=[[cosine(i, j) for j in each] for i in each],
        with_base=[cosine(i, 0) for i in each],
    )


def _no_relation(relations: Sequence[Relation], declared: bool) -> list[str]:
    way = "; align them first, if they are not (--align auto, or `align: {}` in a recipe)" if declared else ""
    return [
        f"{r.model} and {r.reference} have no relation in this basis (cosine {r.cosine:.2f}, distance {r.distance:.2f} "
        "of the norm in the sample): they were trained apart, or one was transformed by a symmetry; a merge without "
        f"alignment is mostly worse than each{way}"
        for r in relations
        if r.cosine is not None and r.distance is not None and r.cosine < SAME_BASIS
    ]
