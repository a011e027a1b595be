"""Moments of an axis from activations: covariances or correlations of the units of two models on the same inputs (Verma
& Elbayad 2024, Section 3; Theus et al. 2025, Section 4.2).

Moments stream: besides the sums, only the activations of one batch of one model are in memory. Where they are recorded:
`symfuse.stats.taps`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symfuse.errors import OptionError
from symfuse.groups import Coupling, Group, Moments, Monomial, Part, PartMoments
from symfuse.spec import Instance, Spec, Variance
from symfuse.stats.taps import Tap, recording, unfused

Batch = Mapping[str, Tensor]
KINDS = ("pearson", "covariance")


@dataclass(frozen=True)
class Covariances:
    """Covariances of two models' units at one tap, float64: xy[i, j] of the anchor's unit i and the source's unit j,
    [width, width]; xx and yy of each model with itself, or their diagonals."""

    xy: Tensor
    xx: Tensor
    yy: Tensor


def record(
    spec: Spec,
    anchor: nn.Module,
    source: nn.Module,
    batches: Iterable[Batch],
    wanted: Collection[Tap],
    *,
    keep: Callable[[Batch], Tensor] | None = None,
    gram: Collection[Tap] = (),
) -> dict[Tap, Covariances]:
    """The covariances of both models' units at each tap, over all positions of all batches.

    anchor, source: live modules in evaluation mode, run on the same batches. keep: the positions [batch, length] of a
    batch that count, by default those that its mask does not mark as padding. gram: the taps for which xx and yy are
    needed in full. Products are formed on the device of the modules, tap by tap, and summed on the processor.

    A tap whose module is never called is left out; so is one whose module is called by `.forward`, which bypasses
    hooks. Raises OptionError for a module that is called in some batches only, and if no position is left.
    """
    sums = {tap: _Sums(tap in gram) for tap in wanted}
    count = 0  # of batches
    with recording(spec, anchor, wanted) as theirs, recording(spec, source, wanted) as ours, unfused():
        for batch in batches:
            count += 1
            mask = keep(batch) if keep is not None else present(batch)
            for module in (anchor, source):
                module(**inputs_of(module, batch))
            for tap in theirs.keys() & ours.keys():
                sums[tap].add(*(rows(recorded.pop(tap), mask) for recorded in (theirs, ours)))
            theirs.clear()
            ours.clear()
    if not count and wanted:
        raise OptionError("there are no batches to take activations from")
    called = {tap: one for tap, one in sums.items() if one.batches}
    for tap, one in called.items():
        if one.batches < count:
            raise OptionError(
                f"{tap} runs in {one.batches} of {count} batches: a model does not call that module in the "
                "others; give batches of one kind"
            )
        if one.count == 0:
            raise OptionError(
                "of the batches no positions are left to take activations from: all are masked, or left out"
            )
    return {tap: one.covariances() for tap, one in called.items()}


def magnitudes(spec: Spec, module: nn.Module, batches: Iterable[Batch], wanted: Collection[Tap]) -> dict[Tap, Tensor]:
    """The mean |activation| of each unit at each tap over all positions that are no padding, [width], float64."""
    sums: dict[Tap, Tensor] = {}
    counts = dict.fromkeys(wanted, 0)
    with recording(spec, module, wanted) as recorded, unfused():
        for batch in batches:
            module(**inputs_of(module, batch))
            for tap, activations in recorded.items():
                units = rows(activations, present(batch)).abs().double()
                sums[tap] = sums.get(tap, torch.zeros(())) + units.sum(0).cpu()
                counts[tap] += len(units)
            recorded.clear()
    return {tap: total / counts[tap] for tap, total in sums.items()}


def present(batch: Batch) -> Tensor | None:
    """The positions [batch, length] of a batch that are no padding; None if it has no mask."""
    if PADDING in batch:  # true at padding, or a large negative number that is added to the scores there
        return batch[PADDING] == 0
    return batch.get("attention_mask")


# Fields of batches that are passed to modules.
PADDING = "src_key_padding_mask"
_INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "pixel_values", "inputs_embeds", "src", PADDING,
)  # fmt: skip


def inputs_of(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The fields of a batch that the module takes, on its device, floating-point ones in its dtype; of a module of an
    unknown class all that its `forward` names, but for `labels`. A torch.nn.TransformerEncoder has another name for its
    mask, and the inverse convention."""
    own = not hasattr(module, "main_input_name")
    takes = inspect.signature(module.forward).parameters.keys() - {"labels"} if own else ()
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    inputs = {
        name: field.to(like) if field.is_floating_point() else field.to(like.device)
        for name, field in batch.items()
        if name in _INPUTS or name in takes
    }
    if isinstance(module, nn.TransformerEncoder) and "attention_mask" in inputs:
        inputs[PADDING] = inputs.pop("attention_mask") == 0
    return inputs


