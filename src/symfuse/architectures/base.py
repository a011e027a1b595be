"""Families: a function from a config to a declaration, registered under its model type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from symfuse.errors import SpecError, UnknownArchitectureError
from symfuse.io.installed import resolved
from symfuse.messages import suggestion
from symfuse.spec import Axis, NormKind, Shift

# Fields with the number of layers, which declarations enumerate, and a bound above that of any model.
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
MOST_LAYERS = 10_000


class Config:
    """config.json with attribute access for sizes: `c.hidden_size`, or `c.get("n_inner", …)` where a field may be
    absent. `seen` are the fields that were read, with defaults filled in: they determine the declaration.

    Every value is checked: SpecError for a size that is not a positive integer, or a value whose type differs from that
    of its default.
    """

    def __init__(
        self, data: Mapping[str, Any], family: str, *, at: str = "", seen: dict[str, Any] | None = None
    ) -> None:
        known = ARCHITECTURES.get(family)
        spelt = {} if known is None else {key: data[old] for key, old in known.spelt.items() if old in data}
        self._data = {**spelt, **data}
        self.family = family
        self._at = at
        self.seen: dict[str, Any] = {} if seen is None else seen

    def __getattr__(self, key: str) -> int:
        value = self.seen[self._at + key] = self._needed(key)
        return self._positive(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """A field, dotted where it is nested, or its default."""
        *objects, field = key.split(".")
        data = self._data
        for name in objects:
            data = {} if data.get(name) is None else data[name]
            if not isinstance(data, Mapping):
                raise _wrong(name, data, _KINDS[dict])
        value = data.get(field)
        value = self.seen[self._at + key] = default if value is None else value
        kind: Any = (int, float) if isinstance(default, float) else type(default)
        if default is not None and (
            not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool)
        ):
            raise _wrong(self._at + key, value, _KINDS[type(default)])
        if default is not None and isinstance(value, float) and not math.isfinite(value):
            raise _wrong(self._at + key, value, "a finite number")
        return value

    def entries(self, key: str, kind: type, usual: Collection[Any] = ()) -> list[Any]:
        """A list whose entries are of a kind, or its default."""
        values: list[Any] = self.get(key, [*usual])
        if not all(isinstance(one, kind) and isinstance(one, bool) == (kind is bool) for one in values):
            raise _wrong(self._at + key, values, f"a list, each entry of it {_KINDS[kind]}")
        return values

    def side_by_side(self, **usual: list[int]) -> list[tuple[int, ...]]:
        """The entries of several lists of positive integers, by place; SpecError if they are empty, or not of one
        length."""
        lists = {key: self.entries(key, int, values) for key, values in usual.items()}
        sizes = {*map(len, lists.values())}
        if len(sizes) > 1 or 0 in sizes or any(one < 1 for values in lists.values() for one in values):
            text = ", ".join(f"{self._at}{key} {values}" for key, values in lists.items())
            raise SpecError(f"config.json: {text}; expected lists of one length, not empty, of positive integers")
        return [*zip(*lists.values(), strict=True)]

    def per_layer(self, key: str, usual: list[Any]) -> list[Any]:
        """A list with an entry for each layer, of the kind that those of its default are; the default where it is
        absent or empty."""
        values = self.entries(key, type(usual[0])) or usual
        if len(values) != len(usual):
            raise SpecError(
                f"config.json: {self._at}{key} has {len(values)} entries, expected one for each layer, {len(usual)}"
            )
        return values

    def is_null(self, key: str) -> bool:
        """Whether a field is there without a value, which in some classes is no default."""
        null = self._data.get(key, self) is None
        self.seen[f"{self._at}{key} is null"] = null
        return null

    def refuse(self, key: str, why: str) -> None:
        """SpecError if this field is set, which nothing here declares."""
        if self.get(key):
            raise SpecError(f"config.json: {self._at}{key} is {self.get(key)!r}: {why}, and that is not declared")

    def size(self, key: str, usual: int) -> int:
        """A positive integer, or its default."""
        return self._positive(key, self.get(key, usual))

    def under(self, key: str) -> Config:
        """The config of a part of the model, nested in this one; fields that are `seen` there are seen here."""
        return Config(self.get(key, {}), self.family, at=f"{self._at}{key}.", seen=self.seen)

    def completed(self) -> Config:
        """The config with what its class of `transformers` takes for absent fields, nested ones too, where it is
        installed; fields that are `seen` there are seen here."""
        values = resolved(self._data)
        whole = self._data if values is None else json.loads(json.dumps(values, default=str))  # lists, no tuples
        return Config(whole, self.family, at=self._at, seen=self.seen)

    def part(self, key: str, usual: str) -> Config:
        """The nested config of a part, as one of the part's own type (by default `usual`), for its bare class."""
        fields = {**self.get(key, {}), "tie_word_embeddings": self.tied}
        family = str(fields.setdefault("model_type", usual))
        fields.pop("architectures", None)
        return Config(fields, family, at=f"{self._at}{key}.", seen=self.seen)

    def pair(self, key: str, usual: int | None = None) -> tuple[int, int]:
        """A height and a width: two positive integers, or one for both; or the default."""
        value = self._data.get(key, usual) if usual is not None else self._needed(key)
        self.seen[self._at + key] = value
        both = value if isinstance(value, list) else [value, value]
        if len(both) != 2 or not all(type(size) is int and size > 0 for size in both):
            raise _wrong(self._at + key, value, "a positive integer, or a list of two")
        return both[0], both[1]

    def _needed(self, key: str) -> Any:
        if key not in self._data:
            raise SpecError(f"config.json: field {self._at + key!r}, which a {self.family} needs, is missing")
        return self._data[key]

    def _positive(self, key: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise _wrong(self._at + key, value, "a positive integer")
        if key in LAYERS and value > MOST_LAYERS:
            raise _wrong(self._at + key, value, f"at most {MOST_LAYERS:,} layers")
        return value

    def rotary_share(self, usual: float, before: str = "partial_rotary_factor") -> float:
        """The share of a head with rotary positions: since `transformers` 5 among the rotary settings, in older configs
        beside their scaling or in the field `before`, which are not `seen`, as they are only other spellings."""
        key, older = "rope_parameters.partial_rotary_factor", Config(self._data, self.family)
        share = self.get(key, float(older.get("rope_scaling.partial_rotary_factor", float(older.get(before, usual)))))
        if not 0 < share <= 1:
            raise _wrong(key, share, "a number above 0, up to 1")
        return float(share)

    @property
    def prefix(self) -> str:
        """The type, as a prefix of names."""
        return self.family.replace("-", "_") + "."

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding; `transformers` ties unless the config, or the family, says
        otherwise."""
        usual = self.family not in ARCHITECTURES or ARCHITECTURES[self.family].tied
        return self._data.get("tie_word_embeddings", usual) is not None and bool(self.get("tie_word_embeddings", usual))

    @property
    def class_name(self) -> str:
        """The class that will be loaded: the first in `architectures`, or nothing."""
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
    text = repr(value)
    return SpecError(f"config.json: {key} is {text[:60]}{'…' if len(text) > 60 else ''}, expected {expected}")


@dataclass(frozen=True)
class Head:
    """A head on top of the base model. classes: endings of the names of its classes (`ForMaskedLM`); tensors: their
    layouts, by full name. Heads of different classes may use one name for other layouts."""

    classes: tuple[str, ...]
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """The declaration of a family for one config.

    tensors: the base model's, by name without `prefix` (which checkpoints of a class with a head have).
    optional: parts of the base model that may be absent as a whole (a pooler). heads: by label.
    tied: alias → the tensor it equals; an alias may be absent, or be stored in the place of that tensor. absent: those
    that are aliases only where they are not stored. reads: of any head; what is absent or reads another axis is left
    out.
    stacks: tensors that files may have in pieces → the names of these, as Spec.stacks has them, without `prefix`.
    predictors: what layers behind the last one have, as `tensors`, beside the tensors of a layer; where a file has such
    layers, the stream may not be rotated.
    gauges: of any head, by full names; of them count those whose weight is there, untied, with a bias, and reads the
    norm's axis.
    buffers: patterns of derived tensors, dropped. legacy: old endings of names, or beginnings that end with a dot, →
    today's. See Spec for the rest.
    """

    axes: Mapping[str, Axis]
    tensors: Mapping[str, str]
    prefix: str = ""
    optional: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    heads: Mapping[str, Head] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    legacy: Mapping[str, str] = field(default_factory=dict)
    shifts: tuple[Shift, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm: NormKind = "layer"
    scales: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gauges: Mapping[str, str] = field(default_factory=dict)
    predictors: Mapping[str, str] = field(default_factory=dict)

    def plus(self, **more: Mapping[str, Any]) -> Family:
        """The family with more axes, tensors, reads and so on, which replace those of the same names."""
        fields: dict[str, Any] = {name: {**getattr(self, name), **added} for name, added in more.items()}
        return replace(self, **fields)

    def mapped(self, name: Callable[[str], str], axis: Callable[[str], str] = str) -> Family:
        """The family with other names of its tensors, and of its axes; `legacy` and `predictors` stay."""

        def layout(text: str) -> str:
            return re.sub(r"[A-Za-z_]\w*", lambda match: axis(match[0]), text)

        def of(tensors: Mapping[str, str]) -> dict[str, str]:
            return {name(template): layout(text) for template, text in tensors.items()}

        def pairs(names: Mapping[str, str]) -> dict[str, str]:
            return {name(one): name(other) for one, other in names.items()}

        def lists(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {name(one): tuple(map(name, others)) for one, others in names.items()}

        def shift(one: Shift) -> Shift:
            weight, into = (None if text is None else name(text) for text in (one.weight, one.into))
            return Shift(name(one.bias), layout(one.axis), weight, into)

        fields: dict[str, Any] = {key: pairs(getattr(self, key)) for key in ("tied", "absent", "scales", "gauges")}
        fields |= {key: lists(getattr(self, key)) for key in ("reads", "stacks")}
        return replace(
            self,
            axes={axis(key): replace(one, per=tuple(map(axis, one.per))) for key, one in self.axes.items()},
            tensors=of(self.tensors),
            optional={part: of(tensors) for part, tensors in self.optional.items()},
            heads={label: replace(head, tensors=of(head.tensors)) for label, head in self.heads.items()},
            outputs={field: layout(text) for field, text in self.outputs.items()},
            shifts=tuple(map(shift, self.shifts)),
            **fields,
        )


Declare = Callable[[Config], Family]


@dataclass(frozen=True, eq=False)
class Architecture:
    """A registered family: its declaration, (outside `transformers`) how to build the live module, whether the
    output head is the embedding where config.json does not say, and an example of a config (of one in `transformers`
    what its default lacks, or what takes the place of defaults that are of no model).
    spelt: fields that configs may have under another name → that name. parts: fields with the configs of its parts →
    the type that a part has where its config does not say. uncalled: the last parts of the names of layers whose
    weights its class reads without calling them."""

    model_type: str
    declare: Declare
    build: Callable[[Mapping[str, Any]], torch.nn.Module] | None = None
    tied: bool = True
    example: Mapping[str, Any] | None = None
    spelt: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    uncalled: tuple[str, ...] = ()

    def calls(self, layer: str) -> bool:
        """Whether its class calls the layer of that name."""
        return layer.rpartition(".")[2] not in self.uncalled


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(*model_types: str, **fields: Any) -> Callable[[Declare], Declare]:
    """Register a declaration under the `model_type`s of config.json that it covers. fields: of `Architecture`."""

    def register(declare: Declare) -> Declare:
        for model_type in model_types:
            ARCHITECTURES[model_type] = Architecture(model_type, declare, **fields)
        return declare

    return register


def lookup(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a config; UnknownArchitectureError names the type and those that are known."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        named = "has no config.json, or one without model_type"
        named = named if model_type is None else f"config.json has model_type {model_type!r}"
        near = suggestion(model_type, ARCHITECTURES) if isinstance(model_type, str) else ""
        raise UnknownArchitectureError(
            f"{where}: {named}; symfuse has declarations for {len(ARCHITECTURES)} types (docs/families.md){near}. "
            "Set model_type if it is one of them, or add a declaration (`symfuse suggest` drafts one, --declare uses "
            "it: docs/declare.md)"
        )
    return ARCHITECTURES[model_type]


def is_declared(config: Mapping[str, Any]) -> bool:
    """Whether there is a declaration of a config's type, and of the types of its parts."""
    known = ARCHITECTURES.get(str(config.get("model_type")))
    if known is None or not known.parts:
        return known is not None
    whole = resolved(config) or config
    parts = ((whole.get(key), usual) for key, usual in known.parts.items())
    types = (part.get("model_type", usual) if isinstance(part, Mapping) else usual for part, usual in parts)
    return all(str(model_type) in ARCHITECTURES for model_type in types)


def declaration(config: Mapping[str, Any], names: Collection[str], where: str) -> tuple[Family, str]:
    """The declaration for a config, with the ties of a file that has tensors of these names; and the model's class.
    SpecError for fields of the config that are not as they must be, UnknownArchitectureError for an unknown family."""
    c = Config(config, str(config.get("model_type")))
    architecture = lookup(config, where)
    try:
        family, class_name = architecture.declare(c), c.class_name
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    there = {modern(name, family.legacy) for name in names} if family.absent else ()
    ties = {**family.tied, **{alias: name for alias, name in family.absent.items() if alias not in there}}
    return replace(family, tied=ties), class_name


def modern(name: str, legacy: Mapping[str, str]) -> str:
    """A name with an old ending or beginning replaced by the current one (`Family.legacy`)."""
    for old, new in legacy.items():
        if old.endswith(".") and name.startswith(old):
            return new + name[len(old) :]
        if name.endswith(old):
            return name[: -len(old)] + new
    return name
