"""An Alignment: one group element per axis instance, from a source to an anchor; applied, inverted, composed, saved.

Elements are nested: those of an axis with `per` are indexed by other axes, which may be permuted themselves.
An element acts on the inside first (indexed as the source is), then the outer permutation moves it along. From
this follow, with σ the outer permutation and h the inner elements (the wreath law):

    inverse:      h'[k] = h[σ(k)]⁻¹           composition (first 1, then 2):   h[k] = h₂[σ₁⁻¹(k)] h₁[k]

Both re-indexings are the action of the outer elements on the batch dimensions of the inner ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from symfuse.alignment.apply import act, acting, move, shift, shifted
from symfuse.architectures import ARCHITECTURES, resolve
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, IncompatibleError, LayoutError, SymmetryError
from symfuse.groups import ELEMENTS, INEXACT_ELEMENTS, Coupling, Element, Sinkhorn, compose, shapes_of, subgroups
from symfuse.guard import guarded
from symfuse.io import Checkpoint, is_finite
from symfuse.io import open as open_checkpoint
from symfuse.io.content import refuse_pointer
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.target import write_file
from symfuse.io.typed import require_type
from symfuse.messages import some
from symfuse.model import (
    TRANSPORT,
    VARIANTS,
    Model,
    require_floating,
    require_unread,
    stacked,
    under_file_names,
    unstacked,
    vary,
)
from symfuse.rewriting import REWRITES, canonical
from symfuse.runs import record_alignment
from symfuse.spec import Atom, Axis, Instance, Spec, Variance, bias_of

FORMAT = 2
CHECKSUM = "sha256"
KNOWN = ("format", "symfuse", "spec", "provenance", "frame", "variants", CHECKSUM)  # what the metadata may have


@dataclass(frozen=True, eq=False)
class Alignment:
    """{axis instance: element} for the checkpoints of a Spec, and the translations of biases.

    elements: what is absent is the identity. shifts: by canonical name of a bias (Spec.shifts), a vector of its
    shape, in the moved basis: bias → g·bias + t. provenance: where it comes from, JSON data. frame: the exact rewrites
    (symfuse.rewriting) that come before the elements; the spec is that of the rewritten model. variants: those under
    which the declaration is read (symfuse.model.variants); with any, the alignment is inexact: the moved model
    computes something else. gauges: by canonical name of a weight that reads a norm (Spec.gauges), a vector of
    its bias's shape, in the moved basis: W → g·W + v nᵀ.
    """

    spec: Spec
    elements: Mapping[Instance, Element]
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    frame: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    gauges: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, source: Checkpoint | str | PathLike[str] | torch.nn.Module) -> Checkpoint:
        """The source moved: the same function, as a lazy checkpoint (each tensor is moved when it is read, on the
        device of `Checkpoint.on`).

        It may be another checkpoint of the family, with another head or prefix, if the spaces that are moved are the
        same; IncompatibleError if they are not. Derived buffers, such as position ids, are left out.
        """
        if not isinstance(source, Checkpoint):
            source = open_checkpoint(source)
        source, _ = under_file_names(source)
        if self.frame:
            model = canonical(Model.of(source), self.frame)
            moved = self._move(model.checkpoint, vary(model.spec, self.variants))
        else:
            moved = self._move(source, self._declared(source))
        return record_alignment(moved, source, self)

    def on(self, model: Model) -> Checkpoint:
        """As the call, of a model that is in the frame already, and its declaration under the variants."""
        return self._move(model.checkpoint, model.spec)

    def in_frame(self, anchor: Checkpoint) -> Checkpoint:
        """A model, such as the anchor, in the frame in which this alignment moves others: rewritten, and not moved."""
        return guarded(canonical(Model.of(anchor), self.frame).checkpoint, [anchor]) if self.frame else anchor

    def bound(self, model: Model) -> Alignment:
        """This alignment of a model that is in its frame already: with the declaration of that model, of which the axes
        that are moved must be those of this one; IncompatibleError if they are not."""
        return self._bound(model.checkpoint, model.spec)

    def _bound(self, source: Checkpoint, declared: Spec) -> Alignment:
        """With the declaration of a source, and of the gauges those that it has: each is a symmetry by itself."""
        spec = replace(self._bind(source, declared), gauges=declared.gauges)
        gauges = {n: v for n, v in self.gauges.items() if n in spec.gauges and spec.gauges[n] == self.spec.gauges[n]}
        elements = {i: g for i, g in self.elements.items() if i in spec.movable}  # not of another head
        return replace(self, spec=spec, elements=elements, gauges=gauges)

    def _declared(self, source: Checkpoint) -> Spec:
        known = source.config.get("model_type") in list(ARCHITECTURES)
        return vary(resolve(source.config, source, source.name), self.variants) if known else self.spec

    def _move(self, source: Checkpoint, declared: Spec) -> Checkpoint:
        bound = self._bound(source, declared)
        require_unread(source, bound.spec, {instance.axis for instance in self.elements})
        whole = stacked(source, bound.spec)
        moved = whole.replace(tensors=_moved(bound, whole), name=f"{source.name} (aligned)")
        found = unstacked(moved, bound.spec)
        return guarded(found, [source]) if source.config.get("model_type") in list(ARCHITECTURES) else found

    def _bind(self, source: Checkpoint, declared: Spec) -> Spec:
        """The declaration of the source, in which the axes that are moved must be those of this alignment.

        Equal names and shapes are not enough: numbers of heads and activations hide behind them.
        """
        ours = self.spec.files.keys() | self.spec.buffers
        as_here = ours >= set(source) and declared.sizes.items() <= self.spec.sizes.items()
        as_here = as_here and declared.tensors.keys() == self.spec.tensors.keys()  # another head may have fewer
        spec = self.spec if as_here else declared
        moved = {i.axis for i in self.elements} | {rule.axis.strip("*") for rule in self.spec.shifts}
        outer = {per for axis in moved for per in self.spec.axes[axis].per}
        self._require_same_axes(declared, sorted(moved | outer), source.name)
        self._require_same_layouts(declared, moved, source.name)
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
        """IncompatibleError if a tensor on which these axes act, other than of a head, is laid out otherwise in another
        declaration: its config says that the same weights compute something else (layers without positions)."""
        for name in sorted((self.spec.tensors.keys() & spec.tensors.keys()) - self.spec.heads - spec.heads):
            ours, theirs = self.spec.tensors[name].layout, spec.tensors[name].layout
            if ours != theirs and axes & {*ours.names, *theirs.names}:
                raise IncompatibleError(
                    f"{what} does not fit this alignment: {name} is laid out as {str(theirs)!r} by its config.json, "
                    f"and as {str(ours)!r} in the model that it was made for; make another alignment for this model"
                )

    def to(self, device: str) -> Alignment:
        """The same alignment with its tensors there. What is kept (`symfuse.match`, files) is on the processor."""
        vectors = ({name: t.to(device) for name, t in found.items()} for found in (self.shifts, self.gauges))
        shifts, gauges = vectors
        return replace(self, elements={i: g.to(device) for i, g in self.elements.items()}, shifts=shifts, gauges=gauges)

    def __repr__(self) -> str:
        inexact = f", inexact: {', '.join(self.variants)}" if self.variants else ""
        counts = f"{len(self.elements)} elements, {len(self.shifts)} translated biases"
        counts += f", {len(self.gauges)} gauges" if self.gauges else ""
        return f"Alignment({self.spec.family}, {counts}{inexact})"

    def move(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that canonical name moved by the linear part (no translation); its dtype is kept.

        Entries are only moved about, or else computed in float32 at least and rounded once.
        """
        return self._moved_by(self.elements, name, tensor)

    def _moved_by(self, elements: Mapping[Instance, Element], name: str, tensor: Tensor) -> Tensor:
        return move(self.spec, acting(self.spec, elements, name), name, tensor)

    def acting(self, name: str) -> dict[str, Element]:
        """The elements that move the tensor of that canonical name, by axis, in the order in which they act."""
        return acting(self.spec, self.elements, name)

    @cached_property
    def shifted(self) -> frozenset[str]:
        """The tensors that translations and gauges change: biases, those that translated ones move on into, readers."""
        return shifted(self.spec, self.shifts, self.gauges)

    @property
    def gauged(self) -> dict[str, str]:
        """The gains of norms along which a gauge changes what reads them → one such weight."""
        return {self.spec.gauges[name]: name for name, v in self.gauges.items() if bool(v.any())}

    def shift(self, name: str, moved: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
        """The moved tensor of that name with its part of translations and gauges; weight(name) reads another one."""
        return shift(self.spec, self.shifts, self.gauges, name, moved, weight) if name in self.shifted else moved

    def inverse(self) -> Alignment:
        """The alignment that undoes this one."""
        elements = {i: self._reindex(i, g.inverse(), self.elements) for i, g in self.elements.items()}
        back = replace(self, elements=elements, shifts={}, gauges={}, provenance={"inverse of": dict(self.provenance)})
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
        self._require_same_axes(first.spec, self.spec.axes.keys() | first.spec.axes.keys(), "the first alignment")
        undo = first.inverse().elements
        elements = dict(first.elements)
        for instance, element in self.elements.items():
            if instance not in first.spec.movable:
                continue
            element = self._reindex(instance, element, undo)
            if instance in elements:
                element = compose(element, elements[instance])
            elements[instance] = element
        own = {name: t for name, t in self.shifts.items() if name in first.spec.tensors}
        shifts = _added({name: first._moved_by(self.elements, name, t) for name, t in first.shifts.items()}, own)
        gauged = {**{n: gain for n, gain in self.spec.gauges.items() if n in first.spec.tensors}, **first.spec.gauges}
        gauges = _added(
            {n: first._moved_by(self.elements, bias_of(n), v) for n, v in first.gauges.items()},
            {n: v for n, v in self.gauges.items() if n in gauged},
        )
        if not set(self.frame) <= set(first.frame):
            raise SymmetryError(
                f"an alignment in the frame {', '.join(self.frame)} cannot follow one in "
                f"{', '.join(first.frame) or 'none'}"
            )
        provenance = {"first": dict(first.provenance), "then": dict(self.provenance)}
        spec = replace(first.spec, gauges=gauged)
        return replace(first, spec=spec, elements=elements, shifts=shifts, gauges=gauges, provenance=provenance)

    def _reindex(self, instance: Instance, element: Element, by: Mapping[Instance, Element]) -> Element:
        """Let the elements of the axes that `instance` is batched over act on its batch dimensions."""
        batch = self.spec.batch_axes(instance.axis)
        index = self.spec.index_of(instance)
        outer = {per: g for per in batch if (g := by.get(self.spec.instance(per, index))) is not None}
        if not outer:
            return element
        atoms = tuple(Atom(per, Variance.PLAIN) for per in batch)
        tensors = {}
        for key, tensor in element.tensors().items():
            for per in sorted(outer, key=self.spec.order.index):
                dim = batch.index(per)
                tensor = act(outer[per].forget(), tensor, dim, atoms, self.spec.batch_axes(per))
            tensors[key] = tensor
        return element.rebuild(tensors)

    @checked
    def save(self, path: str | PathLike[str]) -> Path:
        """Write `to_bytes` to a file, whole or not at all. OutputError if that is not possible."""
        path = Path(path)
        write_file(path, self.to_bytes(), "the alignment", mark=b'"provenance"')
        return path

    def to_bytes(self) -> bytes:
        """One safetensors file: the elements, and in its metadata the declaration, the provenance, and a checksum of
        all of these."""
        tensors = {
            f"{instance}/{type(g).__name__.lower()}/{key}": t.contiguous()
            for instance, g in self.elements.items()
            for key, t in g.tensors().items()
        }
        tensors |= {f"shift/{name}": t.contiguous() for name, t in self.shifts.items()}
        tensors |= {f"gauge/{name}": v.contiguous() for name, v in self.gauges.items()}
        tensors = {key: t.clone() for key, t in tensors.items()}  # expanded identities share storage
        meta = {"spec": self.spec.to_json(), "provenance": dict(self.provenance), "frame": list(self.frame)}
        meta |= {"variants": list(self.variants)} if self.variants else {}
        texts = {"format": "pt", "symfuse": str(FORMAT), **{key: json.dumps(value) for key, value in meta.items()}}
        return _sorted_header(save(tensors, {**texts, CHECKSUM: _checksum(tensors, texts)}))

    @classmethod
    @checked
    def load(cls, path: str | PathLike[str]) -> Alignment:
        """Read what `save` wrote; CheckpointError if it is something else, or a byte of it has changed. Files of before
        there were checksums are read without one."""
        refuse_pointer(Path(path))
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
        if meta.get("symfuse") != str(FORMAT):
            raise CheckpointError(
                f"{path}: not an alignment of this version (format {FORMAT} expected, {meta.get('symfuse')} found); "
                "make it again with `symfuse align`"
            )
        if unknown := sorted(meta.keys() - KNOWN):
            raise CheckpointError(
                f"{path}: its metadata has {some(unknown)}, expected {', '.join(KNOWN)}: it is damaged, or of a later "
                "version; copy the file again, or make it again with `symfuse align`"
            )
        if meta.pop(CHECKSUM, found := _checksum(tensors, meta)) != found:
            raise CheckpointError(
                f"{path}: its contents do not match the checksum in its metadata, so that it has changed since it was "
                "written; copy the file again, or make it again with `symfuse align`"
            )
        try:
            return cls._assemble(tensors, meta)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, RecursionError, LayoutError) as error:
            why = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{path}: says that it is an alignment, but is damaged ({why}); make it again with `symfuse align`"
            ) from error

    @classmethod
    def _assemble(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Alignment:
        spec = Spec.from_json(_entry(meta, "spec", dict[str, object]))
        parts: dict[tuple[str, str], dict[str, Tensor]] = {}
        vectors: dict[str, dict[str, Tensor]] = {"shift": {}, "gauge": {}}
        kinds: dict[str, type[Element]] = {**ELEMENTS, **INEXACT_ELEMENTS}
        for key, tensor in tensors.items():
            head, _, rest = key.partition("/")
            kind, _, name = rest.partition("/")
            if head in vectors:
                vectors[head][rest] = tensor
            elif kind in kinds:
                parts.setdefault((head, kind), {})[name] = tensor
            else:
                raise LayoutError(f"{key!r} is no name of a tensor of an alignment")
            index = head not in vectors and name == "index"
            if not (tensor.dtype == torch.int64 if index else tensor.is_floating_point()):
                raise LayoutError(
                    f"{key!r} is {str(tensor.dtype).removeprefix('torch.')}: not the dtype of such a tensor"
                )
            if head not in vectors:
                _require_shape(key, tensor, spec, Instance.parse(head), kinds[kind], name)
        elements = {}
        for (head, kind), values in parts.items():
            instance = Instance.parse(head)
            if instance in elements:
                raise LayoutError(f"there are two elements of {head!r}")
            try:
                elements[instance] = kinds[kind](**values)
            except TypeError as error:
                raise LayoutError(f"'{head}/{kind}' has the parts {', '.join(map(repr, values))} ({error})") from error
        undeclared = [str(i) for i in elements if i not in spec.movable]
        undeclared += [name for found in vectors.values() for name in found if name not in spec.tensors]
        if undeclared:
            raise LayoutError(f"{', '.join(undeclared)} not in the declaration")
        variants = tuple(_entry({"variants": "[]", **meta}, "variants", list[str]))
        soft = TRANSPORT in variants
        wrong = [str(i) for i, g in elements.items() if not _belongs(g, spec, i, soft)]
        wrong += [name for name, t in vectors["shift"].items() if not _translates(t, spec, name)]
        wrong += [name for name, v in vectors["gauge"].items() if name not in spec.gauges or not _fits(v, spec, name)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not an element of the group of that axis, or of another size")
        frame = tuple(_entry(meta, "frame", list[str]))
        if unknown := [name for name in frame if name not in REWRITES]:
            raise ValueError(f"{', '.join(map(str, unknown))}: no rewrites that this version knows")
        if unknown := [name for name in variants if name not in [*VARIANTS, TRANSPORT]]:
            raise ValueError(f"{', '.join(map(str, unknown))}: no variants that this version knows")
        provenance = _entry(meta, "provenance", dict[str, object])
        return cls(spec, elements, vectors["shift"], provenance, frame, variants, vectors["gauge"])


def _entry(meta: Mapping[str, str], key: str, kind: Any) -> Any:
    """The data under a key of the metadata; LayoutError, which names it, if they are not of that kind."""
    try:
        value = json.loads(meta[key])
    except KeyError as error:
        raise LayoutError(f"its metadata has no {key!r}") from error
    except ValueError as error:
        raise LayoutError(f"{key!r} of its metadata is no JSON: {error}") from error
    require_type(value, kind, key)
    return value


def _require_shape(key: str, tensor: Tensor, spec: Spec, instance: Instance, kind: type[Element], part: str) -> None:
    """LayoutError if a part of an element is not of the shape that it must have for its axis; of an axis, or a part,
    that is not known, the error comes later."""
    shapes = (
        shapes_of(kind, spec.axes[instance.axis].size, spec.batch(instance.axis)) if instance.axis in spec.axes else {}
    )
    if part in shapes and tuple(tensor.shape) != shapes[part]:
        raise LayoutError(f"{key!r} has the shape {list(tensor.shape)}, expected {list(shapes[part])} by its axis")


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """The sha256 of tensors and metadata, by name, but for the checksum itself."""
    digest = hashlib.sha256(json.dumps({key: meta[key] for key in sorted(meta) if key != CHECKSUM}).encode())
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _in_words(axis: Axis | None) -> str:
    return "absent" if axis is None else f"of size {axis.size} ({axis.group.label if axis.group else 'not moved'})"


def _belongs(element: Element, spec: Spec, instance: Instance, soft: bool) -> bool:
    """Whether an element that was read from a file is one of its axis: then it keeps the function. soft: it may also
    be a mean of permutations, which does not."""
    axis = spec.axes[instance.axis]
    if axis.group is None or (element.size, element.batch) != (axis.size, spec.batch(instance.axis)):
        return False
    if isinstance(element, Coupling):
        return soft and "permutation" in subgroups(axis.group, axis.size) and Sinkhorn().contains(element, 1e-6)
    whole = [not tensor.is_floating_point() for key, tensor in element.tensors().items() if key == "index"]
    return all(whole) and axis.group.contains(element, 1e-6)


def _translates(shift: Tensor, spec: Spec, name: str) -> bool:
    return any(rule.bias == name for rule in spec.shifts) and _fits(shift, spec, name)


def _fits(vector: Tensor, spec: Spec, name: str) -> bool:
    """Whether a vector is finite and as long as the bias of that name, or of the weight of that name."""
    bias = spec.tensors[name if name not in spec.gauges else bias_of(name)]
    return tuple(vector.shape) == bias.layout.shape(spec.sizes) and bool(vector.isfinite().all())


def _added(first: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**first, **{name: first[name] + t if name in first else t for name, t in then.items()}}


def _sorted_header(data: bytes) -> bytes:
    """A safetensors file with its header in one order: the library writes metadata in another one each time."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _moved(alignment: Alignment, source: Checkpoint) -> Rewritten:
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
        return Rule(info, partial(self._wide, name, file), short, what="the moved tensor")

    def _short(self, name: str, file: str) -> Tensor:
        return self.alignment.move(name, self.source.read(file))

    def _wide(self, name: str, file: str) -> Tensor:
        """The moved tensor in float64."""
        moved = self.alignment.shift(name, self._linear(name), self._linear)
        if not is_finite(moved):
            raise IncompatibleError(
                f"{file}: the moved tensor holds NaN or infinity before it is rounded, so the alignment is at "
                "fault, not the model; make it again with `symfuse align`"
            )
        return moved

    def _linear(self, name: str) -> Tensor:
        return self.alignment.move(name, self.source.read(self.alignment.spec.file_name(name)).double())


def random_alignment(spec: Spec, seed: int, axes: Collection[str] | None = None, *, largest: bool = False) -> Alignment:
    """Random elements of every axis (or of those named), and random translations: the same function, far away.

    largest: of all that may act, which is how a declaration is proved (the outputs must not change); else of what
    matching usually looks for, which is how a planted case is made.
    """
    rng = torch.Generator().manual_seed(seed)
    chosen = [i for i in spec.movable if axes is None or i.axis in axes]
    elements = {}
    for instance in sorted(chosen):
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
