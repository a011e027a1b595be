"""The weights of single units of an axis, in models in which the axis has different sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from symfuse.spec import Atom, Spec
from symfuse.widths.rules import is_read


@dataclass(frozen=True)
class Occurrence:
    """An axis in one part of a tensor. at: the position of its atom. view: the part, with one dimension for each
    atom."""

    atoms: tuple[Atom, ...]
    at: int
    view: Tensor

    @property
    def names(self) -> list[str]:
        return [atom.name for atom in self.atoms]

    @property
    def read(self) -> bool:
        """Whether the part reads the axis."""
        return is_read(self.atoms, self.at)

    def rows(self, front: Sequence[int]) -> Tensor:
        """The part with these dimensions in front, and all others as one last dimension."""
        order = [*front, *(i for i in range(len(self.atoms)) if i not in front)]
        view = self.view.permute(order)
        return view.flatten(len(front)) if view.ndim > len(front) else view[..., None]

    def of_units(self, batch: Sequence[str]) -> Tensor:
        """[*b, n, k]: a row for each unit."""
        return self.rows([*map(self.names.index, batch), self.at])


def occurrences(spec: Spec, axis: str, name: str, tensor: Tensor) -> Iterator[Occurrence]:
    for segment in spec.segments(name, tensor):
        for at, atom in enumerate(segment.atoms):
            if atom.name == axis:
                yield Occurrence(segment.atoms, at, segment.view)
