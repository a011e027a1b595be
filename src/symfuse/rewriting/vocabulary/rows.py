"""Models rewritten into another vocabulary, lazily: rows gathered by index arrays, a block at a time.

No matrix of vocabulary × vocabulary is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten, Rule
from symfuse.rewriting.vocabulary.build import CENTRE, MEAN, Vocabulary
from symfuse.rewriting.vocabulary.tokenizer import size_holder

BLOCK = 2**21  # elements

VocabTensors = Callable[[Checkpoint], Mapping[str, int]]


def rewrite(checkpoints: Sequence[Checkpoint], vocabulary: Vocabulary, vocab_tensors: VocabTensors) -> list[Checkpoint]:
    """The same models with the rows of the output's vocabulary; tensors are computed when read.

    vocabulary: made for these models. vocab_tensors: for each model, the tensors that have a dimension of the
    vocabulary (embedding, head, the head's bias), and the number of that dimension. Other tensors do not change, and in
    the config only `vocab_size` and the special ids. The dtype of each model stays. CheckpointError if a tensor does
    not have the number of rows in the config, IncompatibleError if tensors do not fit together.
    """
    dims = [dict(vocab_tensors(checkpoint)) for checkpoint in checkpoints]
    for checkpoint, named, size in zip(checkpoints, dims, vocabulary.sizes, strict=True):
        _check_rows(checkpoint, named, size)
    folders = [folder for checkpoint in checkpoints for folder in checkpoint.sources]
    out = []
    for model, checkpoint in enumerate(checkpoints):
        config = _config(checkpoint, vocabulary)
        if vocabulary.unchanged(model):
            out.append(checkpoint.replace(config=config))
            continue
        of = _Model(checkpoints, dims, model, vocabulary)
        rules = {name: _Rows(of, name).rule() if name in of.dims else name for name in checkpoint}
        out.append(checkpoint.replace(tensors=Rewritten(checkpoint, rules), config=config, sources=folders))
    return out


def _check_rows(checkpoint: Checkpoint, dims: Mapping[str, int], size: int) -> None:
    for name, dim in dims.items():
        shape = checkpoint.info(name).shape
        if shape[dim] != size:
            raise CheckpointError(
                f"{checkpoint.name}: {name} has {shape[dim]} rows for the vocabulary, but vocab_size in its config is "
                f"{size}. Correct the config, or save the model again."
            )


def _config(checkpoint: Checkpoint, vocabulary: Vocabulary) -> dict[str, Any]:
    """The config with the output's number of rows and its special ids, wherever it says them."""
    config = dict(checkpoint.config)
    holder = size_holder(checkpoint.name, config)
    changed = {**holder, "vocab_size": vocabulary.size}
    changed |= {key: value for key, value in vocabulary.special.items() if key in holder}
    if holder is config:
        return changed
    config |= {key: value for key, value in vocabulary.special.items() if key in config}
    return {**config, "text_config": changed}


class _Rows:
    """One tensor of a model in the output's vocabulary."""

    def __init__(self, of: _Model, name: str) -> None:
        self.of = of
        self.name = name
        self.size = of.vocabulary.size
        self.dim = of.dims[name]
        self.dtype = of.wide(name)

    def rule(self) -> Rule:
        info = self.of.infos[self.name]
        return Rule(info, partial(self._whole, self.dtype), partial(self._whole, info.dtype), self._part, self._blocks)

    def _blocks(self) -> Iterator[Tensor]:
        """Unrounded, some rows at a time, in order; a tensor whose rows are not its first dimension comes as a
        whole."""
        if self.dim != 0:
            yield self._whole(self.dtype)
            return
        gather = _Gather(self.of, self.name, 0, self.size)
        for first, last in gather.steps():
            yield gather.take(first, last, self.dtype)

    def _part(self, start: int, stop: int) -> Tensor:
        """Computed only from the rows that it needs."""
        columns = math.prod(self.of.infos[self.name].shape[1:])
        if self.dim != 0 or start >= stop or columns == 0:
            return self._whole(self.dtype).reshape(-1)[start:stop]
        first, last = start // columns, -(-stop // columns)
        block = _Gather(self.of, self.name, first, last).take(first, last, self.dtype)
        return block.reshape(-1)[start - first * columns : stop - first * columns]

    def _whole(self, dtype: torch.dtype) -> Tensor:
        gather = _Gather(self.of, self.name, 0, self.size)
        out = torch.empty((self.size, *gather.rest), dtype=dtype)
        for first, last in gather.steps():
            out[first:last] = gather.take(first, last, dtype)
        return out.movedim(0, self.dim).contiguous()


class _Model:
    """One of the models to be rewritten into the output's vocabulary, with the other models, from which it gets
    rows."""

    def __init__(
        self, models: Sequence[Checkpoint], dims: Sequence[Mapping[str, int]], model: int, vocabulary: Vocabulary
    ) -> None:
        self.models = models
        self.all_dims = dims
        self.dims = dims[model]
        self.model = model
        self.source = models[model]
        self.vocabulary = vocabulary
        self.infos: dict[str, TensorInfo] = {name: self._info(name) for name in self.source}
        self.partners = {(name, other): self._partner(name, other) for other in self._donors() for name in self.dims}
        self.centres: dict[str, Tensor] = {}

    def _info(self, name: str) -> TensorInfo:
        info = self.source.info(name)
        if name not in self.dims:
            return info
        shape = list(info.shape)
        shape[self.dims[name]] = self.vocabulary.size
        return TensorInfo(info.dtype, tuple(shape))

    def wide(self, name: str) -> torch.dtype:
        """The dtype in which rows are computed."""
        return torch.promote_types(self.infos[name].dtype, torch.float32)

    def _donors(self) -> set[int]:
        """The models from which this one gets rows."""
        rows, donors = self.vocabulary.rows, self.vocabulary.donors
        absent = rows[self.model] < 0
        averaged = absent & (donors == MEAN)
        several = {model for model, index in rows.items() if (index[averaged] >= 0).any()}
        return several | {model for model in set(donors[absent].tolist()) if model >= 0}

    def _partner(self, name: str, model: int) -> str:
        """The tensor of another model that corresponds to `name`: of the same name, up to a prefix, and the same
        width."""
        other, dims = self.models[model], self.all_dims[model]
        names = [n for n in dims if n == name] or [n for n in dims if n.endswith(f".{name}") or name.endswith(f".{n}")]
        if len(names) != 1:
            raise IncompatibleError(
                f"{self.source.name}: {name} needs rows of {other.name}, which has no such tensor with a dimension of "
                f"the vocabulary (it has {', '.join(dims) or 'none'}). If its head is tied, untie it."
            )
        mine, theirs = self.rest(name), _without(other.info(names[0]).shape, dims[names[0]])
        if mine != theirs:
            raise IncompatibleError(
                f"{name}: {other.name} has rows of shape {list(theirs)}, {self.source.name} of {list(mine)}; models of "
                "different widths cannot be merged"
            )
        return names[0]

    def rest(self, name: str) -> tuple[int, ...]:
        """The shape of a row."""
        return _without(self.infos[name].shape, self.dims[name])

    def pick(self, name: str, rows: Tensor, donor: int | None = None) -> Tensor:
        """These rows of the model's tensor, or of the corresponding one of a donor: (rows, …)."""
        if donor is None:
            return _pick(self.source, name, self.dims[name], rows)
        partner = self.partners[name, donor]
        return _pick(self.models[donor], partner, self.all_dims[donor][partner], rows)

    def centre(self, name: str) -> Tensor:
        """The mean of the rows that are not filled with it, in float64."""
        if name not in self.centres:
            gather = _Gather(self, name, 0, self.vocabulary.size, centres=False)
            real = (self.vocabulary.rows[self.model] >= 0) | (self.vocabulary.donors != CENTRE)
            total = torch.zeros(gather.rest, dtype=torch.float64)
            for first, last in gather.steps():
                total += gather.take(first, last, self.wide(name))[real[first:last]].double().sum(0)
            self.centres[name] = total / real.sum().clamp(min=1)
        return self.centres[name]


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _pick(checkpoint: Checkpoint, name: str, dim: int, rows: Tensor) -> Tensor:
    """Rows of a tensor along a dimension, which comes first: as they are in its file, or before rounding.

    Rows that lie close together are read without the others; those that are scattered through a map of the file,
    which is freed at once, so that its pages do not add up.
    """
    shape = checkpoint.info(name).shape
    first, last = int(rows.min()), int(rows.max()) + 1
    columns = math.prod(shape) // shape[dim]
    if dim == 0 and last - first <= 2 * len(rows):
        span = checkpoint.part(name, first * columns, last * columns)
        return span.reshape(last - first, *shape[1:])[rows - first]
    whole = checkpoint[name] if checkpoint.file_of(name) else checkpoint.part(name, 0, math.prod(shape)).reshape(shape)
    return whole.movedim(dim, 0)[rows]


class _Gather:
    """Output rows first..last of one tensor: rows that the model lacks are read at once, one donor after the other, its
    own on demand."""

    def __init__(self, of: _Model, name: str, first: int, last: int, *, centres: bool = True) -> None:
        self.of = of
        self.name = name
        self.first = first
        self.last = last
        self.rest = of.rest(name)
        self.index = of.vocabulary.rows[of.model][first:last]
        self.absent = self.index < 0
        self.place = self.absent.cumsum(0) - 1  # in `fill`, of rows that are absent
        self.fill = self._fill(centres)

    def steps(self) -> Iterator[tuple[int, int]]:
        step = max(1, BLOCK // max(1, math.prod(self.rest)))
        for start in range(self.first, self.last, step):
            yield start, min(self.last, start + step)

    def take(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        here = slice(first - self.first, last - self.first)
        absent = self.absent[here]
        if not absent.any():
            return self.of.pick(self.name, self.index[here]).to(dtype)
        out = torch.empty((last - first, *self.rest), dtype=dtype)
        if not absent.all():
            out[~absent] = self.of.pick(self.name, self.index[here][~absent]).to(dtype)
        out[absent] = self.fill[self.place[here][absent]].to(dtype)
        return out

    def _fill(self, centres: bool) -> Tensor:
        """The values of absent rows, in order."""
        vocabulary = self.of.vocabulary
        here = slice(self.first, self.last)
        donors, donor_rows = vocabulary.donors[here][self.absent], vocabulary.donor_rows[here][self.absent]
        dtype = self.of.wide(self.name)
        fill = torch.zeros((len(donors), *self.rest), dtype=dtype)
        for model in sorted(set(donors.tolist())):
            from_model = donors == model
            if model >= 0:
                fill[from_model] = self.of.pick(self.name, donor_rows[from_model], model).to(dtype)
            elif model == MEAN:
                fill[from_model] = self._mean(self.absent.nonzero().flatten()[from_model] + self.first, dtype)
            elif model == CENTRE and centres:
                fill[from_model] = self.of.centre(self.name).to(dtype)
        return fill

    def _mean(self, output_rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean over the models that have a row."""
        total = torch.zeros((len(output_rows), *self.rest), dtype=dtype)
        count = torch.zeros(len(output_rows), dtype=dtype)
        for model, index in self.of.vocabulary.rows.items():
            has = index[output_rows] >= 0
            if has.any():
                total[has] += self.of.pick(self.name, index[output_rows][has], model).to(dtype)
                count += has
        return total / count.reshape(-1, *[1] * len(self.rest))
