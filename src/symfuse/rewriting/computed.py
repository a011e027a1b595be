"""A model some of whose tensors are computed from others when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint, is_finite
from symfuse.model import Model, unstacked
from symfuse.spec import Spec

Read = Callable[[str], Tensor]
Rule = Callable[[Read], Tensor]


def reader(model: Model) -> Read:
    """Reads tensors of a model by canonical name, in float64 and before rounding."""
    return lambda name: model.read(name).double()


def computed(model: Model, rules: Mapping[str, Rule], spec: Spec | None = None) -> Model:
    """The model with new values for some tensors, of their shapes and dtypes. rules: by canonical name, a function of
    the old values (`reader`), which it must not write into. spec: the declaration of the result, if it is another."""
    whole = model.whole
    infos = {name: whole.info(name) for name in whole}
    found = whole.replace(tensors=_Computed(model, rules), infos=infos)
    return replace(model, checkpoint=unstacked(found, model.spec), spec=spec or model.spec)


class _Computed(Mapping[str, Tensor]):
    def __init__(self, model: Model, rules: Mapping[str, Rule]) -> None:
        self.source: Checkpoint = model.whole
        self.rules = {model.spec.file_name(name): rule for name, rule in rules.items()}
        self.read = reader(model)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.rules:
            return self.source[name]
        dtype = self.source.info(name).dtype
        tensor = self.rules[name](self.read).to(dtype).contiguous()
        if not is_finite(tensor):
            raise IncompatibleError(
                f"{name}: the tensor in canonical form does not fit in {str(dtype).removeprefix('torch.')}, the dtype "
                f"of {self.source.name}; convert that model to a wider dtype first"
            )
        return tensor

    def wide(self, name: str) -> Tensor:
        """The tensor before it is rounded to the dtype of the source."""
        return self.rules[name](self.read) if name in self.rules else self.source.read(name)

    def where(self, name: str) -> str | None:
        """The file that holds the tensor as it is, if one does."""
        return None if name in self.rules else self.source.file_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)
