"""A merged model as a lazy checkpoint: each tensor is computed when it is read, block by block, from those of all
models."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from symfuse.architectures.names import BEFORE_LAYERS
from symfuse.device import CPU, require
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint, TensorInfo, is_finite, scan
from symfuse.io.lazy import Lazy
from symfuse.io.live import counts_batches
from symfuse.io.tensors import require_fit
from symfuse.merging.base import Method, Parameter
from symfuse.merging.stream import Source, Statistic, Stream
from symfuse.model import Model
from symfuse.spec import BEHIND, Spec, layer_of

# The value of a parameter in a recipe, as a function of the model in the slice (by position; None: of all), the tensor,
# and the depth (0 the first layer, 1 the last).
Resolve = Callable[[Parameter, int | None, str, float], Any]


@dataclass(frozen=True)
class Slice:
    """Consecutive layers of the output: from each of `models` (numbers) the same number of layers, beginning at its
    `starts`. base: the position among the models of the one from which task vectors start."""

    models: tuple[int, ...]
    starts: tuple[int, ...]
    length: int
    base: int | None
    resolve: Resolve


@runtime_checkable
class Learnt(Protocol):
    """What a method learned from data (`symfuse.methods`), by the number of a model and a canonical name."""

    def value(self, parameter: str, model: int, name: str) -> float | None:
        """Of a parameter that has one for each model: where the user sets none, or the method ignores it."""

    def statistic(self, model: int, name: str) -> Statistic | None:
        """The properties of the stream of that tensor."""


@dataclass(frozen=True)
class Term:
    """One model's tensor from which an output tensor is computed. file: its name there."""

    checkpoint: Checkpoint
    file: str

    @property
    def info(self) -> TensorInfo:
        return self.checkpoint.info(self.file)

    @property
    def stored(self) -> bool:
        """Whether the values come from a file: computed ones have more digits than their dtype."""
        return self.checkpoint.file_of(self.file) is not None

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.checkpoint.name}/{self.checkpoint.where(self.file)}" if self.stored else self.checkpoint.name

    @property
    def label(self) -> str:
        """The folder's own name, by which random numbers are seeded: independent of where the folder is."""
        return PurePath(self.checkpoint.name).name

    def source(self) -> Source:
        return Source(partial(self.checkpoint.part, self.file), self.label, self.where)


@dataclass(frozen=True)
class Output:
    """The plan of one tensor of the merged model. method None: a copy of the only term."""

    info: TensorInfo
    terms: tuple[Term, ...]
    base: Term | None = None
    method: Method | None = None
    parameters: Mapping[str, Any] | None = None
    statistics: tuple[Statistic | None, ...] = ()

    @property
    def inputs(self) -> tuple[Term, ...]:
        """All terms, the base last."""
        return self.terms if self.base is None else (*self.terms, self.base)


