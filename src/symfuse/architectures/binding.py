"""How a declaration is bound to the names that a checkpoint really has."""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from symfuse.architectures.base import Architecture, Family, Head, declaration, lookup, modern
from symfuse.errors import SpecError
from symfuse.spec import (
    BEHIND,
    Atom,
    Axis,
    Declared,
    Layout,
    Spec,
    Variance,
    bias_of,
    expand,
    indices,
    parse,
    pieces_of,
)


def resolve(config: Mapping[str, Any], names: Iterable[str], where: str = "checkpoint") -> Spec:
    """The Spec of a checkpoint with this config and these tensor names (its shapes are checked by Spec.check): the same
    object for equal arguments, so that its caches are shared."""
    names = list(names)
    key = lookup(config, where), repr(config), tuple(names)
    with _lock:
        spec = _resolved.pop(key, None)
    if spec is None:
        family, class_name = declaration(config, names, where)
        spec = bind(family, str(config["model_type"]), class_name, names, where)
    with _lock:
        _resolved[key] = spec  # the last one
        while len(_resolved) > RESOLVED:
            del _resolved[next(iter(_resolved))]
    return spec


APART = "mtp."  # before the names of layers that predict further tokens, where files have them apart from the others
RESOLVED = 32  # specs in the cache: those of a merge, and of its rewritten models
_resolved: dict[tuple[Architecture, str, tuple[str, ...]], Spec] = {}
_lock = threading.Lock()


def bind(family: Family, model_type: str, class_name: str, names: list[str], where: str = "checkpoint") -> Spec:
    """The Spec of a checkpoint with these tensor names, saved by that class, by a declaration."""
    if names:  # without any, the declaration itself is asked for
        _check_indices(family, len(names), where)
    current = {modern(name, family.legacy): name for name in names if not is_buffer(name, family)}
    prefix = family.prefix if any(name.startswith(family.prefix) for name in current) else ""
    _take_aliases(current, family, prefix)

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
    behind = _behind(family, current, prefix)
    tensors.update(behind)
    stored.update({name: name if name.startswith(APART) else prefix + name for name in behind})
    # Aliases may be stored without a head of their own (the tied decoder of GPT-2).
    aliases = {n: t for head in family.heads.values() for n, t in head.tensors.items() if n in family.tied}
    heads.update(add({n: t for n, t in aliases.items() if n in current and n not in tensors}, ""))
    tensors = {n: d for n, d in tensors.items() if n not in family.tied or stored[n] in current}
    bare = not heads & tensors.keys()  # then the outputs are those of the base model
    return Spec(
        family=model_type,
        axes={**family.axes, **_predicting(behind)},
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
        reads={} if behind else _reads(family, tensors, bare),
        norm=family.norm,
        scales={
            gain.format(**index): writer.format(**index)
            for gain, writer in family.scales.items()
            for index in indices(gain, family.axes)
            if gain.format(**index) in tensors
        },
        stacks=_stacks(family, {n: stored[n] for n in tensors}, prefix, current, where),
        names={
            n: f for n in stored if n in tensors or n in family.tied if (f := current.get(stored[n], stored[n])) != n
        },
        buffers=frozenset(name for name in names if is_buffer(name, family)),
        gauges={reader: gain for reader, gain in family.gauges.items() if _is_gauge(reader, gain, tensors, family)},
    )


def _reads(family: Family, tensors: Mapping[str, Declared], bare: bool) -> dict[str, tuple[str, ...]]:
    """By norm what reads it: weights that are there and have its axis; of the base model, outputs too."""

    def is_there(reader: str, norm: str) -> bool:
        return reader in tensors and not set(tensors[norm].layout.names).isdisjoint(tensors[reader].layout.names)

    return {
        norm: tuple(
            reader
            for template in readers
            if is_there(reader := template.format(**index), norm) or (bare and reader in family.outputs)
        )
        for gain, readers in family.reads.items()
        for index in indices(gain, family.axes)
        if (norm := gain.format(**index)) in tensors
    }


def _behind(family: Family, current: Collection[str], prefix: str) -> dict[str, Declared]:
    """The tensors of layers behind the last one, by what is behind the prefix, or by their names where they are apart:
    the axes of the whole model act on them, and none of their own."""
    if not family.predictors:
        return {}
    pieces = {
        piece: str(layout)
        for stack, names in family.stacks.items()
        for piece, layout in zip(names, pieces_of(parse(family.tensors[stack])), strict=True)
    }
    out = {}
    for name in current:
        apart = name.startswith(APART)
        rest = name.removeprefix(APART) if apart else name.removeprefix(prefix)
        number = re.match(r"layers\.(\d+)\.", rest)
        behind = int(number[1]) - (0 if apart else family.axes["l"].size) if number else 0
        if behind < 0 or not (apart or (number and name.startswith(prefix))):
            continue
        template = "layers.{l}." + rest[number.end() :] if number else rest
        stack = re.sub(r"\.\d+\.", ".*.", template)
        layout = ({**family.tensors, **family.predictors}.get(template)) or pieces.get(stack)
        if layout is not None:
            out[name if apart else rest] = Declared(_of_the_whole(layout, family.axes), {BEHIND: behind})
    return out