class _Sums:
    """Sums over rows: x yᵀ, x xᵀ, y yᵀ (or the diagonals of these two), x, y; and the numbers of rows and batches.

    The means of the first rows are subtracted from x and y: covariances are the same, and units whose means are far
    larger than their deviations lose no digits.
    """

    def __init__(self, full: bool) -> None:
        self.full = full
        self.sums: list[Tensor] = []
        self.origins: list[Tensor] = []
        self.count = self.batches = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x, y: [rows, width] of the anchor and the source."""
        self.batches += 1
        if len(x) == 0:
            return
        self.origins = self.origins or [t.mean(0) for t in (x, y)]
        x, y = (t - origin for t, origin in zip((x, y), self.origins, strict=True))
        new = [x.T @ y, *(t.T @ t if self.full else t.square().sum(0) for t in (x, y)), x.sum(0), y.sum(0)]
        new = [one.cpu() for one in new]
        self.count += len(x)
        if self.sums:
            for total, one in zip(self.sums, new, strict=True):
                total += one
        else:
            self.sums = [one.double() for one in new]

    def covariances(self) -> Covariances:
        xy, xx, yy, x, y = self.sums
        n = self.count
        grams = [torch.addr(xy, x, y, beta=1 / n, alpha=-1 / n**2)]
        for g, t in ((xx, x), (yy, y)):
            grams.append(torch.addr(g, t, t, beta=1 / n, alpha=-1 / n**2) if self.full else g / n - (t / n).square())
        return Covariances(*grams)


def inverse_deviations(variances: Tensor) -> Tensor:
    """1 / the standard deviations; 0 for a unit that never changes: it has no correlation with any other."""
    return torch.where(variances > 1e-12 * variances.amax(), variances, torch.inf).rsqrt()


def require_kind(kind: str) -> None:
    """OptionError for an unknown kind of moments."""
    if kind not in KINDS:
        raise OptionError(f"kind is {kind!r}; expected {' or '.join(KINDS)}")


def moments_of(
    spec: Spec,
    instance: Instance,
    recorded: Mapping[Tap, Covariances],
    group: Group,
    kind: str = "pearson",
    *,
    pairs: str | None = None,
    without: Collection[str] = (),
) -> PartMoments:
    """The moments of one axis instance, summed over its taps.

    kind: "covariance", or "pearson" for correlations, in which every unit has the same weight. Units that a group
    rotates always use covariances, since a rotation changes the deviations of single units. pairs: an axis that this
    one is inside of; then there are moments for each pair of the anchor's and the source's units h of that axis: [*o,
    h, h, *b, ...], where o are the batch axes of that axis and b the other batch axes of this one. without: axes; parts
    that have one of them are ignored.
    """
    require_kind(kind)
    by_unit = kind == "pearson" and isinstance(group.identity(1, ()), Monomial | Coupling)
    outer = (*spec.batch_axes(pairs), pairs) if pairs else ()
    front, at = (*outer, *(axis for axis in spec.batch_axes(instance.axis) if axis not in outer)), len(outer) - 1
    out: dict[Part, Moments] = {}
    for tap, covariances in recorded.items():
        for variance, index in _units(spec, instance, tap, front, without):
            part: Part = "primal" if group.self_dual and variance is Variance.DUAL else variance.value
            i = j = index
            if pairs:
                both = (*index.shape[:at], index.shape[at], *index.shape[at:])
                i, j = index.unsqueeze(at + 1).expand(both), index.unsqueeze(at).expand(both)
            xy = covariances.xy
            xx, yy = (
                g[(k[..., :, None, :], k[..., None, :, :]) if group.gram else (k, k)] if g.ndim == 2 else g[k]
                for g, k in ((covariances.xx, i), (covariances.yy, j))
            )
            if by_unit:
                sx, sy = (
                    inverse_deviations(g.diagonal() if g.ndim == 2 else g) for g in (covariances.xx, covariances.yy)
                )
                xy, xx, yy = xy * sx[:, None] * sy, xx * sx[i].square(), yy * sy[j].square()
            moments = Moments(xy[i[..., :, None, :], j[..., None, :, :]].sum(-1), xx.sum(-1), yy.sum(-1))
            out[part] = out[part] + moments if part in out else moments
    return out


def _units(
    spec: Spec, instance: Instance, tap: Tap, batch: Sequence[str], without: Collection[str]
) -> Iterator[tuple[Variance, Tensor]]:
    """The entries of a tap that are the units of an axis: numbers [*batch, n, rest], and how they transform. An input
    transforms by g, whatever the variance of the dimension that reads it. Parts that lack one of the axes, or have an
    excluded one, are left out."""
    width = tap.layout.shape(spec.sizes)[0]
    for segment in tap.layout.segments(torch.arange(width), spec.sizes):
        names = [atom.name for atom in segment.atoms]
        if not {instance.axis, *batch} <= {*names} or {*without} & {*names}:
            continue
        at = names.index(instance.axis)
        front = [*map(names.index, batch), at]
        view = segment.view.permute(*front, *(i for i in range(len(names)) if i not in front))
        variance = Variance.PRIMAL if tap.side == "in" else segment.atoms[at].variance
        yield variance, view.reshape(*view.shape[: len(front)], -1)


def rows(activations: Tensor, mask: Tensor | None) -> Tensor:
    """[…, width] as [positions, width], without masked positions; at least float32. Pooled activations, and those
    without positions of the batch, are used as they are."""
    if mask is not None:
        mask = mask.reshape(-1, mask.shape[-1])  # of multiple-choice inputs the model sees each choice as a row
        if activations.ndim == 2 and len(activations) == mask.numel():  # flattened, as routers of experts read it
            activations = activations.reshape(*mask.shape, -1)
        if activations.ndim == 3 and activations.shape[:2] == mask.shape:
            activations = activations[mask.to(activations.device).bool()]
    flat = activations.reshape(-1, activations.shape[-1])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
