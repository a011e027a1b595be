"""Moments of an axis from activations: the units of two models on the same inputs, centred, or correlated (Verma &
Elbayad 2024, Section 3; Theus et al. 2025, Section 4.2).

Where to listen follows from the layouts. A weight that reads an axis (`axis*` in its input dimension) has the units'
activations as its module's input; where no module reads it that can be listened to, the outputs of the weights that
write it are taken. Moments stream: only those of one batch of one model are kept beside the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symfuse.errors import OptionError
from symfuse.groups import Group, Moments, Monomial, Part, PartMoments
from symfuse.io.live import names_in_memory
from symfuse.spec import Instance, Layout, Spec, Variance

Batch = Mapping[str, Tensor]
KINDS = ("pearson", "covariance")


@dataclass(frozen=True)
class Place:
    """Where the units of axes can be heard: at the input ("in") or the output ("out") of the module that owns a weight.

    layout: of the features, without the positions in front.
    """

    weight: str
    side: Literal["in", "out"]
    layout: Layout

    def __str__(self) -> str:
        return f"{self.weight.rpartition('.')[0]}.{self.side}"


def places(spec: Spec, module: nn.Module, instance: Instance) -> tuple[Place, ...]:
    """Where the units of an axis instance can be heard: every input that has them, else every output."""
    owners = _owners(spec, module)
    found: dict[str, list[Place]] = {"in": [], "out": []}
    for name in spec.movable[instance]:
        if name not in owners:
            continue
        inputs, outputs = _sides(owners[name], spec.tensors[name].layout)
        if inputs is not None and _heard(inputs, instance.axis):
            found["in"].append(Place(name, "in", inputs))
        if outputs is not None and _heard(outputs, instance.axis):
            found["out"].append(Place(name, "out", outputs))
    reads = _of_one_input(found["in"], owners)
    return tuple(reads or found["out"])


@dataclass(frozen=True)
class Heard:
    """What two models' units at one place have in common, all with all: xy[i, j] of the anchor's unit i and the
    source's unit j, [width, width]; xx and yy of each model with itself, or their diagonals. Covariances, float64."""

    xy: Tensor
    xx: Tensor
    yy: Tensor


def listen(
    spec: Spec,
    anchor: nn.Module,
    source: nn.Module,
    batches: Iterable[Batch],
    wanted: Collection[Place],
    *,
    keep: Callable[[Batch], Tensor] | None = None,
    gram: Collection[Place] = (),
) -> dict[Place, Heard]:
    """What is heard at each place over all positions of all batches.

    anchor, source: live modules in evaluation mode, run on the same batches. keep: the positions [batch, length] of a
    batch that count, by default those of its attention_mask. gram: where xx and yy are wanted in full.
    """
    sums: dict[Place, _Sums] = {}
    with _listening(spec, anchor, wanted) as theirs, _listening(spec, source, wanted) as ours, _plainly():
        for batch in batches:
            mask = keep(batch) if keep is not None else batch.get("attention_mask")
            inputs = {name: field for name, field in batch.items() if name in _INPUTS}
            anchor(**inputs)
            source(**inputs)
            for place in wanted:
                sums.setdefault(place, _Sums(place in gram)).add(
                    _rows(theirs.pop(place), mask), _rows(ours.pop(place), mask)
                )
    if not sums and wanted:
        raise OptionError("there are no batches to take activations from")
    if any(one.count == 0 for one in sums.values()):
        raise OptionError("of the batches no positions are left to take activations from: all are masked, or left out")
    return {place: one.heard() for place, one in sums.items()}


# Fields of batches that modules take.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "pixel_values", "inputs_embeds", "src")


class _Sums:
    """Uncentred sums over rows: x yᵀ, x xᵀ, y yᵀ (or the diagonals of these two), x, y; and how many rows."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x, y: [rows, width] of the anchor and the source."""
        new = [x.T @ y, *(t.T @ t if self.full else t.square().sum(0) for t in (x, y)), x.sum(0), y.sum(0)]
        self.count += len(x)
        if self.sums:
            for total, one in zip(self.sums, new, strict=True):
                total += one
        else:
            self.sums = [one.double() for one in new]

    def heard(self) -> Heard:
        xy, xx, yy, x, y = self.sums
        n = self.count
        xy = xy / n - torch.outer(x, y) / n**2
        xx, yy = (g / n - (torch.outer(t, t) if self.full else t.square()) / n**2 for g, t in ((xx, x), (yy, y)))
        return Heard(xy, xx, yy)


def _unit(variances: Tensor) -> Tensor:
    """1 / the standard deviations; 0 for a unit that never changes: it has no correlation with any other."""
    return torch.where(variances > 1e-12 * variances.amax(), variances, torch.inf).rsqrt()


def require_kind(kind: str) -> None:
    """OptionError for a kind of moments that there is not."""
    if kind not in KINDS:
        raise OptionError(f"kind is {kind!r}; expected {' or '.join(KINDS)}")


