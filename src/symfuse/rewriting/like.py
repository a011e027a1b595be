"""Weights without a config, or under other names, read as another model that has both: its config and its names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from symfuse.errors import CheckpointError, OptionError
from symfuse.io.checkpoint import Checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.live import config_by_shapes
from symfuse.io.naming import NAMINGS, Naming
from symfuse.io.tensors import TensorInfo
from symfuse.messages import some

DEPTH = 3  # so many parts has the longest prefix that is tried

TRANSPOSED = "transposed"


def lacks_config(checkpoint: Checkpoint) -> bool:
    """Whether a model has no config, or only the one that follows from its names and shapes."""
    shapes = {name: info.shape for name, info in checkpoint.infos.items()}
    return not checkpoint.config or checkpoint.config == config_by_shapes(shapes)


def alike(
    before: Checkpoint, after: Checkpoint, like: Checkpoint | None = None, names: Mapping[str, Any] | None = None
) -> tuple[Checkpoint, Checkpoint]:
    """Two models; one without a config is read as the other one, or as `like` (`read_like`), and so is that of the two
    in which more of `names` are (`naming_of`). OptionError for `like` or `names` without a use."""
    pair = [before, after]
    if names is not None:
        naming = naming_of(names, "names")
        counts = [sum(naming.names_of(name) is not None for name in one) for one in pair]
        if not any(counts):
            raise OptionError(f"names: {some(names, 3)} is in neither model: {some(before, 3)}; {some(after, 3)}")
        i = counts.index(max(counts))
        pair[i] = read_like(pair[i], like or pair[1 - i], naming)
    for i, one in enumerate(pair):
        target = like or pair[1 - i]
        if lacks_config(one) and (not one.config or one.config["model_type"] != target.config.get("model_type")):
            pair[i] = read_like(one, target)
    if like is not None and pair == [before, after]:
        raise OptionError(f"like: {before.name} and {after.name} have configs of their own; leave {like.name} out")
    return pair[0], pair[1]


def read_like(checkpoint: Checkpoint, like: Checkpoint, naming: Naming | None = None) -> Checkpoint:
    """A model under the names of `like`, and with its config if it has none of its own, with notes that say so.

    naming: its names; by default those of `like`, or those of a library that is known, perhaps behind a prefix. A
    tensor that is left is the only one left in `like` of its shape and kind, or stays as it is; one that it lacks is
    zero where that of `like` is. Raises CheckpointError if `like` has no config, or no name of the two is the same.
    """
    if not like.config:
        raise CheckpointError(
            f"{checkpoint.name} and {like.name} have no config.json; name a model of the same class that has one "
            "(--like MODEL; in Python like=)"
        )
    reading = max(_readings(checkpoint, like, naming), key=lambda one: len(one.names))
    if not reading.names:
        raise CheckpointError(
            f"{checkpoint.name}: its names ({some(checkpoint, 3)}) are not those of {like.name} ({some(like, 3)}), nor "
            "of a library that is known; say which is which (--names FILE; in Python names=)"
        )
    tensors, notes = reading.of(checkpoint, like)
    tensors.computed = False
    if not lacks_config(checkpoint):
        return checkpoint.replace(tensors=tensors, notes=(*checkpoint.notes, *notes))
    notes = [*checkpoint.notes, f"read with the config of {like.name}", *notes]
    return checkpoint.replace(tensors=tensors, config=like.config, notes=tuple(notes))


def naming_of(names: Mapping[str, Any], where: str) -> Naming:
    """A `Naming` from data. names: by the name in the file, with {l} for the number of a layer, the name in the other
    model; a list for a tensor whose rows are theirs; `transposed: NAME` for a matrix that is stored transposed there.
    OptionError for anything else."""
    read: dict[str, tuple[str, ...]] = {}
    for name, value in names.items():
        texts = [value[TRANSPOSED]] if isinstance(value, Mapping) and [*value] == [TRANSPOSED] else value
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise OptionError(
                f"{where}: {name!r} is {value!r}; expected a name, a list of names, or {TRANSPOSED}: NAME"
            )
        read[name] = tuple(texts)
    if not read:
        raise OptionError(
            f"{where} has no names; expected lines such as 'body.{{l}}.q.weight: layer.{{l}}.query.weight'"
        )
    turned = {name for name, value in names.items() if isinstance(value, Mapping)}
    return Naming(where, None, read, transposed=turned)


@dataclass(frozen=True)
class _Reading:
    """A way to read the names of a file: behind a prefix, by a naming. names: by the name in the file the names in the
    other model, for those that it has; own: that in the file without its prefix."""

    prefix: str
    naming: Naming | None
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)

    def of(self, checkpoint: Checkpoint, like: Checkpoint) -> tuple[Rewritten, list[str]]:
        """The tensors under the names of `like`, and notes."""
        read = {name for names in self.names.values() for name in names}
        left = {file: checkpoint.info(file) for file in checkpoint if file not in self.names}
        paired = _by_shape(left, {name: like.info(name) for name in like if name not in read})
        outer = self.prefix.partition(".")[0]
        outside = [file for file in left if file not in paired and file.partition(".")[0] != outer] if outer else []
        own = {file: self._unknown(file) for file in left if file not in outside}
        names = {**self.names, **own, **{file: (name,) for file, name in paired.items()}}
        rules: dict[str, str | Rule] = {}
        for file, known in names.items():
            made = self.naming and self.naming.rules(checkpoint, file, known, self.own.get(file, file))
            rules |= made or {known[0]: file}
        zero = [name for name in like if name not in rules and not bool(like[name].count_nonzero())]
        rules |= {name: _zeros(like.info(name)) for name in zero}
        renamed = [file for file, known in names.items() if known != (file,)]
        by = "" if self.naming is None else f" by those of {self.naming.library}"
        behind = f" behind {self.prefix!r}" if self.prefix else ""
        said = {
            f"{len(renamed)} names are read as those of {like.name}{by}{behind}, such as": renamed[:1],
            "read by their shapes alone:": [f"{file} as {name}" for file, name in paired.items()],
            "not of the model, and left out:": outside,
            f"not there, taken as zero as in {like.name}:": zero,
        }
        return Rewritten(checkpoint, rules), [f"{what} {some(which)}" for what, which in said.items() if which]

    def _unknown(self, file: str) -> tuple[str, ...]:
        """The names of a tensor that the other model lacks, behind the prefix that those of others have."""
        every = _own(file, self.prefix)
        if self.naming is None:
            return (every[0],)
        known = [(names[0], ends[0]) for f, names in self.names.items() if (ends := self.naming.names_of(self.own[f]))]
        at = known[0][0].removesuffix(known[0][1]) if known else ""
        read = next((names for own in every if (names := self.naming.names_of(own))), (every[0],))
        return tuple(at + name for name in read)


def _readings(checkpoint: Checkpoint, like: Checkpoint, naming: Naming | None) -> Iterator[_Reading]:
    """Every way to read the names, the simplest first."""
    spellings = {name.partition(".")[2]: name for name in like} | {name: name for name in like}
    namings: list[Naming | None] = [None, *NAMINGS] if naming is None else [naming]
    for prefix in _prefixes(checkpoint):
        for one in namings:
            reading = _Reading(prefix, one)
            for file in checkpoint:
                for own in _own(file, prefix):
                    read = (own,) if one is None else one.names_of(own) or (own,)
                    there = next((spellings[name].removesuffix(name) for name in read if name in spellings), None)
                    if there is not None and file not in reading.names:
                        reading.names[file] = tuple(spellings.get(name, there + name) for name in read)
                        reading.own[file] = own
            yield reading


def _own(file: str, prefix: str) -> list[str]:
    """A name without a prefix, and without each shorter one that it has, the longest first."""
    parts = prefix.split(".")
    shorter = [".".join([*parts[:count], ""]) for count in range(len(parts) - 1, 0, -1)]
    return [file.removeprefix(one) for one in (*shorter, "") if file.startswith(one)]


def _prefixes(checkpoint: Checkpoint) -> list[str]:
    """What several names begin with, the shortest first."""
    counts: dict[str, int] = defaultdict(int)
    for name in checkpoint:
        parts = name.split(".")
        for depth in range(1, min(DEPTH, len(parts) - 1) + 1):
            if not parts[depth - 1].isdigit():
                counts[".".join(parts[:depth]) + "."] += 1
    return ["", *sorted((prefix for prefix, count in counts.items() if count > 1), key=len)]


def _by_shape(files: Mapping[str, TensorInfo], names: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The tensors of the modules of a file that are the only ones with tensors of these kinds (weight, bias) and
    shapes, as is one of those of `names`, whose they are."""

    def modules(infos: Mapping[str, TensorInfo]) -> dict[frozenset[tuple[str, tuple[int, ...]]], list[str]]:
        kinds: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
        for name, info in infos.items():
            at, _, kind = name.rpartition(".")
            kinds[at].add((kind, info.shape))
        out: dict[frozenset[tuple[str, tuple[int, ...]]], list[str]] = defaultdict(list)
        for at, own in kinds.items():
            out[frozenset(own)].append(at)
        return out

    theirs, ours = modules(files), modules(names)
    alone = [kinds for kinds in theirs if len(theirs[kinds]) == len(ours.get(kinds, ())) == 1]
    pairs = [(theirs[kinds][0], ours[kinds][0], kind) for kinds in alone for kind, _ in kinds]
    return {f"{one}.{kind}".lstrip("."): f"{other}.{kind}".lstrip(".") for one, other, kind in sorted(pairs)}


def _zeros(info: TensorInfo) -> Rule:
    return Rule(info, lambda: torch.zeros(info.shape, dtype=info.dtype))
