"""The layout language: one line per tensor that says which symmetry acts on each of its dimensions.

    layout := dim (" " dim)* | "()"              of a tensor without dimensions
    dim    := atom | "(" sum ")"
    sum    := product ("+" product)*          a concatenation: fused projections
    product:= dim+                            a product of axes, slowest first, as stored
    atom   := NAME | NAME"*" | "|"NAME"|" | NUMBER

`ffn` moves by g, `ffn*` by its dual g⁻ᵀ, `|ffn|` by the permutation part of g alone; a number is an unnamed
axis of that size, which nothing moves. Sizes of names come from the declaration's axes.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NoReturn

from torch import Tensor

from symfuse.errors import LayoutError
from symfuse.groups import Part

SCALAR = "()"
MOST_TOKENS, MOST_PARTS = 400, 10_000  # above those of any tensor


class Variance(enum.Enum):
    """How an element g of an axis's group acts on a dimension of a tensor."""

    value: Part
    PRIMAL = "primal"  # w → g w: outputs, biases, embeddings
    DUAL = "dual"  # w → g⁻ᵀ w: inputs, keys, the head axis of an output projection
    PLAIN = "plain"  # w → |g| w, the permutation part: norm gains, the gate of a gated feed-forward


@dataclass(frozen=True)
class Atom:
    """One axis (or a number: an unnamed axis of that size) with its variance."""

    name: str
    variance: Variance = Variance.PRIMAL

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return {"primal": self.name, "dual": f"{self.name}*", "plain": f"|{self.name}|"}[self.part]

    @cached_property
    def part(self) -> Part:
        """The value of the variance: which moments the dimension belongs to, and how elements act on it."""
        return self.variance.value


@dataclass(frozen=True)
class Product:
    """`a b`: the indices of several axes in one stored dimension, slowest first."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(_bracketed(part) for part in self.parts)


@dataclass(frozen=True)
class Concat:
    """`a + b`: blocks one after the other in one stored dimension, as in fused projections."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return " + ".join(_bracketed(part) if isinstance(part, Concat) else str(part) for part in self.parts)


Node = Atom | Product | Concat


def _bracketed(node: Node) -> str:
    return str(node) if isinstance(node, Atom) else f"({node})"