def moments_of(
    spec: Spec, instance: Instance, heard: Mapping[Place, Heard], group: Group, kind: str = "pearson"
) -> PartMoments:
    """The moments of one axis instance, summed over the places where it is heard.

    kind: covariances, or correlations ("pearson"), in which every unit has the same say; of units that a group mixes
    always covariances, as no rotation of units leaves their deviations what they are.
    """
    require_kind(kind)
    by_unit = kind == "pearson" and isinstance(group.identity(1, ()), Monomial)
    out: dict[Part, Moments] = {}
    for place, found in heard.items():
        for variance, index in _units(spec, instance, place):
            part: Part = "primal" if group.self_dual and variance is Variance.DUAL else variance.value
            pairs = index[..., :, None, :], index[..., None, :, :]
            own = pairs if group.gram else (index, index)
            xx, yy = (g[own] if g.ndim == 2 else g[index] for g in (found.xx, found.yy))
            xy = found.xy
            if by_unit:
                sx, sy = (_unit(g.diagonal() if g.ndim == 2 else g) for g in (found.xx, found.yy))
                xy, xx, yy = xy * sx[:, None] * sy, xx * sx[index].square(), yy * sy[index].square()
            moments = Moments(xy[pairs].sum(-1), xx.sum(-1), yy.sum(-1))
            out[part] = out[part] + moments if part in out else moments
    return out


def pairs_of(spec: Spec, instance: Instance, heard: Mapping[Place, Heard]) -> Tensor:
    """The cross-Grams [h, h, n, n] of an axis inside another, of each index of the anchor's outer axis with each of the
    source's, summed over places and parts."""
    grams = [
        found.xy[index[:, None, :, None], index[None, :, None, :]].sum(-1)
        for place, found in heard.items()
        for _, index in _units(spec, instance, place)
    ]
    return torch.stack(grams).sum(0)


def _units(spec: Spec, instance: Instance, place: Place) -> Iterator[tuple[Variance, Tensor]]:
    """Which entries of a place are the units of an axis: numbers [*b, n, rest], with how they transform: an input as g,
    whatever the variance of the dimension that reads it."""
    width = place.layout.shape(spec.sizes)[0]
    batch = spec.batch_axes(instance.axis)
    for segment in place.layout.segments(torch.arange(width), spec.sizes):
        names = [atom.name for atom in segment.atoms]
        if instance.axis not in names:
            continue
        at = names.index(instance.axis)
        front = [*map(names.index, batch), at]
        view = segment.view.permute(*front, *(i for i in range(len(names)) if i not in front))
        variance = Variance.PRIMAL if place.side == "in" else segment.atoms[at].variance
        yield variance, view.reshape(*view.shape[: len(front)], -1)


def _rows(heard: Tensor, mask: Tensor | None) -> Tensor:
    """[…, width] as [positions, width], without those that are masked out; float32 at least."""
    if mask is not None:
        mask = mask.reshape(-1, mask.shape[-1])  # of a choice among several the body sees each as a row
        if heard.ndim == 3 and heard.shape[:2] == mask.shape:  # not what is pooled
            heard = heard[mask.to(heard.device).bool()]
    flat = heard.reshape(-1, heard.shape[-1])
    return flat.to(torch.promote_types(flat.dtype, torch.float32)).cpu()


def _heard(layout: Layout, axis: str) -> bool:
    return axis in (atom.name for atom in layout.atoms())


def _sides(owner: nn.Module, layout: Layout) -> tuple[Layout | None, Layout | None]:
    """The layouts of the input and the output of the module that owns a weight; None where it is not a linear map."""
    if len(layout.dims) != 2:
        return None, None
    rows, columns = (Layout((dim,)) for dim in layout.dims)
    if isinstance(owner, nn.Linear | nn.MultiheadAttention):
        return columns, rows
    if type(owner).__name__ == "Conv1D":  # of transformers: stored the other way round
        return rows, columns
    return None, None


def _owners(spec: Spec, module: nn.Module) -> dict[str, nn.Module]:
    """The module that owns each declared weight and is called with its input."""
    modules = _by_weight(module)
    prefix: Any = getattr(module, "base_model_prefix", "") or ""
    found = {}
    for name in spec.tensors:
        for one in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            owner = modules.get(one)
            # Of torch's attention the input projection is called as the module itself, and the output one not at all.
            if owner is not None and type(owner).__name__ != "NonDynamicallyQuantizableLinear":
                found[name] = owner
                break
    return found


def _by_weight(module: nn.Module) -> dict[str, nn.Module]:
    """The module that owns each weight, by the weight's name in memory, and by that on disk, which may be another."""
    names = dict(module.named_parameters(remove_duplicate=False))
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
    return {disk: owners[name] for disk, name in names_in_memory(module).items() if name in owners} | owners


def _of_one_input(reads: Sequence[Place], owners: Mapping[str, nn.Module]) -> list[Place]:
    """Of several weights that read one and the same input (query, key, value) the first: those of one kind of module
    inside of one other."""
    found: dict[tuple[str, ...], Place] = {}
    for place in reads:
        path = place.weight.rpartition(".")[0]
        inside = path.rpartition(".")[0]
        found.setdefault((inside, type(owners[place.weight]).__name__) if inside else (path,), place)
    return list(found.values())


@contextmanager
def _listening(spec: Spec, module: nn.Module, wanted: Iterable[Place]) -> Iterator[dict[Place, Tensor]]:
    """While a module runs, what is heard at each place."""
    owners = _owners(spec, module)
    heard: dict[Place, Tensor] = {}
    handles = []
    for place in wanted:
        owner = owners[place.weight]

        def hook(called: Any, args: Any, output: Any, place: Place = place) -> None:
            given: Tensor = args[0]
            if place in heard:  # called again, as DeBERTa's projections are with the relative positions
                return
            if place.side == "in":
                heard[place] = given
            elif isinstance(called, nn.MultiheadAttention):
                heard[place] = nn.functional.linear(given, called.in_proj_weight, called.in_proj_bias)
            else:
                heard[place] = output

        handles.append(owner.register_forward_hook(hook))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _plainly() -> Iterator[None]:
    """Without gradients, and without torch's fused encoder layer, which calls none of its modules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
