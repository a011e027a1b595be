"""The diagonal of the Fisher information of a live module: the mean over examples of the squared gradient of
−log p(y|x) (Matena & Raffel 2022, Equation 4; with sampled labels the expected, with given ones the empirical Fisher).

The gradient of each example is squared. The square of a batch's mean gradient, which one backward pass gives, is
another number: it shrinks with the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from symfuse.errors import CheckpointError, DataError, IncompatibleError, OptionError
from symfuse.io import is_finite
from symfuse.stats.per_example import Meetings, NotCovered, add_squares

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
_STEP = 2**18  # numbers that are compared at a time: they stay in the cache


@dataclass(frozen=True)
class FisherDiagonal:
    """tensors: by the names of `named_parameters`, the mean squared gradient, float32, on the processor. count: of
    examples. notes: why examples were taken one by one, where they were."""

    tensors: Mapping[str, Tensor]
    count: int
    notes: tuple[str, ...] = ()


def fisher_diagonal(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    parameters: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> FisherDiagonal:
    """The mean over all examples of the squared gradient of each example's loss, in evaluation mode.

    batches: examples are the rows of every field, and independent of each other. loss: the sum over the rows of a batch
    of −log p(y|x), a scalar with its graph; the same each time (sampled labels are a field of the batch). parameters:
    names of `named_parameters`, by default all, each tied tensor once. progress: called with the examples done.

    Gradients of all examples of a batch come from one backward pass (`symfuse.stats.per_example`). On the first two
    examples that lie in one batch this is compared, for every parameter, with a pass for each of them; where it
    differs, or a parameter is used in a way that does not split into examples, examples are taken one by one: exact as
    well, and slower. A note says so.

    Memory: one float32 number for each parameter (float64 for a float64 module), what a backward pass holds of one
    batch, and while the two examples are compared twice the parameters more. The module is left as it was.

    Raises DataError without examples or if fields differ in their rows, OptionError for unknown parameters or a loss
    that is no scalar, CheckpointError for a loss or gradient that is not finite.
    """
    wanted = _wanted(module, parameters)
    taken = _Taken(module, loss, wanted)
    with _evaluating(module, wanted):
        for number, batch in enumerate(batches):
            taken.add(batch, number)
            if progress is not None:
                progress(taken.count)
    if not taken.count:
        raise DataError("there are no examples to take the Fisher information of; give at least one batch with a row")
    tensors = {name: total.div_(taken.count).float().cpu() for name, total in taken.sums.items()}
    for name, tensor in tensors.items():
        _require_finite(name, tensor, "over all batches")
    return FisherDiagonal(tensors, taken.count, tuple(taken.notes))


@dataclass
class _Taken:
    """Sums over the examples so far, and whether further ones can be added by batches."""

    module: nn.Module
    loss: Loss
    wanted: Mapping[str, nn.Parameter]
    count: int = 0
    notes: list[str] = field(default_factory=list)
    meetings: Meetings | None = None  # of the two examples of which batches were compared with one by one
    one_by_one: bool = False

    def __post_init__(self) -> None:
        self.sums = _zeros(self.wanted)

    def add(self, batch: Batch, number: int) -> None:
        size, start = _size(batch, number), 0
        if size > 1 and self.meetings is None and not self.one_by_one:
            self._compare(_rows(batch, 0, 2), number)
            start = 2
        if size - start > 1 and not self.one_by_one:
            try:
                self._add_together(self.sums, _rows(batch, start, size), size - start, number, self.meetings)
                start = size
            except NotCovered as error:
                self._note(f"in some batches {error}")
        self._add_each(self.sums, _rows(batch, start, size), size - start, number)
        self.count += size
        for name, total in self.sums.items():
            _require_finite(name, total, f"in batch {number}")

    def _compare(self, batch: Batch, number: int) -> None:
        """Add two examples one by one, and compare with the result of both in one pass."""
        each, together = _zeros(self.wanted), _zeros(self.wanted)
        self._add_each(each, batch, 2, number)
        try:
            self.meetings = self._add_together(together, batch, 2, number, None)
        except NotCovered as error:
            self._note(str(error))
        # Of shapes that the model does not expect, which a task says in its own words.
        except (RuntimeError, ValueError, IndexError, TypeError, IncompatibleError) as error:
            self._note(f"together they do not run ({type(error).__name__}: {str(error).splitlines()[0]})")
        else:
            differs = _differing(each, together, self.wanted)
            if differs is not None:
                self._note(f"the gradient of {differs!r} does not split into examples by its shape")
        self.one_by_one = bool(self.notes)
        if self.count:
            for name, total in self.sums.items():
                each[name] += total
        self.sums = each

    def _note(self, why: str) -> None:
        note = f"examples taken one by one: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def _add_together(
        self, sums: Mapping[str, Tensor], batch: Batch, size: int, number: int, as_before: Meetings | None
    ) -> Meetings:
        parameters = dict(self.module.named_parameters())
        return add_squares(lambda: self._value(batch, number), parameters, sums, size, as_before)

    def _add_each(self, sums: Mapping[str, Tensor], batch: Batch, size: int, number: int) -> None:
        for row in range(size):
            with torch.enable_grad():
                value = self._value(_rows(batch, row, row + 1), number)
                gradients = torch.autograd.grad(value, [*self.wanted.values()], allow_unused=True)
            for name, gradient in zip(self.wanted, gradients, strict=True):
                if gradient is not None:
                    wide = gradient.to(sums[name].dtype)
                    sums[name].addcmul_(wide, wide)

    def _value(self, batch: Batch, number: int) -> Tensor:
        value = self.loss(self.module, batch)
        if value.numel() != 1 or not value.requires_grad:
            raise OptionError(
                f"the loss of batch {number} is a tensor {list(value.shape)}, requires_grad={value.requires_grad}; "
                "expected one number, the sum over examples, with its graph back to the parameters"
            )
        if not value.isfinite():
            raise CheckpointError(
                f"the loss of batch {number} is {value.item()}; expected a finite number. Look at that batch and its "
                "labels; if they are as meant, open the model in float32 or float64"
            )
        return value


def _wanted(module: nn.Module, names: Collection[str] | None) -> dict[str, nn.Parameter]:
    parameters = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    if names is None:
        return parameters
    unknown = [name for name in names if name not in parameters]
    if unknown or not names:
        raise OptionError(
            f"parameters: {unknown[0]!r} is not one of this {type(module).__name__}, or another name of a tied one; "
            "expected names as `named_parameters` gives them"
            if unknown
            else "parameters: none are named; leave the option out to take all"
        )
    return {name: p for name, p in parameters.items() if name in {*names}}


@contextmanager
def _evaluating(module: nn.Module, wanted: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """In evaluation mode, with gradients for what is wanted, without torch's fused encoder layer; then as before."""
    modes = [(part, part.training) for part in module.modules()]
    flags = [(p, p.requires_grad) for p in module.parameters()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        module.eval()
        for name, p in module.named_parameters():
            p.requires_grad_(name in wanted)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part, training in modes:
            part.training = training
        for p, flag in flags:
            p.requires_grad_(flag)


def _size(batch: Batch, number: int) -> int:
    sizes = {name: len(t) if t.ndim else None for name, t in batch.items()}
    if len({*sizes.values()}) != 1 or None in sizes.values():
        raise DataError(
            f"batch {number}: fields have {sizes} rows; expected a field or more, and in all the same number of rows, "
            "one for each example"
        )
    return len(next(iter(batch.values())))


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return {name: t[start:stop] for name, t in batch.items()}


def _zeros(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        for name, p in wanted.items()
    }


def _differing(each: Mapping[str, Tensor], together: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """The first parameter whose root of squares differs anywhere by more than rounding explains: √ε of its largest, or
    of that of its module's parameters, as a bias may have a gradient that is nothing but rounding (that of keys)."""
    largest: dict[str, float] = {}
    for name, total in each.items():
        owner = name.rpartition(".")[0]
        largest[owner] = max(largest.get(owner, 0.0), total.max().item() ** 0.5)
    for name, total in each.items():
        bound = torch.finfo(wanted[name].dtype).eps ** 0.5 * largest[name.rpartition(".")[0]]
        pairs = zip(*(torch.split(t.flatten(), _STEP) for t in (together[name], total)), strict=True)
        if not all((a.sqrt() - b.sqrt()).abs_().max() <= bound for a, b in pairs):
            return name
    return None


def _require_finite(name: str, total: Tensor, where: str) -> None:
    if not is_finite(total):
        raise CheckpointError(
            f"{name!r}: its squared gradient is not finite {where}. Look at the examples there and at the largest "
            "weights; if they are as meant, open the model in float32 or float64"
        )
