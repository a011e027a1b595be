"""The shape that a document of each kind must have to be shown, and the check of documents that are read."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Some:
    """A list of at least `least` values of `shape`. like: the key of a list in the document that has the same length.
    rising: finite numbers, each larger than the one before."""

    shape: Any
    least: int = 1
    like: str | None = None
    rising: bool = False


@dataclass(frozen=True)
class Maybe:
    """A value of `shape` that may be missing or null."""

    shape: Any


# A shape is a type, or a tuple of types; a dict of keys, with `...` for all others; a list of one shape, for any number
# of values; or one of the two above. More keys are always allowed.
NUMBER = (int, float)
_NUMBERS = {...: NUMBER}
_RUN = {"symfuse": Maybe(str), "seconds": Maybe(NUMBER), "peak_memory": Maybe(NUMBER)}
_MODEL = {"name": str, "folder": Maybe(str), "sha256": Maybe(str), "sha256_of": Maybe(str)}
_PART = {"before": NUMBER, "after": NUMBER, "share": NUMBER, "of_whole": Maybe(Some(Maybe(NUMBER), least=2))}
_DISTANCE = {
    "before": NUMBER,
    "after": NUMBER,
    "left": NUMBER,
    "by_axis": [{"axis": str, **_PART}],
    "by_layer": [{"layer": int, **_PART}],
    "by_layer_and_axis": [{"layer": int, "axis": str, **_PART}],
    "by_tensor": [{"tensor": str, **_PART}],
}
_VERIFIED = {
    "errors": _NUMBERS,
    "equal": Maybe(bool),
    "tolerance": Maybe(NUMBER),
    "rounding": Maybe(NUMBER),
    "inputs": Maybe(str),
}
_ALIGNMENT = {
    **_RUN,
    "source": _MODEL,
    "anchor": _MODEL,
    "matched": [{"axis": str, "group": str, "units": int, "moved": int, "before": NUMBER, "after": NUMBER}],
    "translated_biases": Maybe(int),
    "inexact": Maybe([str]),
    "descents": Maybe({...: Some(NUMBER)}),
    "learning": Maybe({"history": Some({"step": int, "loss": Maybe(NUMBER), "barrier": NUMBER})}),
    "distance": Maybe(_DISTANCE),
    "verified": Maybe(_VERIFIED),
}
_SCORE = {"loss": NUMBER, "metrics": _NUMBERS}
_CURVE = {
    "name": str,
    "points": Some({"at": NUMBER, **_SCORE}),
    "distance": NUMBER,
    "barrier": NUMBER,
    "barrier_over_mean": NUMBER,
    "at": NUMBER,
    "at_over_mean": Maybe(NUMBER),
    "rounding": Maybe(NUMBER),
    "inexact": Maybe([str]),
    "left_of": {...: Maybe(NUMBER)},
}
_TASK = {"task": str, "data": Maybe(str), "sha256": Maybe(str)}
_TICKS = Some(NUMBER, least=2, rising=True)
_GRID = Some(Some(NUMBER, like="xs"), like="ys")
SHAPES: dict[str, Any] = {
    "alignment": _ALIGNMENT,
    "merge": {**_RUN, "method": str, "merged": str, "inputs": Some(_MODEL), "alignments": [_ALIGNMENT]},
    "distance": {**_RUN, "source": str, "anchor": str, **_DISTANCE},
    "barrier": {**_RUN, "source": str, "anchor": str, "task": _TASK, "curves": Some(_CURVE)},
    "landscape": {
        **_RUN,
        "task": _TASK,
        "models": Some({"name": str, "x": NUMBER, "y": NUMBER, **_SCORE}),
        "xs": _TICKS,
        "ys": _TICKS,
        "loss": _GRID,
        "metrics": Maybe({...: _GRID}),
    },
    "evaluation": {**_RUN, "task": _TASK, "models": Some({"name": str, "count": Maybe(int), **_SCORE, **_RUN})},
}


def misfit(document: Any, shape: Any) -> str | None:
    """The first difference of a document from a shape, in words; None if there is none."""
    return next(_misfits(document, shape, "it", document), None)


def _misfits(data: Any, shape: Any, where: str, document: Any) -> Iterator[str]:
    if isinstance(shape, Maybe):
        if data is not None:
            yield from _misfits(data, shape.shape, where, document)
    elif isinstance(shape, dict):
        yield from _of_object(data, shape, where, document)
    elif isinstance(shape, list):
        yield from _of_list(data, Some(shape[0], least=0), where, document)
    elif isinstance(shape, Some):
        yield from _of_list(data, shape, where, document)
    else:
        yield from _of_value(data, shape if isinstance(shape, tuple) else (shape,), where)


def _of_object(data: Any, shape: dict[Any, Any], where: str, document: Any) -> Iterator[str]:
    if not isinstance(data, dict):
        yield f"{where} is {_kind(data)}, expected an object"
        return
    for key, one in shape.items():  # in this order, since `like` refers to earlier lists
        if key is ...:
            continue
        if key in data:
            yield from _misfits(data[key], one, f"{where}[{key!r}]", document)
        elif not isinstance(one, Maybe):
            yield f"{where} has no {key!r}"
    if ... in shape:
        for key in (key for key in data if key not in shape):
            yield from _misfits(data[key], shape[...], f"{where}[{key!r}]", document)


def _of_list(data: Any, shape: Some, where: str, document: Any) -> Iterator[str]:
    if not isinstance(data, list):
        yield f"{where} is {_kind(data)}, expected a list"
        return
    if len(data) < shape.least:
        yield f"{where} is empty" if not data else f"{where} has length {len(data)}, expected {shape.least} at least"
    if shape.like is not None and len(data) != len(document[shape.like]):
        yield f"{where} has length {len(data)}, expected {len(document[shape.like])} as of {shape.like!r}"
    for i, one in enumerate(data):
        yield from _misfits(one, shape.shape, f"{where}[{i}]", document)
    if shape.rising and not all(0 < after - before < math.inf for before, after in pairwise(data)):
        yield f"{where} does not rise from each number to the next"


def _of_value(data: Any, kinds: tuple[type, ...], where: str) -> Iterator[str]:
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        yield f"{where} is {_kind(data)}, expected {' or '.join(kind.__name__ for kind in kinds)}"
    elif isinstance(data, int) and abs(data) > sys.float_info.max:
        yield f"{where} overflows float64"


def _kind(data: Any) -> str:
    return "null" if data is None else type(data).__name__
