"""The element of general linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups.base import Dense, Element
from symfuse.groups.coupling import Coupling, coupling
from symfuse.groups.orthogonal import NO_PERMUTATION_PART, similar


@dataclass(frozen=True, eq=False)
class Linear(Dense):
    """w → M w; its dual is w → M⁻ᵀ w. The inverse is kept beside the matrix, so that no use of it rounds again."""

    matrix: Float[Tensor, "*b n n"]
    inverse_matrix: Float[Tensor, "*b n n"]

    def dual(self) -> Linear:
        return Linear(self.inverse_matrix.mT, self.matrix.mT)

    def forget(self) -> Linear:
        raise SymmetryError(NO_PERMUTATION_PART)

    def inverse(self) -> Linear:
        return Linear(self.inverse_matrix, self.matrix)

    def __matmul__(self, other: Linear) -> Linear:
        return Linear(self.matrix @ other.matrix, other.inverse_matrix @ self.inverse_matrix)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix, "inverse_matrix": self.inverse_matrix}

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Linear:
        return Linear(tensors["matrix"], tensors["inverse_matrix"])

    def condition(self) -> Tensor:
        number: Tensor = torch.linalg.cond(self.matrix.double())
        return number

    def is_identity(self) -> bool:
        eye = torch.eye(self.size, dtype=self.matrix.dtype, device=self.device)
        return all(bool((t == eye).all()) for t in self.tensors().values())


def linear(g: Element) -> Linear:
    """Any element as a matrix and its inverse."""
    return g if isinstance(g, Linear) else Linear(g.to_dense(), g.inverse().to_dense())


def compose(g: Element, first: Element) -> Element:
    """The element that acts as `first`, then as g; of two kinds, in the narrowest that holds both."""
    if type(g) is type(first):
        return g @ first
    if isinstance(g, Coupling) or isinstance(first, Coupling):
        return coupling(g) @ coupling(first)
    one, other = similar(g), similar(first)
    return linear(g) @ linear(first) if one is None or other is None else one @ other