@dataclass(frozen=True)
class Segment:
    """A view into a tensor with one dimension for each atom."""

    view: Tensor
    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class Layout:
    """A parsed layout: one node for each stored dimension of the tensor."""

    dims: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(_bracketed(node) for node in self.dims) or SCALAR

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """All atoms, in stored order; an axis may occur more than once."""
        return tuple(_atoms(self.dims))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axes of all atoms, each once, numbers too."""
        return tuple(dict.fromkeys(atom.name for atom in self.atoms))

    @cached_property
    def parts(self) -> tuple[tuple[Atom, ...], ...]:
        """The atoms of each part that `segments` cuts a tensor into: one choice from every concatenation."""
        return tuple(_parts(self.dims))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that a tensor of this layout has; LayoutError for an undeclared axis."""
        return tuple(_size(node, sizes) for node in self.dims)

    def check(self, name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """LayoutError, with a caret under the dimension at fault, unless a tensor of `shape` fits."""
        expected = self.shape(sizes)
        if expected == tuple(shape):
            return
        text = str(self)
        lines = [f"{name}: the stored shape {tuple(shape)} does not fit its layout", f"    {text}"]
        if len(expected) == len(shape):
            at = next(i for i, (e, s) in enumerate(zip(expected, shape, strict=True)) if e != s)
            pieces = [_bracketed(node) for node in self.dims]
            start = sum(len(piece) + 1 for piece in pieces[:at])
            lines.append("    " + " " * start + "^" * len(pieces[at]) + f" {expected[at]}, but {shape[at]}")
        axes = ", ".join(f"{axis} = {sizes[axis]}" for axis in self.names if not axis.isdigit())
        lines.append(f"expected {expected} ({axes}); does config.json belong to these weights?")
        raise LayoutError("\n".join(lines))

    def segments(self, tensor: Tensor, sizes: Mapping[str, int]) -> Iterator[Segment]:
        """Views that together cover `tensor`, each with one dimension per atom: concatenations are cut,
        products are split. Writing into the views of an output writes the output."""
        for cuts, atoms in zip(self.cuts(sizes), self.parts, strict=True):
            yield Segment(cut(tensor, cuts), atoms)

    def cuts(self, sizes: Mapping[str, int]) -> tuple[Cuts, ...]:
        """The steps from a tensor to each of its parts (see `cut`)."""
        return tuple(_cuts(self.dims, sizes))


def _atoms(nodes: tuple[Node, ...]) -> Iterator[Atom]:
    for node in nodes:
        if isinstance(node, Atom):
            yield node
        else:
            yield from _atoms(node.parts)


def _parts(nodes: tuple[Node, ...]) -> Iterator[tuple[Atom, ...]]:
    if not nodes:
        yield ()
        return
    first, rest = nodes[0], nodes[1:]
    if isinstance(first, Atom):
        yield from ((first, *others) for others in _parts(rest))
    elif isinstance(first, Product):
        yield from _parts((*first.parts, *rest))
    else:
        for choice in first.parts:
            yield from _parts((choice, *rest))


def _count(nodes: Sequence[Node]) -> int:
    """How many parts there are, without making them: concatenations in several dimensions multiply."""
    counts = (sum(_count([one]) for one in node.parts) if isinstance(node, Concat) else
              1 if isinstance(node, Atom) else _count(node.parts) for node in nodes)  # fmt: skip
    return math.prod(counts)


def _size(node: Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, Atom):
        if node.name.isdigit():
            return int(node.name)
        if node.name not in sizes:
            raise LayoutError(f"axis {node.name!r} is not declared; declared are {', '.join(sorted(sizes))}")
        return sizes[node.name]
    parts = [_size(part, sizes) for part in node.parts]
    if isinstance(node, Concat):
        return sum(parts)
    product = 1
    for part in parts:
        product *= part
    return product


# One step to a part: the dimension, and either the lengths that it is split into, or the first index and the length of
# the range that is taken of it.
Cuts = tuple[tuple[int, tuple[int, ...] | None, int, int], ...]


def _cuts(nodes: tuple[Node, ...], sizes: Mapping[str, int]) -> Iterator[Cuts]:
    for dim, node in enumerate(nodes):
        if isinstance(node, Atom):
            continue
        before, after = nodes[:dim], nodes[dim + 1 :]
        lengths = tuple(_size(part, sizes) for part in node.parts)
        if isinstance(node, Product):
            for rest in _cuts((*before, *node.parts, *after), sizes):
                yield (dim, lengths, 0, 0), *rest
        else:
            start = 0
            for part, length in zip(node.parts, lengths, strict=True):
                for rest in _cuts((*before, part, *after), sizes):
                    yield (dim, None, start, length), *rest
                start += length
        return
    yield ()


def cut(tensor: Tensor, cuts: Cuts) -> Tensor:
    """The view of a part of a tensor. Ranges are taken one by one: where autograd records, views that `split` makes may
    not be written to."""
    for dim, lengths, start, length in cuts:
        if lengths is None:
            tensor = tensor.narrow(dim, start, length)
        else:
            tensor = tensor.view(*tensor.shape[:dim], *lengths, *tensor.shape[dim + 1 :])
    return tensor


# A name or number must end at white space or a sign: `2a` and `a*b` are typing errors, not products.
_TOKEN = re.compile(r"\s*(?:[()+]|(?:\|[A-Za-z_]\w*\||[A-Za-z_]\w*\*?|0|[1-9][0-9]*)(?=[\s()+]|$))")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        position = 0
        end = len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                self.fail("cannot read this", position + len(text[position:]) - len(text[position:].lstrip()))
            self.tokens.append((match.group().strip(), match.end() - len(match.group().strip())))
            position = match.end()
            if len(self.tokens) > MOST_TOKENS:
                self.fail(f"more than {MOST_TOKENS} axes and signs", position)
        self.next = 0

    def fail(self, why: str, at: int) -> NoReturn:
        raise LayoutError(f"layout does not parse: {why}\n    {self.text}\n    {' ' * at}^")

    def peek(self) -> str | None:
        return self.tokens[self.next][0] if self.next < len(self.tokens) else None

    def here(self) -> int:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else len(self.text)

    def dim(self) -> Node:
        token = self.peek()
        if token is None or token in ")+":
            self.fail("expected an axis or '('", self.here())
        opened = self.here()
        self.next += 1
        if token == "(":
            node = self.sum()
            if self.peek() != ")":
                self.fail("this '(' is never closed", opened)
            self.next += 1
            return node
        if token.startswith("|"):
            return Atom(token.strip("|"), Variance.PLAIN)
        if token.endswith("*"):
            return Atom(token[:-1], Variance.DUAL)
        return Atom(token)

    def sum(self) -> Node:
        parts = [self.product()]
        while self.peek() == "+":
            self.next += 1
            parts.append(self.product())
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def product(self) -> Node:
        parts = [self.dim()]
        while self.peek() not in (None, ")", "+"):
            parts.append(self.dim())
        return parts[0] if len(parts) == 1 else Product(tuple(parts))


@lru_cache(maxsize=4096)
def parse(text: str) -> Layout:
    """Read a layout; a LayoutError points at the place with a caret. `()` is that of a tensor without dimensions.

    >>> [str(atom) for atom in parse("residual* (h qk + h qk* + h v)").atoms]
    ['residual*', 'h', 'qk', 'h', 'qk*', 'h', 'v']
    """
    if text.strip() == SCALAR:
        return Layout(())
    parser = _Parser(text)
    dims: list[Node] = []
    while parser.peek() is not None:
        if parser.peek() in (")", "+"):
            parser.fail("nothing is open here", parser.here())
        dims.append(parser.dim())
    if _count(dims) > MOST_PARTS:
        raise LayoutError(f"layout does not parse: it has more than {MOST_PARTS:,} parts\n    {text}")
    if not dims:
        raise LayoutError("layout does not parse: it is empty; a tensor without dimensions is ()")
    return Layout(tuple(dims))
