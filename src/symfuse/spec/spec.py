"""A Spec: every tensor of one checkpoint, with its layout; every axis, with the group that acts on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from symfuse.arguments import require_type
from symfuse.errors import LayoutError, SpecError
from symfuse.groups import GROUPS, Group
from symfuse.messages import shown, some
from symfuse.spec.layout import Atom, Concat, Cuts, Layout, Segment, Variance, cut, parse

K = TypeVar("K")
V = TypeVar("V")
# LayerNorm, RMSNorm, and both with gains that are stored less 1.
NormKind = Literal["layer", "layer+1", "rms", "rms+1"]
_OFFSETS: dict[NormKind, float] = {"layer": 0.0, "layer+1": 1.0, "rms": 0.0, "rms+1": 1.0}
# The index of tensors of layers behind the last one, which predict further tokens.
BEHIND = "next"


@dataclass(frozen=True)
class Axis:
    """A space that tensors share. group: the largest that may act; None: the axis is fixed.
    per: the axes for each of whose indices there is a separate element. why: in words, where a family has a reason of
    its own for no larger group (others: `symfuse.model.reasons`)."""

    size: int
    group: Group | None = None
    per: tuple[str, ...] = ()
    why: str = field(default="", compare=False)


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight."""
    return weight.removesuffix("weight") + "bias"


def anatomy(axis: str) -> str:
    """The kind of an axis, in whatever part of the model (a tower, a decoder): the last word of its name, so that
    `vision_ffn` is the `ffn` of the vision tower, and `vision_l` counts its layers."""
    return axis.rpartition("_")[2]


def layer_of(index: Mapping[str, int]) -> int | None:
    """The layer of template indices, counted from 0 in each part of a model; None outside of layers."""
    return next((number for key, number in index.items() if anatomy(key) == "l"), None)


class Instance(NamedTuple):
    """One axis at one place: `ffn[3]` is the feed-forward space of layer 3. A tuple, which is a fast key of tables."""

    axis: str
    index: tuple[int, ...] = ()  # type: ignore[assignment]  # tuple.index is not needed

    def __str__(self) -> str:
        return self.axis + (f"[{','.join(map(str, self.index))}]" if self.index else "")

    @classmethod
    def parse(cls, text: str) -> Instance:
        match = re.fullmatch(r"(\w+)(?:\[(\d+(?:,\d+)*)\])?", text)
        if match is None:
            raise LayoutError(f"{text!r} is not an axis instance such as 'residual' or 'ffn[3]'")
        return cls(match[1], tuple(int(i) for i in match[2].split(",")) if match[2] else ())


@dataclass(frozen=True)
class Declared:
    """A tensor of the model: its layout, and the template indices (such as the layer) of its name."""

    layout: Layout
    index: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of an axis in one part of a tensor. atoms: those of the part, atom: that of the axis. cuts: the
    steps from the tensor to the part (see `cut`); order: of its dimensions, the first `front` of them being the batch
    axes, and then the axis itself."""

    atom: Atom
    atoms: tuple[Atom, ...]
    cuts: Cuts
    order: tuple[int, ...]
    front: int

    def unfold(self, tensor: Tensor) -> Tensor:
        """The part of the tensor as [*b, n, k]: a row for each unit of the axis."""
        view = (cut(tensor, self.cuts) if self.cuts else tensor).permute(self.order)
        return view.reshape(*view.shape[: self.front], -1)


@dataclass(frozen=True)
class Shift:
    """A bias that may be translated, t being any vector: one more symmetry, beside the linear ones.

    bias: its name; axis: the part of it that may move. weight, into: the projection that reads that axis and
    its bias, from which weight @ t is taken (values: softmax rows sum to one); None where the translation is
    free (keys: softmax ignores a constant per row).
    """

    bias: str
    axis: str
    weight: str | None = None
    into: str | None = None

    def at(self, index: Mapping[str, int]) -> Shift:
        names = (None if name is None else name.format(**index) for name in (self.bias, self.weight, self.into))
        bias, weight, into = names
        return Shift(bias or "", self.axis, weight, into)


class Memo(dict[K, V]):
    """Values that are computed on first use and cached: of a model's many tensors few are needed."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


