"""Checkpoints of other libraries than `transformers` (timm, open_clip), read as models of a declared family under the
names of `transformers`, and written back under their own. What they call each tensor is data of `architectures/`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from symfuse.errors import CheckpointError, OutputError, SpecError
from symfuse.io.checkpoint import Checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.tensors import TensorInfo
from symfuse.messages import some

Names = Mapping[str, tuple[str, ...]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Naming:
    """How a library names the tensors of one family.

    key: a field of its configs, which those of `transformers` have not; None if it has no configs: its models are read
    like others (`rewriting/like.py`). names: by the name in its files, with {l} for the number of a layer, the name in
    `transformers`; several for a tensor whose rows are theirs, in that order. translate: from its config and the
    shapes, the config of `transformers` that computes the same; CheckpointError, SpecError, LookupError or ValueError
    if there is none. transposed: what is stored [in, out]. file: where it looks for its config, if not in config.json.
    """

    library: str
    key: str | None
    names: Names
    translate: Callable[[Mapping[str, Any], Shapes], dict[str, Any]] = lambda _config, _shapes: {}
    transposed: Collection[str] = ()
    file: str | None = None

    def read(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint of the library under the names of `transformers`; `save` writes those of the library.
        CheckpointError if it has other tensors than these."""
        read = {file: self.names_of(file) for file in checkpoint}
        if unknown := [file for file, names in read.items() if names is None]:
            raise CheckpointError(f"{some(unknown)} is no tensor of it")
        config = self.translate(checkpoint.config, {name: checkpoint.info(name).shape for name in checkpoint})
        rules: dict[str, str | Rule] = {}
        for file, names in read.items():
            rules |= self.rules(checkpoint, file, names or ())
        tensors = Rewritten(checkpoint, rules)
        tensors.computed = False
        back = Renamed(self, checkpoint.config, config)
        return checkpoint.replace(tensors=tensors, config=config, before_save=(*checkpoint.before_save, back))

    def names_of(self, file: str) -> tuple[str, ...] | None:
        """The names in `transformers` of a tensor of a file; None if there are none."""
        template, number = _numbered(file)
        names = self.names.get(file, self.names.get(template))
        return None if names is None else tuple(name.format(l=number) for name in names)

    def rules(self, checkpoint: Checkpoint, file: str, names: tuple[str, ...], own: str = "") -> dict[str, str | Rule]:
        """How the tensors of these names are made of that of the file. own: its name in the library, if that of the
        file has a prefix."""
        if len(names) > 1:
            return {name: _rows(checkpoint, file, at, len(names)) for at, name in enumerate(names)}
        own = own or file
        transposed = not {own, _numbered(own)[0]}.isdisjoint(self.transposed)
        return {names[0]: _transposed(checkpoint, file) if transposed else file}


@dataclass(frozen=True)
class Renamed:
    """Gives a checkpoint the names and the config of the library that its template came from; one of the functions of
    `Checkpoint.before_save`. config: of the library. translated: what that was read as."""

    naming: Naming
    config: Mapping[str, Any]
    translated: Mapping[str, Any]

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """OutputError for a model that this config of the library does not describe."""
        of = {name: file for file, names in self.naming.names.items() for name in names}
        places = {name: (of.get(template), number) for name in checkpoint for template, number in [_numbered(name)]}
        names = {
            file.format(l=number): [name.format(l=number) for name in self.naming.names[file]]
            for file, number in places.values()
            if file is not None
        }
        said = {key: checkpoint.config.get(key, value) for key, value in self.translated.items()}
        wrong = [f"{key}: {value!r}" for key, value in said.items() if value != self.translated[key]]
        wrong += [name for name, (file, _) in places.items() if file is None]
        wrong += [f"{name} (missing)" for parts in names.values() for name in parts if name not in checkpoint]
        if wrong:
            raise OutputError(
                f"{checkpoint.name} cannot be written for {self.naming.library}, from which its template is: "
                f"{some(wrong)}. To write it for transformers, save its replace(before_save=())"
            )
        rules: dict[str, str | Rule] = {}
        for file, parts in names.items():
            whole = _transposed(checkpoint, parts[0]) if file in self.naming.transposed else parts[0]
            rules[file] = _stacked(checkpoint, parts) if len(parts) > 1 else whole
        files = checkpoint.companions()
        if self.naming.file is not None:
            files[self.naming.file] = json.dumps(dict(self.config), indent=2).encode()
        return checkpoint.replace(tensors=Rewritten(checkpoint, rules), config=self.config, files=files)


NAMINGS: list[Naming] = []


def as_family(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of a library that is known, as a model of the family that it is, with a note; or with one that says
    why it is none, to be merged by names and shapes. Any other is returned as it is."""
    namings = [one for one in NAMINGS if one.key in checkpoint.config and "model_type" not in checkpoint.config]
    why: dict[str, None] = {}
    for naming in namings:
        try:
            read = naming.read(checkpoint)
        except (CheckpointError, SpecError, LookupError, ValueError) as error:
            why[str(error)] = None
            continue
        note = f"read as a {read.config['model_type']} of transformers, and written under the names of {naming.library}"
        return read.replace(notes=(*checkpoint.notes, note))
    note = "a model of {} that is of no declared family ({}): merged by names and shapes"
    notes = [note.format(one.library, "; ".join(why)) for one in namings[:1]]
    return checkpoint.replace(notes=(*checkpoint.notes, *notes))


def of_modules(modules: Names) -> dict[str, tuple[str, ...]]:
    """The names of weights and biases, from those of modules."""
    ends = ("weight", "bias")
    return {
        f"{file}.{end}": tuple(f"{name}.{end}" for name in names) for file, names in modules.items() for end in ends
    }


def require_usual(settings: Mapping[str, Any], read: str, usual: Mapping[str, Any]) -> None:
    """CheckpointError for a setting with a value, unless its name matches `read`, or it has the usual one."""
    for key, value in settings.items():
        if value and not re.fullmatch(read, key) and value != usual.get(key):
            raise CheckpointError(f"{key} is {value!r}")


def _numbered(name: str) -> tuple[str, int | None]:
    """A name with {l} for the first number in it, and that number."""
    match = re.search(r"(?<=[._])\d+(?=\.)", name)
    return (name, None) if match is None else (f"{name[: match.start()]}{{l}}{name[match.end() :]}", int(match[0]))


def _rows(source: Checkpoint, name: str, at: int, of: int) -> Rule:
    """One of so many equal parts of the rows of a tensor."""
    info = source.info(name)
    shape = (info.shape[0] // of, *info.shape[1:])
    size = math.prod(shape)
    return Rule(TensorInfo(info.dtype, shape), lambda: source.part(name, at * size, (at + 1) * size).view(shape))


def _stacked(source: Checkpoint, names: list[str]) -> Rule:
    infos = [source.info(name) for name in names]
    info = TensorInfo(infos[0].dtype, (sum(one.shape[0] for one in infos), *infos[0].shape[1:]))
    return Rule(info, lambda: torch.cat([source.scanned(name) for name in names]))


def _transposed(source: Checkpoint, name: str) -> Rule:
    info = source.info(name)
    return Rule(TensorInfo(info.dtype, info.shape[::-1]), lambda: source.scanned(name).mT.contiguous())
