"""Reads runs: the JSON documents and alignments that other verbs write to a folder.

The key `kind` of a document is one of these (in parentheses the verb that writes it): `alignment` (align),
`merge` (merge; contains the alignment of each model), `distance`, `barrier`, `landscape`, `evaluation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, printable
from symfuse.io.folder import read_json
from symfuse.messages import with_current_keys
from symfuse.reports.shapes import SHAPES, misfit
from symfuse.runs import SUFFIX, SUFFIXES, alignments_in

Document = Mapping[str, Any]

FILES = ("symfuse.json", "distance.json", "barrier.json", "landscape.json", "evaluation.json")


@dataclass(frozen=True)
class Collected:
    """The content of runs, in the order of the arguments: documents by kind, alignments by file."""

    documents: Mapping[str, Sequence[Document]]
    elements: Mapping[Path, Alignment]

    @property
    def alignments(self) -> list[Document]:
        """All alignment runs, including those of merges, each once."""
        result = [*self.documents["alignment"]]
        for merge in self.documents["merge"]:
            result += merge["alignments"]
        return [run for i, run in enumerate(result) if run not in result[:i]]


def collect(runs: Sequence[str | Path]) -> Collected:
    """Read folders (the `FILES` and alignments in them) and single files.

    Raises CheckpointError if one is missing, contains no run, or contains something else under these names.
    """
    paths = list(dict.fromkeys(path for run in runs for path in _files(Path(run))))
    documents: dict[str, list[Document]] = {kind: [] for kind in SHAPES}
    for path in paths:
        if path.suffix not in SUFFIXES:
            document = read(path)
            documents[document["kind"]].append(document)
    return Collected(documents, {path: Alignment.load(path) for path in paths if path.suffix in SUFFIXES})


def _files(run: Path) -> list[Path]:
    if not run.is_dir():
        if run.is_file():
            return [run]
        raise CheckpointError(f"{run}: no such folder or file; name the output folder of a symfuse verb")
    result = [path for name in FILES if (path := run / name).is_file()]
    result += alignments_in(run)
    if not result:
        raise CheckpointError(
            f"{run}: no run of symfuse in this folder; expected one of {', '.join(FILES)} or alignment*{SUFFIX}, "
            "which align, merge, evaluate, barrier and landscape write with -o"
        )
    return result


def read(path: Path) -> Document:
    """One document; CheckpointError if it is not JSON, of an unknown kind, or lacks keys of its kind."""
    data = _printable(with_current_keys(read_json(path)))
    kind = data.get("kind")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: not a run of symfuse: it has no 'kind', such as {', '.join(SHAPES)}")
    if kind not in SHAPES:
        raise CheckpointError(f"{path}: no page shows a run of kind {kind!r}; expected one of {', '.join(SHAPES)}")
    if problem := misfit(data, SHAPES[kind]):
        raise CheckpointError(
            f"{path}: damaged, or of another version: as a run of kind {kind!r}, {problem}; run the verb again"
        )
    return dict(data)


def _printable(data: Any) -> Any:
    """A document with texts (and keys) that can be printed; they contain names of models, tensors and labels."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(key): _printable(value) for key, value in data.items()}
    return [_printable(value) for value in data] if isinstance(data, list) else data