@dataclass(frozen=True)
class Spec:
    """The declaration of one checkpoint: what symfuse knows of an architecture, all of it data.

    family: the model type. axes: by name. tensors: by canonical name (without the base prefix), in order.
    heads: names of the tensors of the task head. tied: alias → the tensor that it equals. shifts: biases that
    may be translated. outputs: the layouts of the model's outputs, by field name. reads: of a pre-norm model, the
    gain of each norm of its stream → all that reads what this norm puts out: weights of linear maps (whose biases are
    named alike), or output fields. norm: what those norms are: "layer" (LayerNorm), "rms" (RMSNorm), with "+1" if gains
    are stored less 1. scales: of a LayerScale the gain → the weight (whose bias is named alike) of the linear map
    whose output it scales, entry by entry. stacks: tensors of which the file has the pieces (see `stored`) → the names
    of these there, with a * for the index of the first axis, one for each part of the next. names: canonical name →
    name in the file, where they differ. buffers: names in the file of derived tensors, which are dropped. gauges: of a
    LayerNorm whose gain and bias are kept, the weights of linear maps that read what it puts out, and nothing else →
    that gain. What it puts out, x = γ ⊙ y + β with Σ y = 0, satisfies n · (x − β) = 0 for n along 1/γ: so W + v nᵀ with
    the bias b − v (n · β) computes the same for any vector v, one more symmetry.
    """

    family: str
    axes: Mapping[str, Axis]
    tensors: Mapping[str, Declared]
    heads: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm: NormKind = "layer"
    scales: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    gauges: Mapping[str, str] = field(default_factory=dict)

    __repr__, _repr_html_ = shown(
        lambda self: {"family": self.family, "tensors": len(self.tensors), "axes": ", ".join(self.axes)}
    )

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: axis.size for name, axis in self.axes.items()}

    @property
    def shown(self) -> frozenset[str]:
        """The axes of the model's outputs, which a rewrite must not move; none once it has a head."""
        return frozenset(axis for o in self.outputs.values() for axis in o.names) if not self.heads else frozenset()

    @property
    def centred(self) -> bool:
        """Whether the norms of the stream subtract its mean."""
        return self.norm.startswith("layer")

    @property
    def offset(self) -> float:
        """The constant that is added to the stored gain of a norm."""
        return _OFFSETS[self.norm]

    def file_name(self, name: str) -> str:
        """The name under which the checkpoint stores this tensor, or would store it if it were whole."""
        return self.names.get(name, name)

    def stored(self, name: str) -> dict[str, Layout]:
        """The tensors of the file that hold this one, by their names there, with their layouts: itself; or for a stack
        all pieces, whose concatenation, flattened, is the flattened stack (of experts, `e (|ffn| + ffn) residual*`: the
        gate, `|ffn| residual*`, and the up, `ffn residual*`, of the first, then those of the next)."""
        layout = self.tensors[name].layout
        if name not in self.stacks:
            return {self.file_name(name): layout}
        (count,) = Layout(layout.dims[:1]).shape(self.sizes)
        pieces = list(zip(self.stacks[name], pieces_of(layout), strict=True))
        return {file.replace("*", str(i)): piece for i in range(count) for file, piece in pieces}

    @cached_property
    def files(self) -> dict[str, str]:
        """Every name in the file → the tensor that is stored there, or the stack of which it is a piece."""
        return {file: name for name in self.tensors for file in self.stored(name)}

    def instance(self, axis: str, index: Mapping[str, int]) -> Instance:
        """The instance of an axis on a tensor with these template indices."""
        return Instance(axis, tuple(index[per] for per in self.axes[axis].per if per in index))

    def index_of(self, instance: Instance) -> dict[str, int]:
        """The template indices of the tensors of an axis instance, as far as it depends on them."""
        return dict(zip(self._index_keys[instance.axis], instance.index, strict=True))

    @cached_property
    def _index_keys(self) -> dict[str, tuple[str, ...]]:
        """For each axis those axes of its `per` that are template indices of names."""
        return {name: tuple(per for per in axis.per if per in self.index_axes) for name, axis in self.axes.items()}

    def is_shared(self, axis: str) -> bool:
        """Whether an axis belongs to the whole model, like its stream; otherwise it belongs to one layer, or to
        attention outside of layers, such as a pooling head: heads around other axes, or the axes inside of them."""
        return axis in self._shared

    @cached_property
    def _shared(self) -> frozenset[str]:
        def shared(name: str) -> bool:
            inside = [axis for axis in self.axes.values() if axis.group is not None and name in axis.per]
            return not inside or any(set(axis.per) & self.index_axes for axis in inside)

        return frozenset(name for name, axis in self.axes.items() if not axis.per and shared(name))

    def read_dim(self, reader: str) -> int:
        """The stored dimension of a weight in `gauges` that reads the norm."""
        (axis,) = self.tensors[self.gauges[reader]].layout.names
        return self.tensors[reader].layout.dims.index(Atom(axis, Variance.DUAL))

    @cached_property
    def depth(self) -> int:
        """The number of layers; of a model with several parts, the largest."""
        return max((axis.size for name, axis in self.axes.items() if anatomy(name) == "l"), default=0)

    def batch_axes(self, axis: str) -> tuple[str, ...]:
        """The axes over which the elements of an instance are batched (other axes of its `per` are in its index)."""
        return self._batches[axis][0]

    def batch(self, axis: str) -> tuple[int, ...]:
        """The sizes of `batch_axes`."""
        return self._batches[axis][1]

    @cached_property
    def _batches(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        batches = {}
        for name, axis in self.axes.items():
            pers = tuple(per for per in axis.per if per not in self.index_axes)
            batches[name] = pers, tuple(self.axes[per].size for per in pers)
        return batches

    @cached_property
    def index_axes(self) -> frozenset[str]:
        """Axes that are template indices of names (layers), not dimensions of tensors."""
        return frozenset(key for declared in self.tensors.values() for key in declared.index)

    @cached_property
    def movable(self) -> dict[Instance, tuple[str, ...]]:
        """Every instance on which a group acts, with the names of the tensors on which it acts."""
        out: dict[Instance, list[str]] = {}
        for name, declared in self.tensors.items():
            for axis in declared.layout.names:
                if not axis.isdigit() and self.axes[axis].group is not None:
                    out.setdefault(self.instance(axis, declared.index), []).append(name)
        return {instance: tuple(names) for instance, names in out.items()}

    @cached_property
    def squares(self) -> frozenset[tuple[str, str]]:
        """The tensors a part of which has an axis twice (a square map of a space to itself), with that axis."""
        return frozenset(
            (name, axis)
            for name, declared in self.tensors.items()
            for part in declared.layout.parts
            for axis, count in Counter(atom.name for atom in part).items()
            if count > 1
        )

    @cached_property
    def touched(self) -> Mapping[str, dict[str, Instance]]:
        """For each tensor the instances that act on it, by axis, in the order in which they act."""

        def of(name: str) -> dict[str, Instance]:
            declared = self.tensors[name]
            axes = (axis for axis in self.order if axis in declared.layout.names)
            return {axis: self.instance(axis, declared.index) for axis in axes}

        return Memo(of)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Axes on which a group acts, in the order in which they act: those that depend on others (`per`) first."""
        movable = [name for name, axis in self.axes.items() if axis.group is not None]

        def depth(name: str) -> int:
            return max((1 + depth(per) for per in self.axes[name].per), default=0)

        return tuple(sorted(movable, key=lambda name: -depth(name)))

    def segments(self, name: str, tensor: Tensor) -> Iterator[Segment]:
        """The parts of a tensor (see `Layout.segments`)."""
        for cuts, atoms in zip(self.cuts[name], self.tensors[name].layout.parts, strict=True):
            yield Segment(cut(tensor, cuts), atoms)

    def views(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The views of `segments`, one for each of the layout's `parts`."""
        return [*map(partial(cut, tensor), self.cuts[name])]

    @cached_property
    def cuts(self) -> Mapping[str, tuple[Cuts, ...]]:
        """How each tensor is cut into its parts."""
        return Memo(lambda name: self.tensors[name].layout.cuts(self.sizes))

    @cached_property
    def occurrences(self) -> Mapping[tuple[str, str], list[Occurrence]]:
        """The occurrences of an axis in a tensor, by (tensor, axis), in the order of the parts."""
        return Memo(lambda key: [*self._occurrences(*key)])

    def _occurrences(self, name: str, axis: str) -> Iterator[Occurrence]:
        for cuts, atoms in zip(self.cuts[name], self.tensors[name].layout.parts, strict=True):
            names = [atom.name for atom in atoms]
            for at in (i for i, other in enumerate(names) if other == axis):
                front = (*map(names.index, self.batch_axes(axis)), at)
                order = front + tuple(i for i in range(len(names)) if i not in front)
                yield Occurrence(atoms[at], atoms, cuts, order, len(front))

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # caches are not pickled

    def part(self, name: str, tensor: Tensor, atom: str) -> Segment:
        """The part of a tensor in which an atom, as written, occurs; LayoutError if it is in none."""
        for segment in self.segments(name, tensor):
            if atom in map(str, segment.atoms):
                return segment
        raise LayoutError(f"{name}: {atom!r} does not occur in its layout {self.tensors[name].layout}")

    def through(self, rule: Shift, weight: Tensor) -> Tensor:
        """The weight of a rule with the axes of what it moves first, then those of `rule.into`. Those that neither has,
        such as the query heads that share a value, are summed over."""
        (whole,) = self.segments(str(rule.weight), weight)
        letters = {atom.name: chr(97 + i) for i, atom in enumerate(whole.atoms)}
        part = next(p for p in self.tensors[rule.bias].layout.parts if rule.axis in map(str, p))
        into = self.tensors[str(rule.into)].layout.atoms
        kept = "".join(letters[atom.name] for atom in (*part, *into))
        return torch.einsum(f"{''.join(letters.values())}->{kept}", whole.view)

    def shares(self, name: str, other: Spec) -> bool:
        """Whether a tensor is in both models, with the same axes and sizes, and is not merely an alias of another
        tensor."""
        if name not in other.tensors or name in self.tied or name in other.tied:
            return False
        ours, theirs = self.tensors[name].layout, other.tensors[name].layout
        return ours == theirs and ours.shape(self.sizes) == theirs.shape(other.sizes)

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Check that every declared tensor exists with its shape, and no other tensor does: else one error that lists
        all.

        shapes: by name in the file. where: the checkpoint, for the message.
        """
        missing = [f for f, name in self.files.items() if f not in shapes and name not in self.tied]
        extra = [f for f in shapes if f not in self.files and f not in self.buffers]
        if missing or extra:
            lines = [f"{where}: the tensors are not those of {self.family}"]
            lines += [f"  missing: {some(missing, limit=8)}"] if missing else []
            lines += [f"  not declared: {some(extra, limit=8)}"] if extra else []
            lines.append(
                "  a missing tensor would be filled with random numbers on loading, an undeclared one would not "
                "move with the rest; does config.json belong to these weights?"
                + (" A merge can leave the latter out, or keep it as it is (--foreign drop or keep)" if extra else "")
            )
            raise SpecError("\n".join(lines))
        for name in self.tensors:
            for file, layout in self.stored(name).items():
                if file in shapes:
                    layout.check(f"{where}: {file}", shapes[file], self.sizes)

    def to_json(self) -> dict[str, Any]:
        """The declaration as data; `from_json` is its inverse."""
        return {
            "family": self.family,
            "axes": {
                name: {"size": axis.size, "group": axis.group.name if axis.group else None, "per": list(axis.per)}
                for name, axis in self.axes.items()
            },
            "tensors": {name: [str(d.layout), dict(d.index)] for name, d in self.tensors.items()},
            "heads": sorted(self.heads),
            "tied": dict(self.tied),
            "shifts": [[s.bias, s.axis, s.weight, s.into] for s in self.shifts],
            "outputs": {name: str(layout) for name, layout in self.outputs.items()},
            "reads": {norm: list(readers) for norm, readers in self.reads.items()},
            **({"norm": self.norm} if self.norm != "layer" else {}),
            **({"scales": dict(self.scales)} if self.scales else {}),
            **({"stacks": {name: list(pieces) for name, pieces in self.stacks.items()}} if self.stacks else {}),
            "names": dict(self.names),
            "buffers": sorted(self.buffers),
            **({"gauges": dict(self.gauges)} if self.gauges else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """The declaration from its data; LayoutError, which names the key, if they are invalid."""
        require_type(data, _DATA, "spec")
        require_type(data.get("scales", {}), dict[str, str], "spec.scales")
        require_type(data.get("stacks", {}), dict[str, list[str]], "spec.stacks")
        require_type(data.get("gauges", {}), dict[str, str], "spec.gauges")
        axes = {name: _axis(name, a) for name, a in data["axes"].items()}
        tensors = {
            name: Declared(_layout(f"tensors.{name}", text), index) for name, (text, index) in data["tensors"].items()
        }
        for name, declared in tensors.items():
            used = {axis for axis in declared.layout.names if not axis.isdigit()} | set(declared.index)
            if unknown := sorted(used - axes.keys()):
                raise LayoutError(f"'spec.tensors.{name}': axis {unknown[0]!r} is not declared")
        for name, pieces in data.get("stacks", {}).items():
            if name not in tensors or len(pieces_of(tensors[name].layout)) != len(pieces):
                raise LayoutError(f"'spec.stacks.{name}': no tensor in {len(pieces)} kinds of pieces is declared")
        if strange := [name for pair in data.get("gauges", {}).items() for name in pair if name not in tensors]:
            raise LayoutError(f"'spec.gauges': no tensor {strange[0]!r} is declared")
        return cls(
            family=data["family"],
            axes=axes,
            tensors=tensors,
            heads=frozenset(data["heads"]),
            tied=data["tied"],
            shifts=tuple(Shift(*s) for s in data["shifts"]),
            outputs={name: _layout(f"outputs.{name}", text) for name, text in data["outputs"].items()},
            reads={norm: tuple(readers) for norm, readers in data["reads"].items()},
            norm=data.get("norm", "layer"),
            scales=data.get("scales", {}),
            stacks={name: tuple(pieces) for name, pieces in data.get("stacks", {}).items()},
            names=data["names"],
            buffers=frozenset(data["buffers"]),
            gauges=data.get("gauges", {}),
        )


# The keys of `to_json`.
_DATA = {
    "family": str,
    "axes": dict[str, object],
    "tensors": dict[str, tuple[str, dict[str, int]]],
    "heads": list[str],
    "tied": dict[str, str],
    "shifts": list[tuple[str, str, str | None, str | None]],
    "outputs": dict[str, str],
    "reads": dict[str, list[str]],
    "names": dict[str, str],
    "buffers": list[str],
}


def _layout(key: str, text: str) -> Layout:
    try:
        return parse(text)
    except LayoutError as error:
        raise LayoutError(f"'spec.{key}': {error}") from error


def _axis(name: str, data: Any) -> Axis:
    key = f"spec.axes.{name}"
    require_type(data, {"size": int, "group": str | None, "per": list[str]}, key)
    group = data["group"]
    if data["size"] < 0 or (group is not None and group not in GROUPS):
        raise LayoutError(f"{key!r} is of size {data['size']} with group {group!r}; known are {', '.join(GROUPS)}")
    return Axis(data["size"], None if group is None else GROUPS[group], tuple(data["per"]))


def pieces_of(layout: Layout) -> list[Layout]:
    """The layouts of the pieces of a stack, at one index of its first axis: one for each part of the next dimension."""
    second, rest = layout.dims[1:2], layout.dims[2:]
    parts = [part for node in second for part in (node.parts if isinstance(node, Concat) else (node,))]
    return [Layout((part, *rest)) for part in parts]


def indices(template: str, axes: Mapping[str, Axis]) -> list[dict[str, int]]:
    """Every way to fill in a name with `{l}`: one for each index of the axis l."""
    out: list[dict[str, int]] = [{}]
    for key in dict.fromkeys(re.findall(r"{(\w+)}", template)):
        if key not in axes:
            raise LayoutError(f"{template}: axis {key!r} is not declared; declared are {', '.join(sorted(axes))}")
        out = [index | {key: i} for index in out for i in range(axes[key].size)]
    return out


def expand(templates: Mapping[str, str], axes: Mapping[str, Axis]) -> dict[str, Declared]:
    """Names with `{l}` become one name for each index of the axis l; layouts are parsed and their axes checked.

    A full name behind the template that it is of is an exception: that tensor has another layout, or with an empty one
    is not there. LayoutError for an axis that is not declared, or if it is not clear which element acts: each axis that
    another is `per` must occur once, in the name or in the same part of the layout.
    """
    out: dict[str, Declared] = {}
    for template, text in templates.items():
        if not text:
            out.pop(template, None)
            continue
        layout = parse(text)
        of = dict(out[template].index) if template in out else {}  # of an exception: that of its template
        filled = [of | index for index in indices(template, axes)]
        _check_axes(template, layout, [*of, *re.findall(r"{(\w+)}", template)], axes)
        out |= {template.format(**index): Declared(layout, index) for index in filled}
    return out


def _check_axes(template: str, layout: Layout, keys: list[str], axes: Mapping[str, Axis]) -> None:
    for part in layout.parts:
        names = [atom.name for atom in part if not atom.name.isdigit()]
        for name in names:
            if name not in axes:
                raise LayoutError(f"{template}: axis {name!r} is not declared; declared are {', '.join(sorted(axes))}")
            for per in axes[name].per if axes[name].group is not None else ():
                if per not in keys and (times := names.count(per)) != 1:
                    raise LayoutError(
                        f"{template}: axis {name!r} has one element for each index of {per!r}, which occurs {times} "
                        f"times beside it, not once, and is not in the name\n    {layout}"
                    )