def _of_the_whole(layout: str, axes: Mapping[str, Axis]) -> Layout:
    """A layout with sizes in the place of all axes that are of a layer."""

    def atom(match: re.Match[str]) -> str:
        axis = axes[match[1]]
        return str(axis.size) if axis.per or axis.group is None else match[0]

    return parse(re.sub(r"\|?\b([A-Za-z_]\w*)\|?\*?", atom, layout))


def _predicting(behind: Mapping[str, Declared]) -> dict[str, Axis]:
    return {BEHIND: Axis(1 + max(declared.index[BEHIND] for declared in behind.values()))} if behind else {}


def _is_gauge(reader: str, gain: str, tensors: Mapping[str, Declared], family: Family) -> bool:
    if not {reader, bias_of(reader), gain, bias_of(gain)} <= tensors.keys():
        return False
    tied = {*family.tied, *family.tied.values()}
    (axis,) = tensors[gain].layout.names
    return reader not in tied and Atom(axis, Variance.DUAL) in tensors[reader].layout.dims


def _take_aliases(current: dict[str, str], family: Family, prefix: str) -> None:
    """Where only an alias of a tensor is stored, it is used as that tensor: its entry of `current` gets the tensor's
    name."""
    for alias, name in family.tied.items():
        meant = prefix + name if name in family.tensors else name
        stored = next((n for n in (prefix + alias, alias) if n in current), None)
        if stored is not None and meant not in current:
            current[meant] = current.pop(stored)


def _check_indices(family: Family, tensors: int, where: str) -> None:
    """SpecError for more layers than tensors, before a name is made for each."""
    groups = family.tensors, *family.optional.values(), *(head.tensors for head in family.heads.values())
    for key, axis in family.axes.items():
        if axis.size > tensors and any(f"{{{key}}}" in name for names in groups for name in names):
            raise _too_many(f"{key!r} (layers)", axis.size, tensors, where)


def _too_many(what: str, count: int, tensors: int, where: str) -> SpecError:
    return SpecError(
        f"{where}: config.json says {count} of {what}, and there are {tensors} tensors in all; does config.json belong "
        "to these weights?"
    )


def _stacks(
    family: Family, stored: Mapping[str, str], prefix: str, current: Mapping[str, str], where: str
) -> dict[str, tuple[str, ...]]:
    """The declared stacks that the file has in pieces. stored: canonical name → name of the whole tensor in the file.
    SpecError for more pieces than tensors, before a name is made for each."""
    out: dict[str, tuple[str, ...]] = {}
    there = {_numberless(name): _numberless(file) for name, file in current.items()} if family.stacks else {}
    for template, pieces in family.stacks.items():
        for index in indices(template, family.axes):
            name = template.format(**index)
            names = tuple(prefix + piece.format(**index) for piece in pieces)
            if name in stored and stored[name] not in current and not there.keys().isdisjoint(names):
                out[name] = tuple(there.get(piece, piece) for piece in names)
    first = {parse(family.tensors[template]).dims[:1] for template in family.stacks} if out else ()
    for (count,) in (Layout(dims).shape({key: axis.size for key, axis in family.axes.items()}) for dims in first):
        if count > len(current):
            raise _too_many("the pieces of a stack (experts)", count, len(current), where)
    return out


def _numberless(name: str) -> str:
    return re.sub(r"^(.*\.)\d+(?=\.)", r"\1*", name)


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
    heads = dict(named)
    for label, head in family.heads.items():
        if label in named or label not in there or any(head.tensors.keys() & o.tensors.keys() for o in named.values()):
            continue
        for rival, other in heads.items():
            if name := _clash(head, other):
                raise SpecError(
                    f"{where}: {name} may belong to the head {rival!r} (of a …{other.classes[0]}) or to "
                    f"{label!r} (of a …{head.classes[0]}), which read different spaces, and architectures in "
                    f"config.json says {class_name or 'nothing'}; set it to the class of this model"
                )
        heads[label] = head
    return list(heads.values())


def _clash(one: Head, other: Head) -> str | None:
    """A name for which two heads have different layouts."""
    both = (name for name in one.tensors if name in other.tensors)
    return next((name for name in both if one.tensors[name] != other.tensors[name]), None)


def _all_tied(head: Head, family: Family) -> bool:
    return all(name in family.tied for name in head.tensors)
