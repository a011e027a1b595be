"""Declarations that are deliberately wrong: matching under one is inexact, the aligned model computes something else
(Verma & Elbayad 2024, who compare them with exact matching).

A variant is a function from a Spec to a Spec. Matching, alignment and proof use its layouts without further code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from symfuse.errors import OptionError, SpecError
from symfuse.groups import Permutation
from symfuse.messages import some, suggestion
from symfuse.spec import Atom, Declared, Layout, Spec, Variance, anatomy
from symfuse.spec.layout import Node, Product

# Anatomies of axes that only tensors of attention, or of what is in its place, have beside the stream.
ATTENTION = {"qk", "k", "c", "p", "v", "h", "kv", "latent", "conv"}
# The axes that a variant splits off an axis: matching the axis also matches these.
SPLIT = {"qk": re.compile("k"), "residual": re.compile(r"residual_\d+")}


def separate_qk(spec: Spec) -> Spec:
    """Keys have an element of their own, of the same group, and no longer follow the queries: `qk*` becomes `k`."""

    def rename(node: Node) -> Node:
        return Atom("k") if node == Atom("qk", Variance.DUAL) else node

    if not any(Atom("qk", Variance.DUAL) in declared.layout.atoms for declared in spec.tensors.values()):
        why = "it has rotary positions" if "c" in spec.axes else "no tensor has keys that are dual to queries (qk*)"
        raise _unfit(spec, "separate-qk", why)
    shifts = tuple(replace(s, axis="k") if s.axis == "qk*" else s for s in spec.shifts)
    return replace(_each(spec, rename), axes={**spec.axes, "k": spec.axes["qk"]}, shifts=shifts)


def heads_ignored(spec: Spec) -> Spec:
    """Units of different heads may mix: `(h qk)` and `(h v)` become flat axes, each with one permutation per layer.

    The paper lets queries and keys follow the permutation of the values; here they have one of their own.
    """
    inner = [name for name, axis in spec.axes.items() if "h" in axis.per]

    def flatten(node: Node) -> Node:
        if isinstance(node, Product) and len(node.parts) == 2 and node.parts[0] == Atom("h"):
            return node.parts[1] if isinstance(node.parts[1], Atom) else node
        return node

    flattened = _each(spec, flatten)
    if not inner:
        why = "several queries share one head of keys and values" if "kv" in spec.axes else "it has no heads"
        raise _unfit(spec, "heads-ignored", why)
    if left := [n for n, d in flattened.tensors.items() if Atom("h") in d.layout.atoms]:
        raise _unfit(spec, "heads-ignored", f"the heads of {some(left)} are not one space inside")
    axes = {name: axis for name, axis in spec.axes.items() if name != "h"}
    for name in inner:
        per = tuple(outer for outer in axes[name].per if outer != "h")
        axes[name] = replace(axes[name], size=axes[name].size * spec.axes["h"].size, group=Permutation(), per=per)
    return replace(flattened, axes=axes)


def separate_residual(spec: Spec) -> Spec:
    """Each point of the residual stream has an element of its own; the skip connections between them stay as they are.

    Points are where sublayers meet, from 0 to twice the number of layers: `residual` is what the embeddings write and
    the first attention reads, `residual_1` what this attention writes and its feed-forward reads, and so on; heads read
    the last. A norm belongs to the point at which it is applied: post-norm where its sublayer has written, pre-norm
    where the next one reads. A tied decoder belongs to the embeddings' point. Parallel blocks, each after a norm of its
    own, are treated as sequential. (The paper has post-norm models only.)
    """
    if not {"l", "residual"} <= spec.axes.keys():
        raise _unfit(spec, "separate-residual", "it has no one residual stream")
    streams = [name for name, layout in spec.outputs.items() if _names(layout) & {"residual"}]
    if len(streams) > 1:
        raise _unfit(spec, "separate-residual", f"it is not declared at which point of the stream {some(streams)} are")
    points, last = _points(spec), 2 * spec.axes["l"].size

    def at(layout: Layout, writes: int, reads: int) -> Layout:
        def rename(node: Node) -> Node:
            if not isinstance(node, Atom) or node.name != "residual":
                return node
            return replace(node, name=_point_name(reads if node.variance is Variance.DUAL else writes))

        return _mapped(layout, rename)

    tensors = {n: Declared(at(d.layout, *points[n]), d.index) if n in points else d for n, d in spec.tensors.items()}
    axes = {**spec.axes, **{_point_name(point): spec.axes["residual"] for point in range(last + 1)}}
    outputs = {name: at(layout, last, last) for name, layout in spec.outputs.items()}
    return replace(spec, axes=axes, tensors=tensors, outputs=outputs)


def _point_name(point: int) -> str:
    return f"residual_{point}" if point else "residual"


def _points(spec: Spec) -> dict[str, tuple[int, int]]:
    """The point of the stream at which each of its tensors writes or is applied, and the one at which it reads."""
    last = 2 * spec.axes["l"].size
    points: dict[str, tuple[int, int]] = {}
    norms: dict[int, list[str]] = {}  # the gains of post-norm layers, in their order
    biases: dict[str, str] = {}
    for name, declared in spec.tensors.items():
        axes, layer, weight = _names(declared.layout), declared.index.get("l"), name.removesuffix("bias") + "weight"
        if "residual" not in axes and name not in spec.reads:
            continue
        if name != weight and name.endswith("bias") and weight in spec.tensors:
            biases[name] = weight
        elif layer is None:
            _require_outside(spec, name)
            points[name] = (last, last) if name in spec.reads else (0, last)
        elif "ffn" in axes:
            points[name] = 2 * layer + 2, 2 * layer + 1
        elif not ATTENTION.isdisjoint(map(anatomy, axes)):
            points[name] = 2 * layer + 1, 2 * layer
        elif name not in spec.reads:
            norms.setdefault(layer, []).append(name)
    for layer, gains in norms.items():
        if len(gains) != 2:
            raise _unfit(
                spec, "separate-residual", f"it is not declared at which points of layer {layer} {some(gains)} are"
            )
        points |= {gain: (point, point) for point, gain in enumerate(gains, 2 * layer + 1)}
    for gain, readers in spec.reads.items():
        if len({points[name][1] for name in readers if name in points}) > 1:
            raise _unfit(spec, "separate-residual", f"attention and feed-forward read the same norm {gain} in parallel")
        if gain not in points and readers[0] in points:  # else it is of a latent
            points[gain] = (points[readers[0]][1],) * 2
    points |= {bias: points[weight] for bias, weight in biases.items()}
    return points | {alias: (points[of][0],) * 2 for alias, of in spec.tied.items() if of in points}


def _require_outside(spec: Spec, name: str) -> None:
    """SpecError for a tensor outside the layers that is not clearly before or after them."""
    layout, order = spec.tensors[name].layout, list(spec.tensors)
    inside = next(i for i, declared in enumerate(spec.tensors.values()) if declared.index)
    atoms = [atom for atom in layout.atoms if atom.name == "residual"]
    late = order.index(name) > inside and any(atom.variance is Variance.PLAIN for atom in atoms)
    if name not in spec.heads | spec.reads.keys() and (late or len(atoms) > 1 or "relative" in _names(layout)):
        raise _unfit(spec, "separate-residual", f"it is not declared at which point of the stream {name} is")


# Not a change of layouts: where units may be permuted, they may also be averaged (symfuse.groups.coupling).
TRANSPORT = "transport"

# In the order in which they are applied: keys are split off before heads are left out.
VARIANTS: Mapping[str, Callable[[Spec], Spec]] = {
    "separate-qk": separate_qk,
    "heads-ignored": heads_ignored,
    "separate-residual": separate_residual,
}


def require_variants(names: Iterable[str]) -> tuple[str, ...]:
    """The names in the order of VARIANTS, TRANSPORT last; OptionError for one that does not exist."""
    requested, known = list(names), [*VARIANTS, TRANSPORT]
    for name in requested:
        if name not in known:
            raise OptionError(f"no variant is called {name!r}{suggestion(name, known)}; there are {known}")
    return tuple(name for name in known if name in requested)


def vary(spec: Spec, names: Iterable[str]) -> Spec:
    """The declaration under these variants. OptionError for an unknown name; SpecError for a family whose layouts one
    of them does not fit."""
    variants = [name for name in require_variants(names) if name != TRANSPORT]
    if variants and len([key for key in spec.index_axes if anatomy(key) == "l"]) > 1:
        raise _unfit(spec, some(variants), "it has several stacks of layers")
    for name in variants:
        spec = VARIANTS[name](spec)
    return spec


def with_split(axes: Iterable[str], spec: Spec) -> dict[str, str]:
    """Those of the axes that the declaration has, and those that variants have split off; each → the original axis."""
    split = {axis: [n for n in spec.axes if axis in SPLIT and SPLIT[axis].fullmatch(n)] for axis in axes}
    return {name: axis for axis, parts in split.items() for name in (axis, *parts) if name in spec.axes}


def _unfit(spec: Spec, variant: str, why: str) -> SpecError:
    return SpecError(f"{variant} does not fit the layouts of {spec.family}: {why}; leave that variant out")


def _names(layout: Layout) -> set[str]:
    return {atom.name for atom in layout.atoms}


def _mapped(layout: Layout, change: Callable[[Node], Node]) -> Layout:
    """The layout with every node changed, from the outside in."""

    def walk(node: Node) -> Node:
        node = change(node)
        return node if isinstance(node, Atom) else replace(node, parts=tuple(map(walk, node.parts)))

    return Layout(tuple(map(walk, layout.dims)))


def _each(spec: Spec, change: Callable[[Node], Node]) -> Spec:
    return replace(spec, tensors={n: Declared(_mapped(d.layout, change), d.index) for n, d in spec.tensors.items()})
