"""Reads runs: the JSON documents and alignments that the other verbs leave in a folder.

A document says of what kind it is. The kinds, and who writes them: `alignment` (align), `merge` (merge; holds the
alignment of each model), `distance`, `barrier`, `landscape`, `evaluation`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError

Document = Mapping[str, Any]

FILES = ("symfuse.json", "distance.json", "barrier.json", "landscape.json", "evaluation.json")


@dataclass(frozen=True)
class Some:
    """A list of at least one of what `shape` describes."""

    shape: Any


# What a document must hold to be shown. A type, or several; a dict: these keys, `...` standing for all others; a list:
# any number of the one that it has. None of them forbids more keys.
NUMBER = (int, float)
_PARTS = {"before": NUMBER, "after": NUMBER, "share": NUMBER}
_PAIR = {"source": {"name": str}, "anchor": {"name": str}}
_DISTANCE = {
    "before": NUMBER,
    "after": NUMBER,
    "left": NUMBER,
    "by_axis": [{"axis": str, **_PARTS}],
    "by_layer": [{"layer": int, **_PARTS}],
    "by_layer_and_axis": [{"layer": int, "axis": str, **_PARTS}],
    "by_tensor": [{"tensor": str, **_PARTS}],
}
_MATCHED = {"axis": str, "group": str, "units": int, "moved": int, "before": NUMBER, "after": NUMBER}
_ALIGNMENT = {**_PAIR, "matched": [_MATCHED], "distance": _DISTANCE, "verified": (dict, type(None))}
_SCORE = {"loss": NUMBER, "metrics": {...: NUMBER}}
_CURVE = {
    "name": str,
    "points": Some({"at": NUMBER, **_SCORE}),
    "distance": NUMBER,
    "barrier": NUMBER,
    "barrier over mean": NUMBER,
    "at": NUMBER,
    "left of": {...: (*NUMBER, type(None))},
}
_TASK = {"task": str}
SHAPES: dict[str, Any] = {
    "alignment": _ALIGNMENT,
    "merge": {"method": str, "merged": str, "inputs": Some({"name": str}), "alignments": [_ALIGNMENT]},
    "distance": {"source": str, "anchor": str, **_DISTANCE},
    "barrier": {"source": str, "anchor": str, "task": _TASK, "curves": Some(_CURVE)},
    "landscape": {
        "task": _TASK,
        "models": Some({"name": str, "x": NUMBER, "y": NUMBER, **_SCORE}),
        "xs": Some(NUMBER),
        "ys": Some(NUMBER),
        "loss": Some(Some(NUMBER)),
    },
    "evaluation": {"task": _TASK, "models": Some({"name": str, **_SCORE})},
}


@dataclass(frozen=True)
class Collected:
    """What runs hold, in the order in which they were given; documents by their kind, alignments by their file."""

    documents: Mapping[str, Sequence[Document]]
    elements: Mapping[Path, Alignment]

    @property
    def alignments(self) -> list[Document]:
        """All alignment runs, those inside merges among them; each once."""
        found = [*self.documents["alignment"]]
        for merge in self.documents["merge"]:
            found += merge["alignments"]
        return [run for i, run in enumerate(found) if run not in found[:i]]


def collect(runs: Sequence[str | Path]) -> Collected:
    """Read folders (what of `FILES` and alignment*.safetensors they have) and single files.

    Raises CheckpointError if one is missing, holds nothing of this kind, or holds something else under these names.
    """
    paths = list(dict.fromkeys(path for run in runs for path in _files(Path(run))))
    documents: dict[str, list[Document]] = {kind: [] for kind in SHAPES}
    for path in paths:
        if path.suffix != ".safetensors":
            document = read(path)
            documents[document["kind"]].append(document)
    return Collected(documents, {path: Alignment.load(path) for path in paths if path.suffix == ".safetensors"})


def _files(run: Path) -> list[Path]:
    if not run.is_dir():
        if run.is_file():
            return [run]
        raise CheckpointError(f"{run}: no such folder or file; name the output folder of a symfuse verb")
    found = [path for name in FILES if (path := run / name).is_file()]
    found += sorted(run.glob("alignment*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{run}: no run of symfuse in this folder; expected one of {', '.join(FILES)} or alignment*.safetensors, "
            "which align, merge, evaluate, barrier and landscape write with -o"
        )
    return found


def read(path: Path) -> Document:
    """One document; CheckpointError if it is not JSON, of no known kind, or lacks what its kind holds."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
        raise CheckpointError(f"{path}: not a JSON file that can be read ({error}); run the verb again") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in SHAPES:
        raise CheckpointError(
            f"{path}: not a run of symfuse: 'kind' is {'missing' if kind is None else repr(kind)}, expected one of "
            f"{', '.join(SHAPES)}"
        )
    problem = misfit(data, SHAPES[kind]) or (_grid_misfit(data) if kind == "landscape" else None)
    if problem:
        raise CheckpointError(f"{path}: damaged, or of another version: as a {kind} run, {problem}; run the verb again")
    return dict(data)


def misfit(data: Any, shape: Any, where: str = "it") -> str | None:
    """What keeps data from having a shape, in words; None if nothing does."""
    if isinstance(shape, Some):
        return misfit(data, [shape.shape], where) if data else f"{where} is empty"
    if isinstance(shape, list):
        if not isinstance(data, list):
            return f"{where} is not a list"
        found = (misfit(one, shape[0], f"{where}[{i}]") for i, one in enumerate(data))
        return next((problem for problem in found if problem), None)
    if isinstance(shape, dict):
        if not isinstance(data, dict):
            return f"{where} is not an object"
        if missing := [key for key in shape if key is not ... and key not in data]:
            return f"{where} has no {missing[0]!r}"
        inner = {key: shape.get(key, shape.get(...)) for key in data}
        found = (misfit(data[key], one, f"{where}[{key!r}]") for key, one in inner.items() if one is not None)
        return next((problem for problem in found if problem), None)
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if isinstance(data, bool) or not isinstance(data, kinds):
        return f"{where} is {type(data).__name__}, expected {' or '.join(kind.__name__ for kind in kinds)}"
    return None


def _grid_misfit(landscape: Document) -> str | None:
    wide, high = len(landscape["xs"]), len(landscape["ys"])
    if wide < 2 or high < 2 or len(landscape["loss"]) != high or any(len(row) != wide for row in landscape["loss"]):
        return f"the grid of losses is not {high} by {wide}, or smaller than 2 by 2"
    return None
