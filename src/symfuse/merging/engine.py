"""A merged model as a lazy checkpoint: each tensor is made when it is read, from that tensor of every model."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from symfuse.architectures import Model, require_same_shape
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint, is_finite
from symfuse.merging.base import METHODS, Method


def merge_models(
    models: Sequence[Model],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    base: int = 0,
    heads: str = "average",
) -> Checkpoint:
    """The merge of models of one family, in the frame in which they are: align them first.

    weights: one per model, default equal; scaled to sum to one unless `normalize` is false. base: the index of the
    model from which names, dtypes, config and tokenizer come. heads: what becomes of task heads: "average" (all must
    have the same), "drop", or the name or number (from 1) of the model whose head is kept as it is; that model is then
    the base.
    Sums are accumulated in float64 and rounded once; of aligned models the values before their own rounding are taken.
    Raises IncompatibleError or OptionError before anything is read.
    """
    if method not in METHODS:
        raise OptionError(f"merge method {method!r} is not known; choose from {', '.join(METHODS)}")
    if len(models) < 2:
        raise OptionError(f"a merge needs two models at least, {len(models)} given")
    if not 0 <= base < len(models):
        raise OptionError(f"base {base}: there are models 0 to {len(models) - 1}")
    require_same_shape(models)
    shares = _weights(weights, len(models), normalize)
    kept = _head_model(heads, models)
    template = models[base if kept is None else kept]
    spec = template.spec
    if heads == "average":
        _require_same_heads(models)
    names = [name for name in spec.tensors if heads != "drop" or name not in spec.heads]
    files = {spec.file_name(name): name for name in names}
    merged = _Merged(METHODS[method], models, shares, template, files, frozenset() if kept is None else spec.heads)
    config = dict(template.checkpoint.config)
    if heads == "drop":
        config.pop("architectures", None)  # the class with the head would fill it in at random
    title = " + ".join(f"{share:g}·{model.name}" for share, model in zip(shares, models, strict=True))
    infos = {file: template.checkpoint.info(file) for file in files if file in template.checkpoint}
    sources = [folder for model in models for folder in model.checkpoint.sources]
    return template.checkpoint.replace(tensors=merged, infos=infos, config=config, name=title, sources=sources)


class _Merged(Mapping[str, Tensor]):
    """The merged tensors, each made when it is read."""

    def __init__(
        self,
        method: Method,
        models: Sequence[Model],
        shares: Sequence[float],
        template: Model,
        files: Mapping[str, str],
        copied: frozenset[str],
    ) -> None:
        self.method = method
        # Sums in an order that does not depend on that of the list, so that neither does their rounding.
        self.terms = sorted(zip(shares, models, strict=True), key=lambda term: (term[0], term[1].name))
        self.alike = len({(share, model.name) for share, model in self.terms}) < len(models) > 2
        self.template = template
        self.files = files
        self.copied = copied

    def __getitem__(self, file: str) -> Tensor:
        spec = self.template.spec
        name = spec.tied.get(self.files[file], self.files[file])
        if self.files[file] in self.copied and name == self.files[file]:
            self.template.read(name)  # refuses NaN; the tensor itself is copied as it is stored
            return self.template.checkpoint[file]
        terms = [(share, model.read(name)) for share, model in self.terms]
        if self.alike:
            terms.sort(key=lambda term: (term[0], _content(term[1])))
        tensors = [tensor for _, tensor in terms]
        dtype = self.template.checkpoint.info(file).dtype
        if not all(tensor.is_floating_point() for tensor in tensors):
            return self._equal(name, tensors)
        work = [tensor.double() for tensor in tensors]
        out = self.method.function(work, [share for share, _ in terms]).to(dtype)
        if not is_finite(out):  # the inputs are: Model.read has scanned them
            raise IncompatibleError(
                f"{file}: the merge does not fit in {str(dtype).removeprefix('torch.')}, the dtype of "
                f"{self.template.name}; take a base of a wider dtype, or smaller weights"
            )
        return out

    def _equal(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Integers and booleans never enter arithmetic: they are the same in all models, or the merge is refused."""
        first = tensors[0]
        if any(tensor.dtype != first.dtype or not torch.equal(tensor, first) for tensor in tensors[1:]):
            raise IncompatibleError(
                f"{name}: {first.dtype} tensors differ between the models and cannot be averaged; make them equal, "
                "or remove them if they are derived"
            )
        return first

    def __iter__(self) -> Iterator[str]:
        return (file for file in self.files if file in self.template.checkpoint)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _content(tensor: Tensor) -> int:
    """A checksum: it orders models of one name, such as live modules, by what they hold."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _weights(weights: Sequence[float] | None, count: int, normalize: bool) -> list[float]:
    values = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(values) != count:
        raise OptionError(f"{len(values)} weights for {count} models; give one for each, in the same order")
    if not all(math.isfinite(w) for w in values):
        raise OptionError(f"weights {values}: each must be a finite number")
    if not normalize:
        return values
    try:
        total = math.fsum(values)
    except OverflowError:
        raise OptionError(f"weights {values}: their sum is too large for a number; make them smaller") from None
    if abs(total) < 1e-12 * max(map(abs, values), default=0.0) or total == 0:
        raise OptionError(f"weights {values} sum to zero and cannot be normalised; turn normalisation off")
    if total < 0:
        raise OptionError(f"weights {values} sum to less than zero, so normalising would turn their signs; turn it off")
    return [w / total for w in values]


def _head_model(heads: str, models: Sequence[Model]) -> int | None:
    """The number of the model whose head is taken; None for "average" and "drop"."""
    if heads in ("average", "drop"):
        return None
    found = [i for i, model in enumerate(models) if heads in (model.name, str(i + 1))]
    if len(found) != 1:
        names = ", ".join(f"{i + 1} ({model.name})" for i, model in enumerate(models))
        raise OptionError(f"heads {heads!r}: write average, drop, or the number or name of one model: {names}")
    return found[0]


def _require_same_heads(models: Sequence[Model]) -> None:
    first = models[0]
    for other in models[1:]:
        ours, theirs = (_head_shapes(model) for model in (first, other))
        if ours != theirs:
            differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
            lines = [f"  {name}: {ours.get(name, 'absent')} and {theirs.get(name, 'absent')}" for name in differing[:8]]
            raise IncompatibleError(
                f"the task heads of {first.name} and {other.name} differ:\n" + "\n".join(lines) + "\n"
                "choose `heads`: the number or name of the model whose head is to be kept, or drop"
            )


def _head_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    spec = model.spec
    return {n: spec.tensors[n].layout.shape(spec.sizes) for n in spec.heads if n not in spec.tied}
