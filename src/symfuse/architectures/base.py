"""Families: a function from a config to a declaration, registered under its model type; and how one is bound
to the names that a checkpoint really has."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from symfuse.errors import SpecError, UnknownArchitectureError
from symfuse.spec import Axis, Declared, Shift, Spec, expand, indices, parse


class Config:
    """config.json with attribute access for sizes: `c.hidden_size`, or `c.get("n_inner", …)` where a field may be
    absent. `seen` are the fields that were asked for, with defaults filled in: what decides the declaration.

    Every value is checked: SpecError for a size that is not a positive integer, or a value whose type is not that of
    its default.
    """

    def __init__(self, data: Mapping[str, Any], family: str) -> None:
        self._data = data
        self._family = family
        self.seen: dict[str, Any] = {}

    def __getattr__(self, key: str) -> int:
        value = self.seen[key] = self._needed(key)
        if type(value) is not int or value < 1:
            raise _wrong(key, value, "a positive integer")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A field, dotted where it is nested, or its default."""
        *objects, field = key.split(".")
        data = self._data
        for name in objects:
            data = {} if data.get(name) is None else data[name]
            if not isinstance(data, Mapping):
                raise _wrong(name, data, _KINDS[dict])
        value = data.get(field)
        value = self.seen[key] = default if value is None else value
        kind: Any = (int, float) if isinstance(default, float) else type(default)
        if default is not None and (
            not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool)
        ):
            raise _wrong(key, value, _KINDS[type(default)])
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """A height and a width: two positive integers, or one for both."""
        value = self.seen[key] = self._needed(key)
        both = value if isinstance(value, list) else [value, value]
        if len(both) != 2 or not all(type(size) is int and size > 0 for size in both):
            raise _wrong(key, value, "a positive integer, or a list of two")
        return both[0], both[1]

    def _needed(self, key: str) -> Any:
        if key not in self._data:
            raise SpecError(f"config.json: field {key!r}, which a {self._family} needs, is missing")
        return self._data[key]

    def rotary_share(self, usual: float, before: str = "partial_rotary_factor") -> float:
        """The part of a head that positions turn: since `transformers` 5 among the rotary settings, and in older
        configs in the field `before`, which is not `seen`: it is only another spelling."""
        key = "rope_parameters.partial_rotary_factor"
        share = self.get(key, float(Config(self._data, self._family).get(before, usual)))
        if not 0 < share <= 1:
            raise _wrong(key, share, "a number above 0, up to 1")
        return float(share)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding; `transformers` ties unless the config, or the family, says
        otherwise."""
        usual = self._family not in ARCHITECTURES or ARCHITECTURES[self._family].tied
        return self._data.get("tie_word_embeddings", usual) is not None and bool(self.get("tie_word_embeddings", usual))

    @property
    def class_name(self) -> str:
        """The class that will be loaded: the first that `architectures` names, or nothing."""
        return str((self.get("architectures", []) or [""])[0])

    @property
    def labels(self) -> int:
        """The number of classes of a classifier; `transformers` has two unless the config says otherwise."""
        named = len(self.get("id2label", {}))
        labels = self.get("num_labels", named or 2)
        if labels < 1 or named not in (0, labels):
            raise _wrong("num_labels", labels, f"{named}, as id2label has" if named else "a positive integer")
        return int(labels)


_KINDS = {
    bool: "true or false", int: "an integer", float: "a number", str: "a name in quotes", list: "a list",
    dict: "a JSON object",
}  # fmt: skip


def _wrong(key: str, value: Any, expected: str) -> SpecError:
    found = repr(value)
    return SpecError(f"config.json: {key} is {found[:60]}{'…' if len(found) > 60 else ''}, expected {expected}")


@dataclass(frozen=True)
class Head:
    """What sits on top of the base model. classes: how the names of its classes end (`ForMaskedLM`);
    tensors: their layouts, by full name. Heads of different classes may use one name for other layouts."""

    classes: tuple[str, ...]
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """The declaration of a family for one config.

    tensors: the base model's, by name without `prefix` (which checkpoints of a class with a head have).
    optional: parts of the base model that may be absent as a whole (a pooler). heads: by label.
    tied: alias → the tensor it equals; an alias may be absent. reads: of any head; what is absent does not read.
    buffers: patterns of derived tensors, dropped. legacy: old endings of names → today's. See Spec for the rest.
    """

    axes: Mapping[str, Axis]
    tensors: Mapping[str, str]
    prefix: str = ""
    optional: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    heads: Mapping[str, Head] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    legacy: Mapping[str, str] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm: Literal["layer", "rms", "rms+1"] = "layer"


@dataclass(frozen=True)
class Architecture:
    """A registered family: its declaration, (outside `transformers`) how to build the live module, and whether the
    output head is the embedding where config.json does not say."""

    model_type: str
    declare: Callable[[Config], Family]
    build: Callable[[Mapping[str, Any]], torch.nn.Module] | None = None
    tied: bool = True


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    *model_types: str, build: Callable[[Mapping[str, Any]], torch.nn.Module] | None = None, tied: bool = True
) -> Callable[[Callable[[Config], Family]], Callable[[Config], Family]]:
    """Register a declaration under the `model_type`s of config.json that it covers; see `Architecture`."""

    def register(declare: Callable[[Config], Family]) -> Callable[[Config], Family]:
        for model_type in model_types:
            ARCHITECTURES[model_type] = Architecture(model_type, declare, build, tied)
        return declare

    return register


def lookup(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a config; UnknownArchitectureError names the type and those that are known."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        found = "no model_type" if model_type is None else f"model_type {model_type!r}"
        raise UnknownArchitectureError(
            f"{where}: config.json has {found}; symfuse has declarations for "
            f"{', '.join(sorted(ARCHITECTURES))}. Set model_type if it is one of these, or add a declaration "
            "(CONTRIBUTING.md)"
        )
    return ARCHITECTURES[model_type]


def resolve(config: Mapping[str, Any], names: Iterable[str], where: str = "checkpoint") -> Spec:
    """The Spec of a checkpoint with these config and tensor names (its shapes are checked by Spec.check)."""
    names = list(names)
    c = Config(config, str(config.get("model_type")))
    architecture = lookup(config, where)
    try:
        family, class_name = architecture.declare(c), c.class_name
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if names:  # without any, the declaration itself is asked for
        _check_indices(family, len(names), where)
    current = {_modern(name, family.legacy): name for name in names if not is_buffer(name, family)}
    prefix = family.prefix if any(name.startswith(family.prefix) for name in current) else ""

    tensors: dict[str, Declared] = {}
    heads: set[str] = set()
    stored: dict[str, str] = {}

    def add(templates: Mapping[str, str], at: str) -> list[str]:
        declared = expand(templates, family.axes)
        tensors.update(declared)
        stored.update({name: at + name for name in declared})
        return list(declared)

    def present(templates: Mapping[str, str], at: str) -> bool:
        return any(at + name in current for name in expand(templates, family.axes) if name not in family.tied)

    add(family.tensors, prefix)
    for group in family.optional.values():
        if present(group, prefix):
            add(group, prefix)
    there = {label for label, head in family.heads.items() if present(head.tensors, "")}
    for head in _heads(family, class_name, there, where):
        heads.update(add(head.tensors, ""))
    # Aliases may be stored without a head of their own (the tied decoder of GPT-2).
    aliases = {n: t for head in family.heads.values() for n, t in head.tensors.items() if n in family.tied}
    heads.update(add({n: t for n, t in aliases.items() if n in current and n not in tensors}, ""))
    tensors = {n: d for n, d in tensors.items() if n not in family.tied or stored[n] in current}
    bare = not heads & tensors.keys()  # then the outputs are those of the base model
    return Spec(
        family=str(config["model_type"]),
        axes=family.axes,
        tensors=tensors,
        heads=frozenset(heads & tensors.keys()),
        tied={alias: name for alias, name in family.tied.items() if alias in tensors},
        shifts=tuple(
            shift
            for rule in family.shifts
            for index in indices(rule.bias, family.axes)
            if (shift := rule.at(index)).bias in tensors
        ),
        outputs={name: parse(text) for name, text in family.outputs.items()},
        reads={
            norm.format(**index): tuple(
                reader
                for template in readers
                if (reader := template.format(**index)) in tensors or (bare and reader in family.outputs)
            )
            for norm, readers in family.reads.items()
            for index in indices(norm, family.axes)
            if norm.format(**index) in tensors
        },
        norm=family.norm,
        names={n: f for n in tensors if (f := current.get(stored[n], stored[n])) != n},
        buffers=frozenset(name for name in names if is_buffer(name, family)),
    )


def _check_indices(family: Family, tensors: int, where: str) -> None:
    """SpecError for more layers than tensors, before a name is made for each."""
    for key, axis in family.axes.items():
        if axis.size > tensors and any(f"{{{key}}}" in name for name in family.tensors):
            raise SpecError(
                f"{where}: config.json says {axis.size} of {key!r} (layers), and there are {tensors} tensors in all; "
                "does config.json belong to these weights?"
            )


def is_buffer(name: str, family: Family) -> bool:
    """Whether a tensor is derived from the config (position ids, causal masks): dropped, never merged."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in family.buffers)


