"""Canonical forms: exact rewrites of a model into one that computes the same and has fewer, or larger, symmetries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from symfuse.errors import OptionError, SymmetryError
from symfuse.messages import suggestion
from symfuse.model import Model, require_floating
from symfuse.rewriting.balance import balance
from symfuse.rewriting.residual import centre, drop_gauges, fold_norms
from symfuse.rewriting.scales import fold_scales
from symfuse.rewriting.ties import untie

# In the order in which they are applied: each may need the ones before it.
REWRITES: Mapping[str, Callable[[Model], Model]] = {
    "untie": untie,
    "fold_scales": fold_scales,
    "fold_norms": fold_norms,
    "centre": centre,
    "drop_gauges": drop_gauges,
    "balance": balance,
}


def canonical(model: Model, frame: Iterable[str]) -> Model:
    """The model after the rewrites that `frame` names, in the order of REWRITES.

    The same function, as a lazy checkpoint of the same class with the same dtypes: a tensor is computed in float64 when
    it is read, and rounded once. The declaration is that of the new form. Applied to its own result it changes nothing,
    up to rounding. Raises OptionError for an unknown name; SymmetryError where the model does not allow a rewrite.
    """
    names = list(frame)
    for name in names:
        if name not in REWRITES:
            raise OptionError(f"no rewrite is called {name!r}{suggestion(name, REWRITES)}; there are {list(REWRITES)}")
    require_floating(model)
    for name, rewrite in REWRITES.items():
        if name in names:
            model = rewrite(model)
    return model


def applied(model: Model, names: Collection[str], *, skip: bool = False) -> tuple[Model, tuple[str, ...]]:
    """The model after these rewrites, as of `canonical`, and the names of those that change it. skip: leave out those
    that it does not allow."""
    changed: tuple[str, ...] = ()
    for name in (name for name in REWRITES if name in names):
        try:
            before, model = model, canonical(model, (name,))
        except SymmetryError:
            if not skip:
                raise
            continue
        changed += (name,) if model is not before else ()
    return model, changed