class Merged(Lazy):
    """The merged tensors by name, in order; `blocks` streams one, unrounded. device: where blocks are combined."""

    def __init__(self, outputs: Mapping[str, Output], *, seed: int = 0, device: str = CPU) -> None:
        super().__init__({name: output.info for name, output in outputs.items()})
        self.outputs = dict(outputs)
        self.seed = seed
        self.device = require(device)

    def __getitem__(self, name: str) -> Tensor:
        wide, dtype = self.wide(name), self.infos[name].dtype
        require_fit(name, wide, dtype)
        return wide.to(dtype)

    def wide(self, name: str) -> Tensor:
        """The whole tensor in the working dtype."""
        blocks = [block.reshape(-1) for block in self.blocks(name)]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).reshape(self.infos[name].shape)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor in blocks, in the working dtype; the writer rounds them."""
        output = self.outputs[name]
        if not all(term.info.dtype.is_floating_point for term in output.inputs):
            yield _equal(name, output)
        elif output.method is None:
            for block in output.terms[0].checkpoint.blocks(output.terms[0].file):
                scan(output.terms[0].file, block, output.terms[0].where)
                yield block
        else:
            yield from self._merged(name, output, output.method)

    def saved(self, name: str) -> Iterator[Tensor]:
        return self.blocks(name)

    def _merged(self, name: str, output: Output, method: Method) -> Iterator[Tensor]:
        """Run the method: in float64, or first in float32 if all inputs are of half precision. A block that is not
        finite in float32 (a difference of large entries, or a quotient by small weights, may overflow where the merge
        does not) is computed again in float64, as are all blocks after it. IncompatibleError if a block overflows in
        float64 too."""
        half = all(term.info.dtype.itemsize <= 2 and term.stored for term in output.inputs)
        done = 0
        for dtype in [torch.float32, torch.float64] if half else [torch.float64]:
            stream = self._stream(name, output, dtype)
            blocks = stream.fetched(method(stream, output.parameters or {}))
            rounded = dtype == torch.float64 != output.info.dtype  # and checked by the writer
            for block in islice(blocks, done, None):
                if not (rounded or is_finite(block)):
                    break
                yield block
                done += 1
            else:
                return
        raise IncompatibleError(f"{name}: the merge does not fit in torch.float64; take smaller weights")

    def _stream(self, name: str, output: Output, dtype: torch.dtype) -> Stream:
        order = _order(output)
        return Stream(
            name,
            output.info.shape,
            [output.terms[i].source() for i in order],
            None if output.base is None else output.base.source(),
            dtype=dtype,
            seed=self.seed,
            device=self.device,
            statistics=[output.statistics[i] for i in order] if output.statistics else (),
        )


def _order(output: Output) -> list[int]:
    """The terms; models of one name with equal parameters, such as live modules, are ordered by content."""
    keys = [_alike(output, i) for i in range(len(output.terms))]
    if len(set(keys)) == len(keys):
        return list(range(len(keys)))
    size = math.prod(output.info.shape)
    content = [zlib.crc32(_bytes(term.checkpoint.part(term.file, 0, size))) for term in output.terms]
    return sorted(range(len(keys)), key=lambda i: (keys.index(keys[i]), content[i]))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _alike(output: Output, i: int) -> tuple[Any, ...]:
    per_model = [values[i] for values in (output.parameters or {}).values() if isinstance(values, list)]
    return (output.terms[i].label, *per_model)


def merge_slices(
    models: Sequence[Model],
    method: Method,
    slices: Sequence[Slice],
    *,
    template: int = 0,
    dtype: torch.dtype | None = None,
    skip: frozenset[str] = frozenset(),
    copy: frozenset[str] = frozenset(),
    layer: Callable[[Spec, str], int | None] | None = None,
    learned: Learnt | None = None,
) -> dict[str, Output]:
    """The plan of a merge: every output tensor, by its name in files, with its terms.

    models: all with the same tensors (see `require_same_shape`), except for the number of layers. template: the number
    of the model that determines names and, without a `dtype`, dtypes. skip: canonical names that are left out; copy:
    those that are copied from the template. layer: of a tensor, by its canonical name; default: as in the Spec.
    learned: the result of the method's `learn`. Raises OptionError for a number of models that the method does not
    accept, and for missing parameters.
    """
    for part in slices:
        _require_count(method, part)
    outputs: dict[str, Output] = {}
    tried: set[str] = set()
    layer = layer or _layer
    for part, name, shift, t in _places(models, slices, template, layer):
        if name in skip:
            continue
        reference = _reference(part, template)
        spec = models[part.models[reference]].spec
        file = _output_name(models[template].spec, spec, name, layer(spec, name), shift)
        if name in copy:
            term = Term(models[template].checkpoint, models[template].spec.file_name(name))
            outputs[file] = Output(typed(term.info, dtype), (term,))
            continue
        source, layered = spec.tied.get(name, name), layer(spec, name) is not None
        starts = part.starts if layered else [_behind(models[number].spec, spec, name) for number in part.models]
        names = {i: _shifted(source, start - starts[reference]) for i, start in enumerate(starts)}
        terms = {i: _term(models[number], names[i]) for i, number in enumerate(part.models)}
        base = None if part.base is None or method.base == "unused" else terms.pop(part.base)
        of_template = next((terms[i] for i in terms if part.models[i] == template), None)
        info = typed((base or of_template or next(iter(terms.values()))).info, dtype)
        _require_shape(file, [*terms.values(), *([base] if base else [])])
        order, parameters = _resolved(method, part, terms, names, file, t, learned)
        if (key := repr((len(terms), base is None, parameters))) not in tried:
            _try(method, file, [terms[i].checkpoint.name for i in order], base is not None, parameters)
            tried.add(key)
        known = () if learned is None else tuple(learned.statistic(part.models[i], names[i]) for i in order)
        outputs[file] = Output(info, tuple(terms[i] for i in order), base, method, parameters, known)
    return outputs


def typed(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    """In that dtype, if one is requested and the tensor is floating-point."""
    return info if dtype is None or not info.dtype.is_floating_point else replace(info, dtype=dtype)


def set_dtype(config: dict[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """The dtype of most of the values; classes of diffusers refuse such a field."""
    sizes: Counter[torch.dtype] = Counter()
    for info in infos.values():
        if info.dtype.is_floating_point:
            sizes[info.dtype] += info.numel
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if sizes and "_class_name" not in config:
        config[key] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def describe(outputs: Mapping[str, Output]) -> str:
    """A merge in one line: for linear the sum, with the effective weights; for others the method's name.

    Weights that differ between tensors are left out.
    """
    merged = [output for output in outputs.values() if output.method is not None]
    if not merged:
        return "copy"
    first = merged[0]
    shares = {tuple(effective_weights(output) or ()) for output in merged}
    names = [term.checkpoint.name for term in first.terms]
    weights = next(iter(shares)) if len(shares) == 1 and any(next(iter(shares))) else ()
    terms = [f"{w:g}·{name}" for w, name in zip(weights, names, strict=True)] if weights else names
    base = "" if first.base is None else f"; base {first.base.checkpoint.name}"
    text = (" + " if weights else ", ").join(terms)
    assert first.method is not None
    return text if first.method.name == "linear" and weights else f"{first.method.name}({text}{base})"


def effective_weights(output: Output) -> list[float] | None:
    """The weights in the order of the terms, divided by their sum if the method does that; None without weights."""
    values = output.parameters or {}
    if "samples" in values:
        total = sum(values["samples"])
        return [count / total for count in values["samples"]] if total else None
    if "weight" not in values:
        return None
    total = sum(values["weight"])
    normalize = values.get("normalize", values.get("normalize_weights", False)) and abs(total) > 1e-12
    return [w / total for w in values["weight"]] if normalize else list(values["weight"])


def _require_count(method: Method, part: Slice) -> None:
    apart = method.base != "unused" and part.base is not None
    if method.base == "required" and part.base is None:
        raise OptionError(
            f"{method.name} needs a base model, which the others are compared to: --base, or base_model in a recipe"
        )
    least, most = method.models
    count = len(part.models) - apart
    if count < least or (most is not None and count > most):
        number = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
        raise OptionError(
            f"{method.name} takes {number} model{'s' if most != 1 else ''}{' beside the base' * apart}, {count} given"
        )


def _reference(part: Slice, template: int) -> int:
    """The position of the model whose tensors determine the output's: the template, if it is in the slice."""
    return part.models.index(template) if template in part.models else 0