def _heads(family: Family, class_name: str, there: Container[str], where: str) -> list[Head]:
    """The heads of a checkpoint: those of its class, which must be there, and others that are there.

    Two heads may use one name for different layouts (`classifier.weight` reads the pooler, or every token):
    then the class decides, and SpecError is raised if it does not.
    """
    named = {
        label: head
        for label, head in family.heads.items()
        if class_name.endswith(head.classes) and not _all_tied(head, family)
    }
    chosen = dict(named)
    for label, head in family.heads.items():
        if label in named or label not in there or any(head.tensors.keys() & o.tensors.keys() for o in named.values()):
            continue
        for rival, other in chosen.items():
            if name := _clash(head, other):
                raise SpecError(
                    f"{where}: {name} may belong to the head {rival!r} (of a …{other.classes[0]}) or to "
                    f"{label!r} (of a …{head.classes[0]}), which read different spaces, and architectures in "
                    f"config.json says {class_name or 'nothing'}; set it to the class of this model"
                )
        chosen[label] = head
    return list(chosen.values())


def _clash(one: Head, other: Head) -> str | None:
    """A name for which two heads have different layouts."""
    both = (name for name in one.tensors if name in other.tensors)
    return next((name for name in both if one.tensors[name] != other.tensors[name]), None)


def _all_tied(head: Head, family: Family) -> bool:
    return all(name in family.tied for name in head.tensors)


def _modern(name: str, legacy: Mapping[str, str]) -> str:
    for old, new in legacy.items():
        if name.endswith(old):
            return name[: -len(old)] + new
    return name
