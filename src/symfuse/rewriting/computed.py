"""A model some of whose tensors are computed from others when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from symfuse.io.lazy import Rewritten, Rule
from symfuse.model import Model, unstacked
from symfuse.spec import Spec

Read = Callable[[str], Tensor]
Formula = Callable[[Read], Tensor]


def reader(model: Model) -> Read:
    """Reads tensors of a model by canonical name, in float64 and before rounding."""
    return lambda name: model.read(name).double()


def computed(model: Model, rules: Mapping[str, Formula], spec: Spec | None = None) -> Model:
    """The model with new values for some tensors, of their shapes and dtypes. rules: by canonical name, a function of
    the old values (`reader`), which it must not write into. spec: the declaration of the result, if it is another.
    Without rules it is the model itself."""
    if not rules and spec is None:
        return model
    whole, read = model.whole, reader(model)
    every: dict[str, str | Rule] = {name: name for name in whole}
    for name, make in rules.items():
        file = model.spec.file_name(name)
        every[file] = Rule(whole.info(file), partial(make, read), what="the tensor in canonical form")
    rewritten = whole.replace(tensors=Rewritten(whole, every))
    return replace(model, checkpoint=unstacked(rewritten, model.spec), spec=spec or model.spec)