def _places(
    models: Sequence[Model], slices: Sequence[Slice], template: int, layer: Callable[[Spec, str], int | None]
) -> Iterator[tuple[Slice, str, int, float]]:
    """Every output tensor: its slice, its canonical name in the slice's reference model, the number of layers by which
    its layer changes, and its depth in the slice (from 0 to 1).

    Where slices come from different models, tensors before the layers come from the first slice, the others from the
    last.
    """

    def stored(part: Slice) -> Iterator[tuple[str, int | None]]:
        model = models[part.models[_reference(part, template)]]
        for name in model.spec.tensors:
            if model.spec.file_name(name) in model.checkpoint:
                yield name, layer(model.spec, name)

    def is_embedding(part: Slice, name: str) -> bool:
        index = models[part.models[_reference(part, template)]].spec.tensors[name].index
        return BEFORE_LAYERS.search(name) is not None and BEHIND not in index

    first, last = slices[0], slices[-1]
    yield from ((first, name, 0, 0.0) for name, at in stored(first) if at is None and is_embedding(first, name))
    depth = 0
    for part in slices:
        start = part.starts[_reference(part, template)]
        by_layer: dict[int, list[str]] = {}
        for name, at in stored(part):
            if at is not None:
                by_layer.setdefault(at, []).append(name)
        for offset in range(part.length):
            t = offset / (part.length - 1) if part.length > 1 else 1.0
            yield from ((part, name, depth - start, t) for name in by_layer.get(start + offset, ()))
        depth += part.length
    spec = models[last.models[_reference(last, template)]].spec
    for name, at in stored(last):
        if at is None and not is_embedding(last, name):
            number = depth - _behind(spec, spec, name) if BEHIND in spec.tensors[name].index else 0
            yield last, name, number, 0.0


