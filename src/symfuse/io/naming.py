"""Checkpoints of other libraries than `transformers` (timm, open_clip), read as models of a declared family under the
names of `transformers`, and written back under their own. What they call each tensor is data of `architectures/`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, OutputError
from symfuse.io.checkpoint import Checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.tensors import TensorInfo
from symfuse.messages import some

Shapes = Mapping[str, tuple[int, ...]]
Translate = Callable[[Mapping[str, Any], Shapes], dict[str, Any]]
DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Naming:
    """How a library names the tensors of one family.

    key: a field that its configs have, and those of `transformers` have not. names: by the name in its files, with {l}
    for the number of a layer, the name in `transformers`; several names for a tensor whose rows are theirs, in that
    order. optional: those that a model may lack. transposed: those that are stored [in, out] there. translate: from its
    config and the shapes of its tensors, the config of `transformers` that computes the same; CheckpointError if there
    is none. file: of the library, where it looks for its config if not in config.json.
    """

    library: str
    key: str
    names: Mapping[str, tuple[str, ...]]
    translate: Translate
    optional: Collection[str] = ()
    transposed: Collection[str] = ()
    file: str | None = None

    def read(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint of the library under the names of `transformers`; `save` writes those of the library.
        CheckpointError if its tensors or its config are not those of the family."""
        places = [(name, *_numbered(name)) for name in checkpoint]
        if unknown := [name for name, template, _ in places if template not in self.names]:
            raise CheckpointError(f"{some(unknown)} is no tensor of it")
        layers: dict[str, set[int | None]] = {}
        for _, template, number in places:
            layers.setdefault(_stack(template), set()).add(number)
        needed = self.names.keys() - self.optional
        every = {name.format(l=number) for name in needed for number in layers.get(_stack(name), {0})}
        if absent := sorted(every - checkpoint.keys()):
            raise CheckpointError(f"{some(absent)} is missing")
        config = self.translate(checkpoint.config, {name: checkpoint.info(name).shape for name in checkpoint})
        rules: dict[str, str | Rule] = {}
        for file, template, number in places:
            names = [name.format(l=number) for name in self.names[template]]
            if template in self.transposed:
                rules[names[0]] = _transposed(checkpoint, file)
            elif len(names) == 1:
                rules[names[0]] = file
            else:
                rules |= {name: _rows(checkpoint, file, at, len(names)) for at, name in enumerate(names)}
        tensors = Rewritten(checkpoint, rules)
        tensors.computed = False
        back = Renamed(self, checkpoint.config, config)
        return checkpoint.replace(tensors=tensors, config=config, before_save=(*checkpoint.before_save, back))


@dataclass(frozen=True)
class Renamed:
    """Gives a checkpoint the names and the config of the library that its template came from; one of the functions of
    `Checkpoint.before_save`. config: of the library. translated: what it was read as."""

    naming: Naming
    config: Mapping[str, Any]
    translated: Mapping[str, Any]

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """OutputError for a model that the config of the library does not describe."""
        changed = list(_changed(self.translated, checkpoint.config))
        of = {name: (file, at) for file, names in self.naming.names.items() for at, name in enumerate(names)}
        pieces: dict[str, dict[int, str]] = {}
        for name in checkpoint:
            template, number = _numbered(name)
            file, at = of.get(template, ("", 0))
            pieces.setdefault(file.format(l=number), {})[at] = name
        unknown = list(pieces.get("", {}).values())
        if changed or unknown:
            raise OutputError(
                f"{checkpoint.name} cannot be written for {self.naming.library}, whose names its template has: "
                f"{some(changed or unknown)}. To write it for transformers, save its replace(before_save=())"
            )
        rules = {file: self._rule(checkpoint, file, list(parts.values())) for file, parts in pieces.items()}
        files = checkpoint.companions()
        if self.naming.file is not None:
            files[self.naming.file] = json.dumps(dict(self.config), indent=2).encode()
        return checkpoint.replace(tensors=Rewritten(checkpoint, rules), config=self.config, files=files)

    def _rule(self, checkpoint: Checkpoint, file: str, names: list[str]) -> str | Rule:
        if _numbered(file)[0] in self.naming.transposed:
            return _transposed(checkpoint, names[0])
        return names[0] if len(names) == 1 else _stacked(checkpoint, names)


def _changed(said: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """The fields that have another value now, of those that were said."""
    for key, value in said.items():
        new = now.get(key, value)
        if isinstance(value, Mapping) and isinstance(new, Mapping):
            yield from _changed(value, new, f"{at}{key}.")
        elif new != value and key not in DTYPES:
            yield f"{at}{key}: {new!r}"


NAMINGS: list[Naming] = []


def as_family(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of a library that is known, as a model of the family that it is, with a note; or with one that says
    why it is none, to be merged by names and shapes. Any other is returned as it is."""
    namings = [one for one in NAMINGS if one.key in checkpoint.config and "model_type" not in checkpoint.config]
    why: list[str] = []
    for naming in namings:
        try:
            read = naming.read(checkpoint)
        except CheckpointError as error:
            why.append(str(error))
            continue
        note = f"read as a {read.config['model_type']} of transformers, and written under the names of {naming.library}"
        return read.replace(notes=(*checkpoint.notes, note))
    if not namings:
        return checkpoint
    library = namings[0].library
    note = f"its config is one of {library}, and no declared family is that model ({why[0]}): merged by names and shapes"
    return checkpoint.replace(notes=(*checkpoint.notes, note))


def of_modules(modules: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The names of the weights and biases of modules, by those of the modules."""
    return {
        f"{name}.{end}": tuple(f"{one}.{end}" for one in names)
        for name, names in modules.items()
        for end in ("weight", "bias")
    }


def _numbered(name: str) -> tuple[str, int | None]:
    """A name with {l} for the first number in it, and that number."""
    match = re.search(r"\.(\d+)\.", name)
    return (name, None) if match is None else (f"{name[: match.start()]}.{{l}}.{name[match.end() :]}", int(match[1]))


def _stack(template: str) -> str:
    """What stands before the number of the layer."""
    return template.partition("{l}")[0]


def _rows(source: Checkpoint, name: str, at: int, of: int) -> Rule:
    """One of so many equal parts of the rows of a tensor."""
    info = source.info(name)
    if info.shape[0] % of:
        raise CheckpointError(f"{name} has {info.shape[0]} rows, which are not {of} equal parts")
    shape = (info.shape[0] // of, *info.shape[1:])
    size = math.prod(shape)

    def part(start: int, stop: int) -> Tensor:
        return source.part(name, at * size + start, at * size + stop)

    return Rule(TensorInfo(info.dtype, shape), lambda: part(0, size).view(shape), part=part)


def _stacked(source: Checkpoint, names: list[str]) -> Rule:
    infos = [source.info(name) for name in names]
    info = TensorInfo(infos[0].dtype, (sum(one.shape[0] for one in infos), *infos[0].shape[1:]))

    def blocks() -> Iterator[Tensor]:
        return chain.from_iterable(map(source.blocks, names))

    return Rule(info, lambda: torch.cat([source.scanned(name) for name in names]), blocks=blocks)


def _transposed(source: Checkpoint, name: str) -> Rule:
    info = source.info(name)
    return Rule(TensorInfo(info.dtype, info.shape[::-1]), lambda: source.scanned(name).mT.contiguous())
