"""An Alignment: one group element per axis instance, from a source to an anchor; applied, inverted, composed, saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment.apply import acting, composed, inverse, move, shift, shifted
from symfuse.alignment.file import read, to_bytes
from symfuse.architectures import resolve
from symfuse.architectures.base import is_declared
from symfuse.arguments import checked
from symfuse.errors import IncompatibleError, SymmetryError
from symfuse.groups import Coupling, Element
from symfuse.guard import guarded
from symfuse.io import Checkpoint, is_finite
from symfuse.io import open as open_checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.target import write_file
from symfuse.messages import shown
from symfuse.model import Model, require_floating, require_unread, stacked, under_file_names, unstacked, vary
from symfuse.rewriting import canonical
from symfuse.runs import record_alignment
from symfuse.spec import Axis, Instance, Spec, bias_of


@dataclass(frozen=True, eq=False)
class Alignment:
    """{axis instance: element} for the checkpoints of a Spec, and the translations of biases.

    elements: an absent one is the identity. shifts: by canonical name of a bias (Spec.shifts), a vector of its shape,
    in the aligned basis: bias → g·bias + t. provenance: where it comes from, JSON data. frame: the exact rewrites
    (symfuse.rewriting) before the elements; the spec is that of the rewritten model. variants: the variants of the
    declaration (symfuse.model.variants); with any, the alignment is inexact: the aligned model computes something else.
    gauges: by canonical name of a weight that reads a norm (Spec.gauges), a vector of its bias's shape, in the aligned
    basis: W → g·W + v nᵀ.
    """

    spec: Spec
    elements: Mapping[Instance, Element]
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    frame: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    gauges: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, source: Checkpoint | str | PathLike[str] | torch.nn.Module) -> Checkpoint:
        """The aligned source: the same function, as a lazy checkpoint (each tensor is transformed when it is read, on
        the device of `Checkpoint.on`).

        The source may be another checkpoint of the family, with another head or prefix, if its axes on which the
        alignment acts are the same; IncompatibleError otherwise. Derived buffers, such as position ids, are left out.
        """
        if not isinstance(source, Checkpoint):
            source = open_checkpoint(source)
        source, _ = under_file_names(source)
        if self.frame:
            model = canonical(Model.of(source), self.frame)
            aligned = self._move(model.checkpoint, vary(model.spec, self.variants))
        else:
            aligned = self._move(source, self._declared(source))
        return record_alignment(aligned, source, self)

    def on(self, model: Model) -> Checkpoint:
        """As the call, for a model that is in the frame already, with its declaration under the variants."""
        return self._move(model.checkpoint, model.spec)

    def in_frame(self, anchor: Checkpoint | str | PathLike[str] | torch.nn.Module) -> Checkpoint:
        """A model, such as the anchor, in the frame of this alignment: rewritten, but not transformed by elements."""
        anchor = anchor if isinstance(anchor, Checkpoint) else open_checkpoint(anchor)
        return guarded(canonical(Model.of(anchor), self.frame).checkpoint, [anchor]) if self.frame else anchor

    def bound(self, model: Model) -> Alignment:
        """This alignment with the declaration of a model that is in its frame already. The axes on which it acts must
        be the same in both; IncompatibleError otherwise."""
        return self._bound(model.checkpoint, model.spec)

    def _bound(self, source: Checkpoint, declared: Spec) -> Alignment:
        """With the declaration of a source, and only the gauges that the source has: each is a symmetry alone."""
        spec = replace(self._bind(source, declared), gauges=declared.gauges)
        gauges = {n: v for n, v in self.gauges.items() if n in spec.gauges and spec.gauges[n] == self.spec.gauges[n]}
        elements = {i: g for i, g in self.elements.items() if i in spec.movable}  # not of another head
        return replace(self, spec=spec, elements=elements, gauges=gauges)

    def _declared(self, source: Checkpoint) -> Spec:
        known = is_declared(source.config)
        return vary(resolve(source.config, source, source.name), self.variants) if known else self.spec

    def _move(self, source: Checkpoint, declared: Spec) -> Checkpoint:
        bound = self._bound(source, declared)
        require_unread(source, bound.spec, {instance.axis for instance in self.elements})
        whole = stacked(source, bound.spec)
        aligned = whole.replace(tensors=_aligned_tensors(bound, whole), name=f"{source.name} (aligned)")
        named = unstacked(aligned, bound.spec)
        return guarded(named, [source]) if is_declared(source.config) else named

    def _bind(self, source: Checkpoint, declared: Spec) -> Spec:
        """The declaration of the source, in which the axes that the alignment acts on must be the same.

        Equal names and shapes are not enough: they do not show numbers of heads and activations.
        """
        ours = self.spec.files.keys() | self.spec.buffers
        as_here = ours >= set(source) and declared.sizes.items() <= self.spec.sizes.items()
        as_here = as_here and declared.tensors.keys() == self.spec.tensors.keys()  # another head may have fewer
        spec = self.spec if as_here else declared
        acted_on = {i.axis for i in self.elements} | {rule.axis.strip("*") for rule in self.spec.shifts}
        outer = {per for axis in acted_on for per in self.spec.axes[axis].per}
        self._require_same_axes(declared, sorted(acted_on | outer), source.name)
        self._require_same_layouts(declared, acted_on, source.name)
        spec.check({name: source.info(name).shape for name in source}, source.name)
        require_floating(Model(source, spec))
        return spec

    def _require_same_axes(self, spec: Spec, axes: Iterable[str], what: str) -> None:
        """IncompatibleError unless another declaration is of this family and has these axes, with these groups."""
        ours, theirs = self.spec.axes, spec.axes
        if spec.family != self.spec.family:
            raise IncompatibleError(f"{what} is of a {spec.family}, this alignment of a {self.spec.family}")
        for name in axes:
            if name not in ours or ours[name] != theirs.get(name):
                raise IncompatibleError(
                    f"{what} does not fit this alignment of a {self.spec.family}: axis {name!r} is "
                    f"{_in_words(ours.get(name))} here and {_in_words(theirs.get(name))} there"
                )

    def _require_same_layouts(self, spec: Spec, axes: set[str], what: str) -> None:
        """IncompatibleError if a tensor on which these axes act, other than of a head, has another layout in another
        declaration: then the configs differ in what the same weights compute (layers without positions)."""
        for name in sorted((self.spec.tensors.keys() & spec.tensors.keys()) - self.spec.heads - spec.heads):
            ours, theirs = self.spec.tensors[name].layout, spec.tensors[name].layout
            if ours != theirs and axes & {*ours.names, *theirs.names}:
                raise IncompatibleError(
                    f"{what} does not fit this alignment: {name} is laid out as {str(theirs)!r} by its config.json, "
                    f"and as {str(ours)!r} in the model that it was made for; make another alignment for this model"
                )

    def to(self, device: str) -> Alignment:
        """The same alignment with its tensors there. What is kept (`symfuse.match`, files) is on the processor."""
        vectors = ({name: t.to(device) for name, t in vectors_of.items()} for vectors_of in (self.shifts, self.gauges))
        shifts, gauges = vectors
        return replace(self, elements={i: g.to(device) for i, g in self.elements.items()}, shifts=shifts, gauges=gauges)

    __repr__, _repr_html_ = shown(
        lambda self: {
            "family": self.spec.family,
            "elements": len(self.elements),
            "translated biases": len(self.shifts),
            **({"gauges": len(self.gauges)} if self.gauges else {}),
            **({"variants": f"inexact: {', '.join(self.variants)}"} if self.variants else {}),
        }
    )

    def move(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that canonical name transformed by the linear part (no translation), in its own dtype.

        Permutations and signs only reorder entries; other elements compute in at least float32 and round once.
        """
        return self._transformed(self.elements, name, tensor)

    def _transformed(self, elements: Mapping[Instance, Element], name: str, tensor: Tensor) -> Tensor:
        return move(self.spec, acting(self.spec, elements, name), name, tensor)

    def acting(self, name: str) -> dict[str, Element]:
        """The elements that act on the tensor of that canonical name, by axis, in the order in which they act."""
        return acting(self.spec, self.elements, name)

    @cached_property
    def shifted(self) -> frozenset[str]:
        """The tensors that translations and gauges change: biases, those that translated ones move on into, readers."""
        return shifted(self.spec, self.shifts, self.gauges)

    @property
    def gauged(self) -> dict[str, str]:
        """The gains of norms along which a gauge changes what reads them → one such weight."""
        return {self.spec.gauges[name]: name for name, v in self.gauges.items() if bool(v.any())}

    def shift(self, name: str, aligned: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
        """The aligned tensor of that name with its part of translations and gauges; weight(name) reads another aligned
        one."""
        return shift(self.spec, self.shifts, self.gauges, name, aligned, weight) if name in self.shifted else aligned

    def inverse(self) -> Alignment:
        """The alignment that undoes this one."""
        elements = {i: g for i in self.elements if (g := inverse(self.spec, self.elements, i)) is not None}
        back = replace(self, elements=elements, shifts={}, gauges={}, provenance={"inverse_of": dict(self.provenance)})
        shifts = {name: -back.move(name, t) for name, t in self.shifts.items()}
        return replace(back, shifts=shifts, gauges={n: -back.move(bias_of(n), v) for n, v in self.gauges.items()})

    def __matmul__(self, first: Alignment) -> Alignment:
        """The alignment that acts as `first`, then as self; SymmetryError if their frames or variants do not agree.

        Of the model that `first` is of: what of self acts on weights that this has not (another head) is left out.
        """
        if self.variants != first.variants:
            raise SymmetryError(
                f"an alignment under {', '.join(self.variants) or 'no variants'} cannot follow one under "
                f"{', '.join(first.variants) or 'none'}: their axes are not the same; make both under the same"
            )
        if self.spec is not first.spec:
            self._require_same_axes(first.spec, self.spec.axes.keys() | first.spec.axes.keys(), "the first alignment")
        for element in first.elements.values():
            if isinstance(element, Coupling):
                element.inverse()  # which raises: nothing follows a transport
        elements = composed(first.spec, self.elements, first.elements)
        own = {name: t for name, t in self.shifts.items() if name in first.spec.tensors}
        shifts = _added({name: first._transformed(self.elements, name, t) for name, t in first.shifts.items()}, own)
        gauged = {**{n: gain for n, gain in self.spec.gauges.items() if n in first.spec.tensors}, **first.spec.gauges}
        gauges = _added(
            {n: first._transformed(self.elements, bias_of(n), v) for n, v in first.gauges.items()},
            {n: v for n, v in self.gauges.items() if n in gauged},
        )
        if not set(self.frame) <= set(first.frame):
            raise SymmetryError(
                f"an alignment in the frame {', '.join(self.frame)} cannot follow one in "
                f"{', '.join(first.frame) or 'none'}"
            )
        provenance = {"first": dict(first.provenance), "then": dict(self.provenance)}
        spec = first.spec if gauged == first.spec.gauges else replace(first.spec, gauges=gauged)
        return replace(first, spec=spec, elements=elements, shifts=shifts, gauges=gauges, provenance=provenance)

    @checked
    def save(self, path: str | PathLike[str]) -> Path:
        """Write `to_bytes` to a file, whole or not at all. OutputError if that is not possible."""
        path = Path(path)
        write_file(path, self.to_bytes(), "the alignment", mark=b'"provenance"')
        return path

    def to_bytes(self) -> bytes:
        """One safetensors file: the elements, and in its metadata the declaration, the provenance, and a checksum of
        all of these."""
        return to_bytes(self)

    @classmethod
    @checked
    def load(cls, path: str | PathLike[str]) -> Alignment:
        """Read what `save` wrote; CheckpointError if it is something else, or a byte of it has changed. Files of before
        there were checksums are read without one."""
        return cls(**read(Path(path)))


def _in_words(axis: Axis | None) -> str:
    return "absent" if axis is None else f"of size {axis.size} ({axis.group.label if axis.group else 'fixed'})"


def _added(first: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**first, **{name: first[name] + t if name in first else t for name, t in then.items()}}


def _aligned_tensors(alignment: Alignment, source: Checkpoint) -> Rewritten:
    """The tensors of a checkpoint, each moved when it is read; those that nothing moves, which may be the largest, are
    not widened."""
    move, spec = _Move(alignment.to(source.device), source), alignment.spec
    files = {file: name for name in spec.tensors if (file := spec.file_name(name)) in source}
    return Rewritten(source, {file: move.rule(name, file) for file, name in files.items()})


@dataclass(frozen=True)
class _Move:
    """alignment: on the device of the source."""

    alignment: Alignment
    source: Checkpoint

    def rule(self, name: str, file: str) -> Rule:
        info, shifted = self.source.info(file), name in self.alignment.shifted
        if not shifted and not self.alignment.acting(name):
            return Rule(info, partial(self.source.scanned, file))
        short = None if shifted else partial(self._short, name, file)
        return Rule(info, partial(self._wide, name, file), short, what="the aligned tensor")

    def _short(self, name: str, file: str) -> Tensor:
        return self.alignment.move(name, self.source.read(file))

    def _wide(self, name: str, file: str) -> Tensor:
        """The aligned tensor in float64."""
        tensor = self.alignment.shift(name, self._linear(name), self._linear)
        if not is_finite(tensor):
            raise IncompatibleError(
                f"{file}: the aligned tensor holds NaN or infinity before it is rounded, so the alignment is at "
                "fault, not the model; make it again with `symfuse align`"
            )
        return tensor

    def _linear(self, name: str) -> Tensor:
        return self.alignment.move(name, self.source.read(self.alignment.spec.file_name(name)).double())


def random_alignment(spec: Spec, seed: int, axes: Collection[str] | None = None, *, largest: bool = False) -> Alignment:
    """Random elements of every axis (or of those named), and random translations: the same function, far away.

    largest: of all that may act, which is how a declaration is proved (the outputs must not change); else of what
    matching usually looks for, which is how a planted case is made.
    """
    rng = torch.Generator().manual_seed(seed)
    instances = [i for i in spec.movable if axes is None or i.axis in axes]
    elements = {}
    for instance in sorted(instances):
        axis = spec.axes[instance.axis]
        assert axis.group is not None
        group = axis.group if largest else axis.group.usual()
        elements[instance] = group.random(axis.size, spec.batch(instance.axis), rng)
    shifts: dict[str, Tensor] = {}
    for rule in spec.shifts:
        if axes is not None and rule.axis.strip("*") not in axes:
            continue
        shape = spec.tensors[rule.bias].layout.shape(spec.sizes)
        t = shifts.setdefault(rule.bias, torch.zeros(shape, dtype=torch.float64))
        view = spec.part(rule.bias, t, rule.axis).view
        view.copy_(torch.randn(view.shape, generator=rng, dtype=torch.float64) / 4)
    gauges = {
        name: torch.randn(spec.tensors[bias_of(name)].layout.shape(spec.sizes), generator=rng, dtype=torch.float64) / 4
        for name in (spec.gauges if axes is None and largest else ())
    }
    return Alignment(spec, elements, shifts, {"random": seed}, gauges=gauges)