def _behind(spec: Spec, of: Spec, name: str) -> int:
    """The number of layers of a model before a tensor that follows the last layer; 0 for all other tensors."""
    return spec.depth if BEHIND in of.tensors[name].index else 0


def _shifted(name: str, by: int) -> str:
    """The same tensor `by` layers further on: the first number of the name is the layer's."""
    return name if by == 0 else re.sub(r"(^|\.)(\d+)(?=\.)", lambda m: f"{m[1]}{int(m[2]) + by}", name, count=1)


def _layer(spec: Spec, name: str) -> int | None:
    return layer_of(spec.tensors[name].index)


def _output_name(template: Spec, reference: Spec, name: str, at: int | None, shift: int) -> str:
    """The name in the output's files: as in the template, which may have fewer layers. at: its layer."""
    own = _shifted(name, -(at or 0))
    if own in template.tensors:
        return _shifted(template.file_name(own), (at or 0) + shift)
    return _shifted(reference.file_name(name), shift)


def _term(model: Model, name: str) -> Term:
    file = model.spec.file_name(model.spec.tied.get(name, name))
    if file not in model.checkpoint:
        raise IncompatibleError(
            f"{model.name} has no tensor {file}, and the layer that it is merged with has one like it; pair layers of "
            "one kind"
        )
    return Term(model.checkpoint, file)


def _require_shape(file: str, terms: Sequence[Term]) -> None:
    for term in terms[1:]:
        if term.info.shape != terms[0].info.shape:
            raise IncompatibleError(
                f"{file}: {list(terms[0].info.shape)} in {terms[0].checkpoint.name}, {list(term.info.shape)} in "
                f"{term.checkpoint.name}; tensors of different shapes cannot be merged"
            )


def _resolved(
    method: Method,
    part: Slice,
    terms: Mapping[int, Term],
    names: Mapping[int, str],
    file: str,
    t: float,
    learned: Learnt | None,
) -> tuple[list[int], dict[str, Any]]:
    """The order of the models, which does not depend on that of the list, so that neither does the sums' rounding; and
    the value of each parameter."""

    def value(parameter: Parameter, model: int | None, tensor: str) -> Any:
        result = part.resolve(parameter, model, tensor, t)
        if learned is not None and model is not None and (result is None or parameter.name in method.ignored):
            result = learned.value(parameter.name, part.models[model], names[model])
        result = parameter.default if result is None else result
        if result is None:
            raise OptionError(
                f"{method.name} needs a value for {parameter.name}, and {file} has none: `parameters: "
                f"{{{parameter.name}: 0.5}}` in a recipe, --set {parameter.name}=0.5, or as an argument"
            )
        return result

    each = {i: {p.name: value(p, i, terms[i].file) for p in method.parameters.values() if p.per_model} for i in terms}
    order = sorted(terms, key=lambda i: (*each[i].values(), terms[i].label))
    values: dict[str, Any] = {}
    for p in method.parameters.values():
        if p.name in method.learned:  # which has had its effect
            continue
        values[p.name] = [each[i][p.name] for i in order] if p.per_model else value(p, None, file)
    return order, values


def _try(method: Method, file: str, models: Sequence[str], base: bool, parameters: Mapping[str, Any]) -> None:
    """Run the method on a tensor without elements, so that it reports errors in its parameters before any work."""
    empty = torch.empty(0)
    stream = Stream(file, (0, 1), [Source.of(empty, m) for m in models], Source.of(empty) if base else None)
    for _ in method(stream, parameters):
        pass


def _equal(name: str, output: Output) -> Tensor:
    """Integers and booleans are not averaged: they must be equal in all models. Of the counters of batch normalisation
    the largest is used."""
    first, *others = (term.checkpoint[term.file] for term in output.inputs)
    if counts_batches(name):
        return torch.stack([first, *others]).amax(0)
    if any(tensor.dtype != first.dtype or not torch.equal(tensor, first) for tensor in others):
        raise IncompatibleError(
            f"{name}: {first.dtype} tensors differ between the models and cannot be averaged; make them equal, "
            "or remove them if they are derived"
        )
    return first
