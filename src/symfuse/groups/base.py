"""Elements and groups: what acts on an axis, and how the best element is computed from moments.

Shapes: `*b` are batch dimensions (one element for each index of the axes that an axis is declared `per`),
`n` is the size of the axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args, get_type_hints

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.errors import SymmetryError

Part = Literal["primal", "dual", "plain"]
# Not typing.Self: the checker of the tests sees methods one by one, where Self has no meaning.
A = TypeVar("A", bound="Action")
E = TypeVar("E", bound="Element")


@dataclass(frozen=True)
class Moments:
    """The input of every closed form: Gram matrices of anchor features X and source features Y, one row per unit.
    Moments of several features add.

    xy: the cross-Gram X Yᵀ. xx, yy: X Xᵀ and Y Yᵀ, of which most groups need the diagonals alone, the squared norms of
    the rows: for a group without `Group.gram` they are those, for one with it the full matrices. Every solver takes
    full ones.
    """

    xy: Float[Tensor, "*b n n"]
    xx: Float[Tensor, "*b n"] | Float[Tensor, "*b n n"]
    yy: Float[Tensor, "*b n"] | Float[Tensor, "*b n n"]

    @property
    def full(self) -> bool:
        """Whether xx and yy are Gram matrices rather than their diagonals."""
        return self.xx.ndim == self.xy.ndim

    @property
    def x_norms(self) -> Float[Tensor, "*b n"]:
        """The squared norms of the rows of X."""
        return self.xx.diagonal(dim1=-2, dim2=-1) if self.xx.ndim == self.xy.ndim else self.xx

    @property
    def y_norms(self) -> Float[Tensor, "*b n"]:
        """The squared norms of the rows of Y."""
        return self.yy.diagonal(dim1=-2, dim2=-1) if self.yy.ndim == self.xy.ndim else self.yy

    @property
    def shape(self) -> tuple[int, ...]:
        """The device of xy."""
        return tuple(self.xy.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of single entries of xy."""
        return self.xy.dtype

    @property
    def device(self) -> torch.device:
        return self.xx.device

    def to(self, device: torch.device | str) -> Moments:
        """The same moments on that device."""
        return Moments(self.xy.to(device), self.xx.to(device), self.yy.to(device))

    def rows(self, dtype: torch.dtype, step: int) -> Iterator[Float[Tensor, "*b k n"]]:
        """xy in blocks of `count` rows."""
        return (block.to(dtype) for block in torch.split(self.xy, step, dim=-2))

    def picked(self, index: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """The entries xy[i, index[i]]."""
        return torch.take_along_dim(self.xy, index[..., None], -1)[..., 0]

    @property
    def size(self) -> Float[Tensor, "*b"]:
        """|X|² + |Y|², float64: rounding errors of the objective are relative to it."""
        return self.x_norms.double().sum(-1) + self.y_norms.double().sum(-1)

    def __add__(self, other: Moments) -> Moments:
        if self.full != other.full:  # which would broadcast
            raise SymmetryError("moments with Gram matrices and moments with norms alone do not add; form both alike")
        return Moments(self.xy + other.xy, self.xx + other.xx, self.yy + other.yy)


# Moments by how the features transform: X − gY, X − g⁻ᵀY and X − |g|Y. A part that no tensor has is absent.
PartMoments = Mapping[Part, Moments]


class Action(ABC):
    """What acts on the tensors of an axis, batched."""

    @abstractmethod
    def act(self, w: Tensor, dim: int) -> Tensor:
        """g w along `dim`. The leading dimensions of w are the batch: w is [*b, …, n, …]."""

    @abstractmethod
    def dual(self: A) -> A:
        """g⁻ᵀ."""

    @abstractmethod
    def forget(self) -> Action:
        """|g|, the permutation part; SymmetryError if there is none."""

    def part(self, part: Part) -> Action:
        """The action on a dimension of that variance."""
        if part == "primal":
            return self
        return self.dual() if part == "dual" else self.forget()

    @property
    @abstractmethod
    def reorders_only(self) -> bool:
        """Whether acting only reorders entries: then it is exact in every dtype."""


class Element(Action):
    """An element of a group, batched: stored as an index, a vector or a matrix, whichever is smallest."""

    @property
    @abstractmethod
    def size(self) -> int:
        """n, the size of the axis that it acts on."""

    @property
    @abstractmethod
    def batch(self) -> tuple[int, ...]:
        """*b."""

    @abstractmethod
    def forget(self) -> Element:
        """|g|, the permutation part; SymmetryError if there is none."""

    @abstractmethod
    def inverse(self: E) -> E:
        """g⁻¹ of each element of the batch (Alignment re-indexes batches by the wreath law)."""

    @abstractmethod
    def __matmul__(self: E, other: E) -> E:
        """The element that acts as `other`, then as self."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is made of, each with the batch in front: to save, cast and re-index it."""

    @abstractmethod
    def rebuild(self: E, tensors: Mapping[str, Tensor]) -> E:
        """The same kind of element from other tensors."""

    if TYPE_CHECKING:  # of an element each part is an element

        def part(self, part: Part) -> Element: ...

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    def to(self: E, device: torch.device | str) -> E:
        """The same element on that device."""
        return self.rebuild({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @abstractmethod
    def inner(self, c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b"]:
        """⟨g, C⟩, the sum over entries of g times C, float64."""

    def cross(self, moments: Moments) -> Float[Tensor, "*b"]:
        """⟨g, X Yᵀ⟩, float64, from only those entries of it where g is not zero."""
        return self.inner(moments.xy)

    @abstractmethod
    def gain(self, yy: Float[Tensor, "*b n"] | Float[Tensor, "*b n n"]) -> Float[Tensor, "*b"]:
        """|gY|² from Y Yᵀ, or from its diagonal if that is enough (else SymmetryError); yy has the element's batch."""

    @abstractmethod
    def condition(self) -> Float[Tensor, "*b"]:
        """The largest singular value over the smallest: the factor by which rounding errors may grow."""

    @abstractmethod
    def is_identity(self) -> bool:
        """Exactly the identity, without tolerance."""

    def to_dense(self) -> Float[Tensor, "*b n n"]:
        """The matrix of g, float64."""
        eye = torch.eye(self.size, dtype=torch.float64, device=self.device).expand(*self.batch, self.size, self.size)
        return self.act(eye, dim=len(self.batch))


class Dense(Element):
    """An element that multiplies by a matrix, which is one of its parts."""

    matrix: Float[Tensor, "*b n n"]

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape[:-2])

    @property
    def reorders_only(self) -> bool:
        return False

    def act(self, w: Tensor, dim: int) -> Tensor:
        return multiply(self.matrix, w, dim)

    def inner(self, c: Tensor) -> Tensor:
        return (self.matrix.double() * c.double()).sum((-2, -1))

    def gain(self, yy: Tensor) -> Tensor:
        if yy.ndim == len(self.batch) + 1:
            raise SymmetryError("what a matrix makes of |Y|² needs Y Yᵀ; form the moments for a group with `gram`")
        matrix = self.matrix.to(yy.dtype)
        return ((matrix @ yy) * matrix).sum((-2, -1))

    def condition(self) -> Tensor:
        """1: averages and rotations do not increase norms, so that no rounding error grows."""
        return torch.ones(self.batch, dtype=torch.float64, device=self.device)

    def is_identity(self) -> bool:
        return bool((self.matrix == torch.eye(self.size, dtype=self.matrix.dtype, device=self.device)).all())


def shapes_of(kind: type[Element], size: int, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that an element of that kind is made of, as its class annotates them."""
    out = {}
    for name, hint in get_type_hints(kind).items():
        (dims,) = [one.dim_str.split() for one in (hint, *get_args(hint)) if hasattr(one, "dim_str")]
        out[name] = tuple(n for dim in dims for n in (batch if dim == "*b" else (size,)))
    return out


class Group(ABC):
    """A symmetry group of an axis: its elements, and the best one for moments."""

    # The dtype in which moments are formed. A rotation is as exact as its factorisation; a permutation is
    # exact whatever rounding its scores had.
    moments_dtype: ClassVar[torch.dtype] = torch.float64
    # Whether g⁻ᵀ = g for all elements: then primal and dual moments need not be kept apart.
    self_dual: ClassVar[bool] = False
    # The largest of its proper subgroups, by name; theirs are its own too (see `symfuse.groups.subgroups`).
    below: ClassVar[tuple[str, ...]] = ()
    # The only size of an axis on which it acts; None: on any.
    size: ClassVar[int | None] = None
    # Whether `best` needs all of X Xᵀ and Y Yᵀ, which cost as much as X Yᵀ, or the norms of rows alone.
    gram: ClassVar[bool] = False

    def streams(self, n: int) -> bool:  # noqa: ARG002
        """Whether `best` takes the cross-Grams of n units some rows at a time (`Moments.rows`) and in single entries
        (`Moments.picked`): then they need not be kept."""
        return False

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def label(self) -> str:
        """Its action, in words."""
        return self.name

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def usual(self) -> Group:
        """The subgroup from which matching takes elements by default."""
        return self

    def without_scaling(self) -> Group:
        """The subgroup that keeps the norms of units."""
        return self

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The shapes of the parameters of `near`, for one element of n units; none if its elements lie apart."""
        return {}

    def near(self, at: Mapping[str, Tensor]) -> Element:  # noqa: ARG002
        """An element near the identity, which at parameters of 0 it is exactly; differentiable there and elsewhere.

        at: tensors of the shapes of `tangent`, with the batch in front. Every value gives an element of the group: by
        exponentials, or for rotations by the Cayley map (the gradient of a polar factor is NaN at an orthogonal
        matrix). SymmetryError for a group without parameters.
        """
        raise SymmetryError(f"the elements of the group {self.name} lie apart: none is near another")

    @abstractmethod
    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Element:
        """A random element, float64, of well-conditioned size (scales within a factor of two of 1); on the processor,
        as its generator is, so that it is the same on every device."""

    @abstractmethod
    def identity(self, n: int, batch: tuple[int, ...]) -> Element:
        """The neutral element, on the processor."""

    @abstractmethod
    def contains(self, g: Element, atol: float) -> bool:
        """Whether g belongs to the group, to within atol in each entry."""

    @abstractmethod
    def best(self, moments: PartMoments) -> Element:
        """argmin over g of |X − gY|² + |X' − g⁻ᵀY'|² + |X'' − |g|Y''|² (primal, dual and plain parts)."""

    def reach(self, c: Float[Tensor, "*b n n"], plain: Float[Tensor, "*b n n"] | None = None) -> Float[Tensor, "*b"]:
        """max of ⟨g, C⟩ + ⟨|g|, C''⟩ over the elements that keep norms: what a pair of units is worth whose insides g
        aligns. plain: C'', of a group that has a permutation part."""
        group = self.without_scaling()
        if type(group) is not type(self):
            return group.reach(c, plain)
        norms = c.new_zeros(c.shape[:-1])
        parts: dict[Part, Tensor] = {"primal": c}
        if plain is not None:
            parts["plain"] = plain
        best = self.best({part: Moments(gram, norms, norms) for part, gram in parts.items()})
        return torch.stack([best.part(part).inner(gram) for part, gram in parts.items()]).sum(0)


def total(moments: PartMoments) -> Moments:
    """The sum of all parts: what a group needs in which g, g⁻ᵀ and |g| act alike."""
    parts = list(moments.values())
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


def add(one: PartMoments, other: PartMoments) -> dict[Part, Moments]:
    """The moments of two sets of features together."""
    return {**one, **{part: one[part] + m if part in one else m for part, m in other.items()}}


def objective(g: Element, moments: PartMoments) -> Float[Tensor, "*b"]:
    """|X − gY|² + |X' − g⁻ᵀY'|² + |X'' − |g|Y''|² for each element of the batch, float64."""
    values = []
    for part, m in moments.items():
        h = g.part(part)
        values.append(m.x_norms.double().sum(-1) - 2 * h.cross(m) + h.gain(m.yy.double()))
    return torch.stack(values).sum(0)


def row_norms(yy: Tensor, batch: tuple[int, ...]) -> Float[Tensor, "*b n"]:
    """The squared norms of rows, from them or from the Gram matrices of which they are the diagonals."""
    return yy if yy.ndim == len(batch) + 1 else yy.diagonal(dim1=-2, dim2=-1)


def multiply(matrix: Float[Tensor, "*b n n"], w: Tensor, dim: int) -> Tensor:
    """The matrix times w along `dim`, in the dtype of w. The leading dimensions of w are the batch."""
    k = matrix.ndim - 2
    front = w.movedim(dim, k)
    rows = front.reshape(*front.shape[: k + 1], -1)
    return (matrix.to(w.dtype) @ rows).reshape(front.shape).movedim(k, dim)
